"""Faults of the convolution history."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.faults.base import Course, Fault, Hit, struck
from treejax.policies import Path, Policy
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import advance_history, path_in_scratch
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch


@dataclasses.dataclass(frozen=True)
class History(Fault):
    """A fault that leaves another history in the struck layer.

    The first layer's inputs are those of the tokens alone: where the wrong window holds the right
    tokens, nothing is wrong.
    """

    needs: str = "recurrent"

    def window(self, course: Course) -> tuple[np.ndarray, np.ndarray]:
        """Rows [T, B, P] that are taken for the path, and how many of them, [T, B]."""
        return course.paths, np.zeros_like(course.lengths)

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        right = _tail(course, course.paths, course.lengths)
        return (right != _tail(course, *self.window(course))).any(axis=2)

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

    def window(self, course: Course) -> tuple[np.ndarray, np.ndarray]:
        rows = np.broadcast_to(np.arange(course.paths.shape[2]), course.paths.shape)
        return rows, course.lengths

    def wrong(self, state: State, scratch: Scratch, choice: Choice, hit: Hit) -> Array:
        rows = jnp.arange(choice.path.shape[1], dtype=jnp.int32)
        path = Path(nodes=jnp.broadcast_to(rows, choice.path.shape), length=choice.length)
        return _gathered(state, scratch, path)


class PreviousCount(History):
    """The history is shifted by the step before's count."""

    def window(self, course: Course) -> tuple[np.ndarray, np.ndarray]:
        return np.maximum(course.paths, 0), course.before

    def wrong(self, state: State, scratch: Scratch, choice: Choice, hit: Hit) -> Array:
        path = path_in_scratch(choice.path, hit.before.length, scratch.place)
        return _gathered(state, scratch, path)


def _gathered(state: State, scratch: Scratch, path: Path) -> Array:
    gather = jax.vmap(advance_history)
    return jnp.stack([gather(state.conv[i], x, path) for i, x in enumerate(scratch.conv)])


def _tail(course: Course, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[T, B, W] the last tokens once these rows of the trees have followed."""
    kept = course.tails.shape[2]
    text = np.concatenate([course.tails, np.take_along_axis(course.tokens, rows, axis=2)], axis=2)
    return np.take_along_axis(text, lengths[..., None] + np.arange(kept), axis=2)
