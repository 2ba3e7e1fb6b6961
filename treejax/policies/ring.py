"""Ring: a checkpoint of the state and the factors committed since; written every few commits.

Verifying solves against checkpoint plus ring (ReplaySSM's deferred write, here with trees).
Publishing gathers the factors of the accepted nodes, scattered over the tree's rows, behind those
in the ring by an index map. The durable matrix is written inside a verify, after ``length`` commits
or when the ring could not take another path, each sequence for itself.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.config import ModelConfig
from treejax.delta_rule import Operands, value_heads
from treejax.policies.base import Path, Scanned, by_sequence, stack
from treejax.policies.wy import WY, check_precision, product_precision, solve_tree
from treejax.shapes import Array
from treejax.tree import Topology


class Rows(struct.PyTreeNode):
    """Factors u [.., T, Hv, dv], k [.., T, Hk, dk] and log decays g [.., T, Hv], each row's own."""

    u: Array
    k: Array
    g: Array


class Checkpoint(struct.PyTreeNode):
    """The carry.

    Attributes:
      R: [Lg, B, Hv, dv, dk] float32, the state before the ring's rows.
      ring: factors [Lg, B, W, ...] committed since, in the order of the text.
      count: [1, B] int32 rows in the ring.
      commits: [1, B] int32 commits in the ring.
      written: [1, B] bool whether this verify has written the ring into R.
    """

    R: Array
    ring: Rows
    count: Array
    commits: Array
    written: Array


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring policy.

    Attributes:
      length: commits before the matrix is written; each verify writes what waits where the kernel
        has no room to commit and solve at once.
      rows: of the ring. A path that may be longer than this is written at once.
      precision: of the solve's products: "ieee" is float32; "bf16x3" and "tf32" are for GPUs.
      keys: dtype of the ring's keys: that of the operands, float32 in treejax's models.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".
    """

    name: ClassVar[str] = "ring"
    length: int = 2
    rows: int = 32
    precision: str = "ieee"
    keys: str = "float32"
    implementation: str = "xla"

    def __post_init__(self):
        check_precision(self.precision)
        if self.length < 1 or self.rows < 1:
            raise ValueError(f"length {self.length} and rows {self.rows} must be at least 1")
        if self.keys not in ("float32", "bfloat16"):
            raise ValueError(f"keys is {self.keys!r}, expected float32 or bfloat16")

    def init(self, R: Array, key_heads: int) -> Checkpoint:
        layers, batch, heads, dv, dk = R.shape
        rows = layers, batch, self.rows
        ring = Rows(
            u=jnp.zeros((*rows, heads, dv), jnp.float32),
            k=jnp.zeros((*rows, key_heads, dk), jnp.dtype(self.keys)),
            g=jnp.zeros((*rows, heads), jnp.float32),
        )

        def none(dtype: type) -> Array:  # leaves of their own: a caller may donate them
            return jnp.zeros((1, batch), dtype)

        return Checkpoint(R, ring, none(jnp.int32), none(jnp.int32), none(jnp.bool_))

    def plan(self, topology: Topology) -> Topology:
        return topology

    def scan(self, carry: Checkpoint, layer: int, operands: Operands, plan: Topology) -> Scanned:
        if operands.k.dtype != carry.ring.k.dtype:
            name = operands.k.dtype.name
            raise ValueError(f"keys are {name} and the ring holds {self.keys}: use keys={name!r}")
        if self.implementation != "xla":
            return self._scan_on_kernels(carry, layer, operands, plan)
        precision, due = product_precision(self.precision), self._due(carry, plan)
        ring, checkpoint = jax.tree.map(lambda x: x[layer], (carry.ring, carry.R))
        whole = by_sequence(functools.partial(rebuild_rows, precision=precision))
        R = whole(checkpoint, ring, self._pending(carry, plan))
        solve = by_sequence(lambda R, o, topology: solve_tree(R, o, topology, precision))
        out, u, _ = solve(R, operands, plan)
        pool = carry.R.at[layer].set(jnp.where(due[:, None, None, None], R, checkpoint))
        carry = carry.replace(R=pool, written=due[None])
        return Scanned(out, Rows(u=u, k=operands.k, g=operands.g), carry)

    def _scan_on_kernels(
        self, carry: Checkpoint, layer: int, operands: Operands, plan: Topology
    ) -> Scanned:
        """One kernel that commits on the chip and solves; where that does not fit, the rings of
        all layers are written before the first, and every layer solves."""
        from pallas_kernels.wy_solve import (
            PathFactors,
            commit_solve_problem,
            wy_commit_solve,
            wy_solve,
        )

        o, ring, pending = operands, carry.ring, self._pending(carry, plan)
        rows = o.q, o.k, o.v, o.g, o.beta, plan.ancestors, plan.size
        previous = PathFactors(ring.k, ring.u, ring.g, pending)
        precision, how, at = self.precision, self.implementation, jnp.int32(layer)
        if commit_solve_problem(carry.R, previous, rows, precision) is None:
            due = self._due(carry, plan)
            out, u, R = wy_commit_solve(
                *(carry.R, at, previous, *rows), precision=precision, write=due, implementation=how
            )
            carry = carry.replace(R=R, written=due[None])
        else:
            if layer == 0:
                R = self._rebuild(carry.R, ring, pending)
                carry = carry.replace(R=R, written=(pending > 0)[None])
            out, u = wy_solve(carry.R, at, *rows, precision=precision, implementation=how)
        return Scanned(out, Rows(u=u, k=o.k, g=o.g), carry)

    def _pending(self, carry: Checkpoint, plan: Topology) -> Array:
        """[B]: rows of the ring that a verify commits; none for a sequence without a tree."""
        return jnp.where(plan.size > 0, carry.count[0], 0)

    def _due(self, carry: Checkpoint, plan: Topology) -> Array:
        """[B]: whose ring this verify writes: full in commits, or too full for the longest path of
        the tree at hand."""
        count, commits, longest = carry.count[0], carry.commits[0], plan.depth.max(axis=1) + 1
        full = (commits >= self.length) | (count + longest > self.rows)
        return full & (count > 0) & (plan.size > 0)

    def commit(self, carry: Checkpoint, scratch: Sequence[Rows], path: Path) -> Checkpoint:
        kept = jnp.where(carry.written, 0, carry.count)
        carry = carry.replace(
            count=kept,
            commits=jnp.where(carry.written, 0, carry.commits),
            written=jnp.zeros_like(carry.written),
        )
        rows = stack(scratch)
        if path.nodes.shape[1] > self.rows:  # may not fit: no ring for trees this deep
            accepted = gather_rows(rows, path)
            R = self._rebuild(self.read(carry), accepted, path.length)
            nothing = jnp.zeros_like(kept)
            return carry.replace(R=R, count=nothing, commits=nothing)
        return carry.replace(
            ring=append(carry.ring, rows, kept[0], path),
            count=kept + path.length[None],
            commits=carry.commits + (path.length > 0).astype(jnp.int32)[None],
        )

    def read(self, carry: Checkpoint) -> Array:
        return self._rebuild(carry.R, carry.ring, carry.count[0])

    def _rebuild(self, R: Array, rows: Rows, length: Array) -> Array:
        """Pools R and rows of all layers: the states after the first ``length`` [B] rows."""
        if self.implementation == "xla":
            precision = product_precision(self.precision)
            one_layer = by_sequence(functools.partial(rebuild_rows, precision=precision))
            return jax.vmap(one_layer, in_axes=(0, 0, None))(R, rows, length)
        from pallas_kernels.wy_commit import wy_commit

        batch, count = rows.g.shape[1:3]
        nodes = jnp.tile(jnp.arange(count, dtype=jnp.int32), (batch, 1))
        how = self.implementation
        return wy_commit(R, rows.k, rows.u, rows.g, nodes, length, implementation=how)

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        return WY(self.precision, self.implementation).buffers(config, capacity, batch)


def rebuild_rows(R: Array, rows: Rows, length: Array, precision: lax.PrecisionLike) -> Array:
    """One sequence's state after the first ``length`` of its rows; R itself if that is 0.

    Decays are summed from the end, because differences of large sums lose digits.
    """
    inside = (jnp.arange(rows.g.shape[0]) < length)[:, None]
    g = jnp.where(inside, rows.g, 0.0)
    after = jnp.cumsum(g[::-1], axis=0)[::-1] - g
    u = jnp.where(inside, jnp.exp(after), 0.0)[:, :, None] * rows.u
    k = value_heads(rows.k.astype(jnp.float32), R.shape[0])
    written = jnp.einsum("jhv,jhk->hvk", u, k, precision=precision)
    grown = jnp.exp(g.sum(axis=0))[:, None, None] * R
    return jnp.where(length > 0, grown + written, R)


def gather_rows(rows: Rows, path: Path) -> Rows:
    """The path's rows [Lg, B, P, ...] of a tree's rows [Lg, B, N, ...]; any row past its end."""
    sequence, nodes = jnp.arange(path.nodes.shape[0])[:, None], jnp.maximum(path.nodes, 0)
    return jax.tree.map(lambda x: x[:, sequence, nodes], rows)


def append(ring: Rows, rows: Rows, start: Array, path: Path) -> Rows:
    """The ring with the path's rows from slot ``start`` [B] on; it must have room for them."""
    batch, longest = path.nodes.shape
    steps, size = jnp.arange(longest)[None, :], ring.g.shape[2]
    # A row past the path's end goes to a slot of its own outside the ring, where it is dropped.
    slots = jnp.where(steps < path.length[:, None], start[:, None] + steps, size + steps)
    sequence = jnp.arange(batch)[:, None]

    def put(old: Array, new: Array) -> Array:
        new = new.astype(old.dtype)
        return old.at[:, sequence, slots].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put, ring, gather_rows(rows, path))
