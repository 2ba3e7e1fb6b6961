"""Faults of the recurrent matrices: what is committed, from which rows, with which numbers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treejax.audit.faults.around import FillersDecay, OtherOperands, OtherParent
from treejax.audit.faults.base import Course, Fault, Hit, nth
from treejax.audit.faults.carries import (
    DEFERRED,
    graft,
    matrices,
    with_matrices,
)
from treejax.delta_rule import Operands
from treejax.policies import Policy
from treejax.policies.base import Path
from treejax.policies.replay import Recorded
from treejax.policies.ring import Rows
from treejax.policies.wy import HIGHEST, Factors, rebuild
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import path_in_scratch
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch
from treejax.tree import describe

SCRATCHES = ("replay", "wy", "ring", "fused")
"""Policies whose scratch another's publishing can be made to read."""


def narrowed(x: Array) -> Array:
    """Rounded to bfloat16 and back; the compiler must not take that for nothing."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


@dataclasses.dataclass(frozen=True)
class Recurrent(Fault):
    """A fault that leaves another carry."""

    needs: str = "recurrent"

    def wrong(self, state: State, scratch: Scratch, choice: Choice, right: Any, hit: Hit) -> Any:
        """The carry of which the struck layer and head are taken."""
        return right

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        right = after.recurrent
        return after.replace(
            recurrent=graft(right, self.wrong(state, scratch, choice, right, hit), hit)
        )


class CommitSkipped(Recurrent):
    """The carry of the scans goes on; a ring's new slots keep what they held."""

    def wrong(self, state: State, scratch: Scratch, choice: Choice, right: Any, hit: Hit) -> Any:
        return scratch.carry


class SiblingPublished(Recurrent):
    """The path's last node is a sibling of the right one."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        last = np.take_along_axis(course.paths, course.lengths[..., None] - 1, axis=2)
        above = np.take_along_axis(course.parents, last, axis=2)
        return ((course.parents == above).sum(axis=2) > 1) & (last[..., 0] > 0)

    def wrong(self, state: State, scratch: Scratch, choice: Choice, right: Any, hit: Hit) -> Any:
        end = jnp.maximum(choice.length - 1, 0)[:, None]
        last = jnp.maximum(jnp.take_along_axis(choice.path, end, axis=1), 0)
        parent, rows = scratch.tree.parent, jnp.arange(scratch.tree.capacity)[None, :]
        above = jnp.take_along_axis(parent, last, axis=1)
        siblings = (parent == above) & (rows != last) & (rows < scratch.tree.size[:, None])
        other = jnp.where(siblings.any(axis=1), nth(siblings, hit.row), last[:, 0])
        steps = jnp.arange(choice.path.shape[1])[None, :]
        nodes = jnp.where(steps == end, other[:, None], choice.path)
        path = path_in_scratch(nodes, choice.length, scratch.place)
        return state.policy.commit(scratch.carry, scratch.recurrent, path)


class PreviousCount(Recurrent):
    """As many nodes are committed as in the step before: too few, or the window's next rows too."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        if policy.name in DEFERRED:  # rows beyond the count are never read
            return (course.before < course.lengths) & (course.before > 0)
        return (course.before != course.lengths) & (course.before > 0)

    def wrong(self, state: State, scratch: Scratch, choice: Choice, right: Any, hit: Hit) -> Any:
        path = path_in_scratch(choice.path, choice.length, scratch.place)
        count = scratch.conv[0].shape[1]
        end = jnp.maximum(path.length - 1, 0)[:, None]
        beyond = jnp.arange(path.nodes.shape[1], dtype=jnp.int32)[None, :] - end
        last = jnp.maximum(jnp.take_along_axis(path.nodes, end, axis=1), 0)
        nodes = jnp.where(path.nodes >= 0, path.nodes, jnp.minimum(last + beyond, count - 1))
        path = Path(nodes=nodes, length=hit.before.length)
        return state.policy.commit(scratch.carry, scratch.recurrent, path)


class OtherSlot(Recurrent):
    """The state of the neighbouring sequence."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return course.always & (course.lengths.shape[1] > 1)

    def wrong(self, state: State, scratch: Scratch, choice: Choice, right: Any, hit: Hit) -> Any:
        return jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=1), right)


class RoundedState(Recurrent):
    """The stored matrix in bfloat16."""

    def wrong(self, state: State, scratch: Scratch, choice: Choice, right: Any, hit: Hit) -> Any:
        return with_matrices(right, narrowed(matrices(right)))


@dataclasses.dataclass(frozen=True)
class PublishedByAnother(Recurrent):
    """Publishing takes the scratch for that of another policy.

    ``ring`` and ``fused`` leave each row's own decay, ``wy`` decays summed from the root: each is
    read as the other. ``replay``'s record is rebuilt as by ``wy``, its values for pseudo-values.
    """

    only_xla: bool = True

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return course.lengths > 1  # at the root own and summed decay are the same

    def wrong(self, state: State, scratch: Scratch, choice: Choice, right: Any, hit: Hit) -> Any:
        related = describe(scratch.tree).ancestors.astype(jnp.float32)
        above = scratch.tree.parent

        def summed(g: Array) -> Array:
            return jnp.einsum("bij,bjh->bih", related, g, precision=HIGHEST)

        def own(total: Array) -> Array:
            parents = jnp.take_along_axis(total, jnp.maximum(above, 0)[:, :, None], axis=1)
            return jnp.where(above[:, :, None] >= 0, total - parents, total)

        path = path_in_scratch(choice.path, choice.length, scratch.place)
        layers = scratch.recurrent
        if isinstance(layers[0], Recorded):
            factors = [
                Factors(r.beta[..., None] * r.v, r.k, summed(jnp.log(jnp.maximum(r.alpha, 1e-30))))
                for r in layers
            ]
            once = jax.vmap(lambda R, f, p: rebuild(R, f, p, HIGHEST))
            return jnp.stack([once(scratch.carry[i], f, path) for i, f in enumerate(factors)])
        if isinstance(layers[0], Rows):
            layers = [rows.replace(g=summed(rows.g)) for rows in layers]
        else:
            layers = [factors.replace(decay=own(factors.decay)) for factors in layers]
        return state.policy.commit(scratch.carry, layers, path)


@dataclasses.dataclass(frozen=True)
class RoundedGate(Fault):
    """Decay and write strength of one row of the path are bfloat16 where it is committed, and
    float32 where it is verified."""

    needs: str = "recurrent"

    def policy(self, policy: Policy, hit: Hit) -> Policy:
        def change(operands: Operands, rows: Array) -> Operands:
            marked = rows[:, :, None]
            alpha = jnp.where(marked, narrowed(operands.alpha), operands.alpha)
            return operands.replace(
                alpha=alpha,
                g=jnp.where(marked & (alpha > 0), jnp.log(alpha), operands.g),
                beta=jnp.where(marked, narrowed(operands.beta), operands.beta),
            )

        return OtherOperands(policy, hit, change)


@dataclasses.dataclass(frozen=True)
class PackedParent(Fault):
    """A row's recurrence continues the row before it."""

    needs: str = "recurrent"

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        rows = np.arange(course.parents.shape[2])
        return ((course.parents >= 0) & (course.parents != rows - 1)).any(axis=2)

    def policy(self, policy: Policy, hit: Hit) -> Policy:
        return OtherParent(policy, hit)


@dataclasses.dataclass(frozen=True)
class FillerDecays(Fault):
    """Decays of the rows that no node uses reach the state."""

    needs: str = "recurrent"

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return course.sizes < course.parents.shape[2]

    def policy(self, policy: Policy, hit: Hit) -> Policy:
        return FillersDecay(policy, hit)
