"""Faults of the attention rows, keys and values alike."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from treejax import layers
from treejax.audit.faults.base import Course, Fault, Hit, masked, nth, struck
from treejax.policies import Policy
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import publish_path
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch


@dataclasses.dataclass(frozen=True)
class Rows(Fault):
    """A fault that leaves other rows in the struck layer and head."""

    needs: str = "attention"

    def wrong(self, state: State, scratch: Scratch, choice: Choice) -> State:
        """The state of which the struck rows are taken."""
        return state

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        wrong, (count, _, _, heads, _) = self.wrong(state, scratch, choice), after.keys.shape
        here = struck(hit, count, heads)[:, :, None, :, None]
        return after.replace(
            keys=jnp.where(here, wrong.keys, after.keys),
            values=jnp.where(here, wrong.values, after.values),
        )


class WrongRemap(Rows):
    """The window's first rows are taken for the path."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return course.scattered.any(axis=2)

    def wrong(self, state: State, scratch: Scratch, choice: Choice) -> State:
        rows = jnp.arange(choice.path.shape[1], dtype=jnp.int32)[None, :]
        return publish_path(
            state, scratch, choice.replace(path=jnp.where(choice.path >= 0, rows, -1))
        )


class WrittenEarly(Rows):
    """The path lands one row early, as a write that a limit clamps: on a row of the prefix."""

    def wrong(self, state: State, scratch: Scratch, choice: Choice) -> State:
        return publish_path(state.replace(length=state.length - 1), scratch, choice)


class RotaryByRow(Fault):
    """The key of one node is rotated by its row in the window and not by its depth."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return course.scattered.any(axis=2)

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        count, _, _, heads, _ = after.keys.shape
        depths = jnp.arange(choice.path.shape[1], dtype=jnp.int32)[None, :]
        depth = nth((choice.path >= 0) & (choice.path != depths), hit.row)
        node = jnp.take_along_axis(choice.path, depth[:, None], axis=1)[:, 0]
        batch, slot = jnp.arange(len(depth)), state.length + depth
        rows: Array = after.keys[:, batch, slot]  # [La, B, Hkv, D]
        # Rotating by a difference of positions is rotating by the other position from the start.
        more = jnp.broadcast_to((node - depth)[None, :], rows.shape[:2])
        turned = layers.rotary(rows, more, state.config)
        here = struck(hit, count, heads)[..., None] & masked(hit, rows, axis=1)
        return after.replace(keys=after.keys.at[:, batch, slot].set(jnp.where(here, turned, rows)))
