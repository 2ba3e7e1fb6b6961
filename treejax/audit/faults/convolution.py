"""Faults of the convolution history."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.faults.base import Course, Fault, Hit, struck
from treejax.audit.faults.carries import path_in
from treejax.policies import Path, Policy
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import advance_history
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch


@dataclasses.dataclass(frozen=True)
class History(Fault):
    """A fault that leaves another history in the struck layer."""

    needs: str = "recurrent"

    def wrong(self, state: State, scratch: Scratch, choice: Choice, hit: Hit) -> Array:
        """The histories [Lg, B, K-1, C] of which the struck layer is taken."""
        return state.conv

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        here = struck(hit, after.conv.shape[0])[:, :, None, None]
        return after.replace(
            conv=jnp.where(here, self.wrong(state, scratch, choice, hit), after.conv)
        )


class GatherSkipped(History):
    """The history stays as it was."""


class StorageOrder(History):
    """The window's first rows are taken for the path."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        last = np.take_along_axis(course.paths, course.lengths[..., None] - 1, axis=2)[..., 0]
        return last != course.lengths - 1

    def wrong(self, state: State, scratch: Scratch, choice: Choice, hit: Hit) -> Array:
        rows = jnp.arange(choice.path.shape[1], dtype=jnp.int32)
        path = Path(nodes=jnp.broadcast_to(rows, choice.path.shape), length=choice.length)
        return _gathered(state, scratch, path)


class PreviousCount(History):
    """The history is shifted by the step before's count."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return (course.before != course.lengths) & (course.before > 0)

    def wrong(self, state: State, scratch: Scratch, choice: Choice, hit: Hit) -> Array:
        path = path_in(scratch, choice)
        return _gathered(state, scratch, path.replace(length=hit.before.length))


def _gathered(state: State, scratch: Scratch, path: Path) -> Array:
    gather = jax.vmap(advance_history)
    return jnp.stack([gather(state.conv[i], x, path) for i, x in enumerate(scratch.conv)])
