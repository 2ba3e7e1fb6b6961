"""Training checkpoints: written beside the run, complete or absent, the last two kept.

A checkpoint holds all that a run's future depends on: masters, optimizer state, the number of
steps done, the schedule's length once it is known, and the seconds spent. The data order is a
function of the step. Invariant: a run that is killed at any moment continues from its last
complete checkpoint and ends with the parameters that it would have had.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct

from treejax import parameters, saving
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
    """The checkpoints of one run folder, written in the background."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder).absolute()
        self._writer = ThreadPoolExecutor(1)
        self._pending: Future[Path] | None = None

    def has_any(self) -> bool:
        return saving.latest_step(self._folder) is not None

    def note(self) -> str | None:
        """One line for the user if the last save was not completed."""
        return saving.unfinished_note(self._folder, saving.latest_step(self._folder))

    def save(self, state: TrainState, progress: Progress) -> None:
        """Write in the background; a second call waits for the first to be complete."""
        self.wait()
        if saving.latest_step(self._folder) == progress.step:
            return
        # Copied to the host now, because the next step donates the device's buffers.
        state = jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
        tree = {"state": state, "progress": progress}
        self._pending = self._writer.submit(
            saving.save_checkpoint, self._folder, progress.step, tree, KEPT
        )

    def wait(self) -> None:
        """Return when the last save is complete on disk."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def load(self, settings: TrainSettings) -> tuple[TrainState, Progress]:
        """The last complete checkpoint, placed on the default device."""
        target = {"state": abstract_state(settings), "progress": Progress(0, 0, 0.0)}
        tree = saving.restore_checkpoint(self._folder, target).tree
        return tree["state"], tree["progress"]

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.shutdown()
