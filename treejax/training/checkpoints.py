"""Training checkpoints by Orbax: written beside the run, complete or absent, the last two kept.

A checkpoint holds all that a run's future depends on: masters, optimizer state, the number of
steps done, the schedule's length once it is known, and the seconds spent. The data order is a
function of the step. Invariant: a run that is killed at any moment continues from its last
complete checkpoint and ends with the parameters that it would have had.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct
from orbax.checkpoint import v1 as ocp

from treejax import parameters
from treejax.training.optimizer import make_optimizer
from treejax.training.settings import TrainSettings

KEPT = 2


class TrainState(struct.PyTreeNode):
    """What a step changes: float32 masters and the optimizer's state."""

    params: dict[str, Any]
    optimizer: Any


class Progress(NamedTuple):
    """Where a run stands: steps done, the schedule's length (-1 until it is known), seconds."""

    step: int
    total: int
    seconds: float


def init_state(settings: TrainSettings) -> TrainState:
    """Fresh masters and optimizer state."""
    params = parameters.init(settings.model, jax.random.key(settings.seed))
    return TrainState(params, make_optimizer(settings.optimizer).init(params))


def abstract_state(settings: TrainSettings) -> TrainState:
    """Shapes and dtypes of ``init_state``, nothing computed."""
    return jax.eval_shape(lambda: init_state(settings))


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: str | Path):
        self._orbax = ocp.training.Checkpointer(
            str(Path(folder).absolute()),
            preservation_policy=ocp.training.preservation_policies.LatestN(KEPT),  # type: ignore[arg-type]
            cleanup_tmp_directories=True,
        )
        self._pending: Any = None

    def has_any(self) -> bool:
        return self._orbax.latest is not None

    def save(self, state: TrainState, progress: Progress) -> None:
        """Write in the background; a second call waits for the first to be complete."""
        self.wait()
        if self._orbax.latest is not None and self._orbax.latest.step == progress.step:
            return
        # Copied to the host now, because the next step donates the device's buffers.
        tree = {"state": state, "progress": _as_arrays(progress)}
        tree = jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)
        self._pending = self._orbax.save_async(int(progress.step), tree)

    def wait(self) -> None:
        """Return when the last save is complete on disk."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def load(self, settings: TrainSettings) -> tuple[TrainState, Progress]:
        """The last complete checkpoint, placed on the default device."""
        tree = {
            "state": abstract_state(settings),
            "progress": _as_arrays(Progress(0, 0, 0.0)),
        }
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        tree = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )
        loaded = self._orbax.load(abstract_state=tree)
        kept = loaded["progress"]
        progress = Progress(int(kept["step"]), int(kept["total"]), float(kept["seconds"]))
        return loaded["state"], progress

    def close(self) -> None:
        self.wait()
        self._orbax.close()


def _as_arrays(progress: Progress) -> dict[str, np.ndarray]:
    return {
        "step": np.array(progress.step, np.int32),
        "total": np.array(progress.total, np.int32),
        "seconds": np.array(progress.seconds, np.float32),
    }
