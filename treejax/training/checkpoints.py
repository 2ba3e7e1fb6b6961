"""Training checkpoints by Orbax: written beside the run, complete or absent, the last two kept.

A checkpoint holds all that a run's future depends on: masters, optimizer state, the number of
steps done, the schedule's length once it is known, and the seconds spent. The data order is a
function of the step. Invariant: a run that is killed at any moment continues from its last
complete checkpoint and ends with the parameters that it would have had.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from orbax.checkpoint import v1 as ocp

from treejax import parameters
from treejax.shapes import Array
from treejax.training.optimizer import make_optimizer
from treejax.training.settings import TrainSettings

KEPT = 2


class TrainState(struct.PyTreeNode):
    """What a step changes: float32 masters and the optimizer's state."""

    params: dict[str, Any]
    optimizer: Any


class Progress(struct.PyTreeNode):
    """Where a run stands. ``total`` is -1 until the schedule's length is known."""

    step: int | Array
    total: int | Array
    seconds: float | Array


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
            Path(folder).absolute(),
            preservation_policy=ocp.training.preservation_policies.LatestN(KEPT),
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
            "progress": jax.eval_shape(lambda: _as_arrays(Progress(0, 0, 0.0))),
        }
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        tree = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )
        loaded = self._orbax.load(abstract_state=tree)
        progress = loaded["progress"]
        return loaded["state"], Progress(
            int(progress.step), int(progress.total), float(progress.seconds)
        )

    def close(self) -> None:
        self.wait()
        self._orbax.close()


def _as_arrays(progress: Progress) -> Progress:
    return Progress(
        jnp.int32(progress.step), jnp.int32(progress.total), jnp.float32(progress.seconds)
    )
