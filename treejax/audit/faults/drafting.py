"""Faults of the MTP head's cache: they cannot change the text, only what is drafted."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from treejax.audit.faults.base import Course, Fault, Hit
from treejax.drafters.base import Draft
from treejax.policies import Policy
from treejax.shapes import Array
from treejax.steps.select import Choice


@dataclasses.dataclass(frozen=True)
class Head(Fault):
    """A fault of the MTP head's cache."""

    drafted: bool = True


class OneRowOff(Head):
    """The rows that this step stored lie one slot too far."""

    def observed(self, before: Draft, after: Draft, hit: Hit) -> Draft:
        memory = after.memory
        slots = jnp.arange(memory.keys.shape[1])[None, :]
        first = before.memory.rows[:, None]
        moved = (slots >= first) & (slots < memory.rows[:, None]) & hit.now[:, None]
        moved = moved[:, :, None, None]

        def move(cache: Array) -> Array:
            return jnp.where(moved, jnp.roll(cache, 1, axis=1), cache)

        return after.replace(
            memory=memory.replace(keys=move(memory.keys), values=move(memory.values))
        )


class BeforeNorm(Head):
    """One row is handed over as it was before the final norm."""

    def shown(self, params: Any, hidden: Array, choice: Choice, hit: Hit) -> Array:
        place = hit.row % jnp.maximum(choice.length, 1)
        node = jnp.take_along_axis(choice.path, place[:, None], axis=1)
        here = (jnp.arange(hidden.shape[1])[None, :] == node) & hit.now[:, None]
        # The head normalises what it is given, so that the length of a row does not matter.
        weight = (1.0 + params["norm"].astype(jnp.float32))[None, None]
        before = (hidden.astype(jnp.float32) / weight).astype(hidden.dtype)
        return jnp.where(here[:, :, None], before, hidden)


class HiddenOrder(Head):
    """The window's first rows are handed over for the path's."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return course.scattered.any(axis=2)

    def shown(self, params: Any, hidden: Array, choice: Choice, hit: Hit) -> Array:
        batch, count = hidden.shape[:2]
        steps = choice.path.shape[1]
        real = (choice.path >= 0) & hit.now[:, None]
        nodes = jnp.where(real, choice.path, count + jnp.arange(steps)[None, :])  # dropped
        first = hidden[:, :steps]
        sequence = jnp.arange(batch)[:, None]
        return hidden.at[sequence, nodes].set(first, mode="drop", unique_indices=True)
