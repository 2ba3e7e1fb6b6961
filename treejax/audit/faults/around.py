"""Policies around a policy: where a fault sits inside a scan or a commit.

They hold traced data and live only while one step is traced.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treejax.audit.faults.base import Hit, masked, nth, struck
from treejax.audit.faults.carries import decayed, graft
from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.policies import Path, Policy, Scanned
from treejax.shapes import Array
from treejax.tree import Topology, Tree, describe


class Kept(NamedTuple):
    """What a scan began with, beside the scratch that it left."""

    scratch: Any
    operands: Operands
    carry: Any
    plan: Any


def bare(scratch: Any) -> Any:
    """What the policy itself left of one layer."""
    while isinstance(scratch, Kept):
        scratch = scratch.scratch
    return scratch


@dataclasses.dataclass(eq=False)
class Around:
    """A policy that keeps what its scans read, and else does what ``inner`` does."""

    inner: Policy
    hit: Hit
    name: str = dataclasses.field(init=False)

    def __post_init__(self):
        self.name = self.inner.name

    @property
    def implementation(self) -> str:
        return self.inner.implementation

    def init(self, R: Array, key_heads: int) -> Any:
        return self.inner.init(R, key_heads)

    def plan(self, topology: Topology) -> Any:
        return self.inner.plan(topology)

    def scan(self, carry: Any, layer: int, operands: Operands, plan: Any) -> Scanned:
        made = self.inner.scan(carry, layer, operands, plan)
        return made._replace(scratch=Kept(made.scratch, operands, carry, plan))

    def commit(self, carry: Any, scratch: Sequence[Any], path: Path) -> Any:
        return self.inner.commit(carry, [kept.scratch for kept in scratch], path)

    def read(self, carry: Any) -> Array:
        return self.inner.read(carry)

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        return self.inner.buffers(config, capacity, batch)


@dataclasses.dataclass(eq=False)
class OtherOperands(Around):
    """Commits, in the struck layer and head, as if ``change`` had met the operands of one row of
    the path before the scan.

    ``change(operands, rows)`` alters every head of the marked rows [B, N].
    """

    change: Callable[[Operands, Array], Operands]

    def commit(self, carry: Any, scratch: Sequence[Any], path: Path) -> Any:
        right = super().commit(carry, scratch, path)
        place = self.hit.row % jnp.maximum(path.length, 1)
        node = jnp.take_along_axis(path.nodes, place[:, None], axis=1)
        again = []
        for layer, kept in enumerate(scratch):
            rows = jnp.arange(kept.operands.g.shape[1])[None, :] == node
            operands = self.change(kept.operands, rows)
            again.append(self.inner.scan(kept.carry, layer, operands, kept.plan).scratch)
        return graft(right, self.inner.commit(carry, again, path), self.hit)


class Sized(NamedTuple):
    """A plan, and the rows of each tree [B] that are in use."""

    plan: Any
    size: Array


@dataclasses.dataclass(eq=False)
class FillersDecay(Around):
    """Commits decay, in the struck layer and head, by what the unused rows of the tree say."""

    def plan(self, topology: Topology) -> Sized:
        return Sized(self.inner.plan(topology), topology.size)

    def scan(self, carry: Any, layer: int, operands: Operands, plan: Sized) -> Scanned:
        made = self.inner.scan(carry, layer, operands, plan.plan)
        return made._replace(scratch=Kept(made.scratch, operands, carry, plan))

    def commit(self, carry: Any, scratch: Sequence[Any], path: Path) -> Any:
        right = super().commit(carry, scratch, path)
        logs = jnp.stack([kept.operands.g for kept in scratch])  # [Lg, B, N, Hv]
        unused = jnp.arange(logs.shape[2])[None, :] >= scratch[0].plan.size[:, None]
        total = jnp.where(unused[None, :, :, None], logs, 0.0).sum(axis=2)
        here = struck(self.hit, logs.shape[0], logs.shape[3])
        return decayed(right, jnp.where(here, total, 0.0))


class Plans(NamedTuple):
    """The plan of the tree, and that of the tree with another parent."""

    right: Any
    wrong: Any


@dataclasses.dataclass(eq=False)
class OtherParent(Around):
    """One row of the tree continues the row before it in the struck layer's recurrence and head.

    ``inner`` must be a policy itself: the scratch of one that keeps more cannot be mixed.
    """

    def plan(self, topology: Topology) -> Plans:
        parent, rows = topology.parent, jnp.arange(topology.parent.shape[1])[None, :]
        row = nth((parent >= 0) & (parent != rows - 1), self.hit.row)
        moved = masked(self.hit, parent) & (rows == row[:, None]) & (rows > 0)
        parent = jnp.where(moved, rows - 1, parent)
        depth = topology.max_depth + 1  # a neighbour may be the deepest node
        tree = Tree(parent, parent, jnp.zeros_like(parent), topology.size, max_depth=depth)
        return Plans(self.inner.plan(topology), self.inner.plan(describe(tree)))

    def scan(self, carry: Any, layer: int, operands: Operands, plan: Plans) -> Scanned:
        right = self.inner.scan(carry, layer, operands, plan.right)
        wrong = self.inner.scan(carry, layer, operands, plan.wrong)
        layers = jax.tree.leaves(carry)[0].shape[0]
        heads = operands.g.shape[2]
        head = jnp.arange(heads)[None, :] == (self.hit.head % heads)[:, None]
        head = head & (self.hit.now & (self.hit.layer % layers == layer))[:, None]  # [B, Hv]

        def mix(right: Array, wrong: Array) -> Array:  # [B, N, Hv, ..]; keys are the same in both
            if right.shape[2] != heads:
                return right
            return jnp.where(
                head.reshape(len(head), 1, heads, *[1] * (right.ndim - 3)), wrong, right
            )

        scratch = jax.tree.map(mix, right.scratch, wrong.scratch)
        return Scanned(mix(right.outputs, wrong.outputs), scratch, right.carry)

    def commit(self, carry: Any, scratch: Sequence[Any], path: Path) -> Any:
        return self.inner.commit(carry, scratch, path)
