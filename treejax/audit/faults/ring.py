"""Faults of deferred writes: the ring's cursor, and what the checkpoint has of the ring."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from treejax.audit.faults.base import Course, Fault, Hit
from treejax.audit.faults.carries import DEFERRED, graft
from treejax.policies import Policy
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch


@dataclasses.dataclass(frozen=True)
class Deferred(Fault):
    """A fault of the policies that defer their writes."""

    policies: tuple[str, ...] | None = DEFERRED
    needs: str = "recurrent"


class CursorTwice(Deferred):
    """The count of the ring's rows moves on twice: slots that hold older commits become current."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        kept, _, filled = ring_course(policy, course)
        return kept + course.lengths < filled

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        carry: Any = after.recurrent
        more: Array = jnp.where(hit.now, choice.length, 0)[None]
        return after.replace(recurrent=carry.replace(count=carry.count + more))


class OutOfStep(Deferred):
    """The ring was emptied and the checkpoint does not have its rows."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return ring_course(policy, course)[1]

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        right: Any = after.recurrent
        before: Any = state.recurrent
        return after.replace(recurrent=graft(right, right.replace(R=before.R), hit))


def ring_course(policy: Any, course: Course) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[T, B] each: rows that stay in the ring when a step commits, whether its verify writes them,
    and slots that ever held a row."""
    length, rows = getattr(policy, "length", 1), policy.rows
    steps, batch = course.lengths.shape
    count, commits, filled = (np.zeros(batch, int) for _ in range(3))
    made = []
    for t in range(steps):
        longest = course.depths[t].max(axis=1) + 1
        due = ((commits >= length) | (count + longest > rows)) & (count > 0)
        kept = np.where(due, 0, count)
        made.append((kept, due, filled))
        count, commits = kept + course.lengths[t], np.where(due, 0, commits) + 1
        filled = np.maximum(filled, count)
    kept, due, filled = (np.stack(each) for each in zip(*made, strict=True))
    return kept, due, filled
