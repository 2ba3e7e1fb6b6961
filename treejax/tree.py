"""The token tree: what is verified in one step, and everything that follows from its shape.

A ``Tree`` holds only what a drafter chooses: tokens, parents and how many rows are in use. Rows may
be packed in any order; only row 0, the root (the pending token), is fixed. ``describe`` derives
depth, ancestry and a topological order inside jit, so that topology is data and one compiled
program serves every tree of a capacity. ``Tree.from_parents`` validates on the host.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax.shapes import Array, Bool, Int32, typed


class Tree(struct.PyTreeNode):
    """One candidate tree a sequence, in ``capacity`` rows.

    Attributes:
      tokens: [B, N] int32 token of each node, -1 in inactive rows.
      parent: [B, N] int32 row of the parent, -1 for the root and in inactive rows.
      rank: [B, N] int32 draw order among siblings, 0 first.
      size: [B] int32 number of rows in use; rows at or past it are inactive.
      max_depth: static bound on a node's depth.
    """

    tokens: Array
    parent: Array
    rank: Array
    size: Array
    max_depth: int = struct.field(pytree_node=False)

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def from_parents(
        cls,
        tokens: Sequence[Any] | np.ndarray,
        parents: Sequence[Any] | np.ndarray,
        capacity: int | None = None,
        max_depth: int | None = None,
        vocabulary: int | None = None,
        unique: bool = True,
    ) -> "Tree":
        """Build and validate trees on the host.

        Args:
          tokens: [n] for one sequence, or [B, n]; rows of a batch may differ in length.
          parents: same shape; -1 for row 0, the root, and the parent's row elsewhere.
          capacity: rows to allocate, by default the largest n.
          max_depth: static depth bound, by default ``capacity - 1``.
          vocabulary: when given, tokens must be below it.
          unique: refuse equal tokens among siblings. False keeps them, as rules that draw with
            replacement need.

        Raises:
          ValueError: one line naming the tree, the row and the mistake.
        """
        token_rows, parent_rows = _rows(tokens, "tokens"), _rows(parents, "parents")
        if len(token_rows) != len(parent_rows):
            raise ValueError(
                f"tokens hold {len(token_rows)} trees and parents {len(parent_rows)}, "
                "expected the same number"
            )
        largest = max(len(row) for row in token_rows)
        capacity = largest if capacity is None else capacity
        max_depth = capacity - 1 if max_depth is None else max_depth
        packed = np.full((3, len(token_rows), capacity), -1, np.int32)
        packed[2] = 0
        for b, (row, above) in enumerate(zip(token_rows, parent_rows, strict=True)):
            _validate(f"tree {b}", row, above, capacity, max_depth, vocabulary, unique)
            packed[0, b, : len(row)] = row
            packed[1, b, : len(row)] = above
            packed[2, b, : len(row)] = _ranks(above)
        sizes = np.array([len(row) for row in token_rows], np.int32)
        arrays = (jnp.asarray(a) for a in (*packed, sizes))
        return cls(*arrays, max_depth=max_depth)

    @classmethod
    def root_only(cls, tokens: Array, capacity: int = 1, max_depth: int = 0) -> "Tree":
        """Trees of nothing but the pending token ([B]): plain decoding, or nothing to propose."""
        rows = jnp.full((tokens.shape[0], capacity), -1, jnp.int32)
        return cls(
            tokens=rows.at[:, 0].set(tokens.astype(jnp.int32)),
            parent=rows,
            rank=jnp.zeros_like(rows),
            size=jnp.ones(tokens.shape[0], jnp.int32),
            max_depth=max_depth,
        )

    def pad(self, capacity: int) -> "Tree":
        """The same trees in more rows; usable inside jit."""
        more = ((0, 0), (0, capacity - self.capacity))
        return self.replace(
            tokens=jnp.pad(self.tokens, more, constant_values=-1),
            parent=jnp.pad(self.parent, more, constant_values=-1),
            rank=jnp.pad(self.rank, more),
        )

    def keep_with_order(self, mask: Array) -> tuple["Tree", Array]:
        """Drop the rows where ``mask`` [B, N] is false and repack; usable inside jit.

        A dropped row's descendants must be dropped too. Order among kept rows is unchanged.
        Returns the tree and, per new row, the old row it came from: [B, N].
        """
        rows = jnp.arange(self.capacity)[None, :]
        mask = mask & (rows < self.size[:, None])
        order = jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)
        place = jnp.argsort(order, axis=1).astype(jnp.int32)
        size = mask.sum(axis=1, dtype=jnp.int32)
        inside = rows < size[:, None]

        def gather(values: Array, filler: int) -> Array:
            return jnp.where(inside, jnp.take_along_axis(values, order, axis=1), filler)

        above = gather(self.parent, -1)
        moved = jnp.take_along_axis(place, jnp.maximum(above, 0), axis=1)
        tree = self.replace(
            tokens=gather(self.tokens, -1),
            parent=jnp.where(above >= 0, moved, -1),
            rank=gather(self.rank, 0),
            size=size,
        )
        return tree, order

    def keep(self, mask: Array) -> "Tree":
        """``keep_with_order`` without the order."""
        return self.keep_with_order(mask)[0]

    def trim_with_order(self, limit: Array) -> tuple["Tree", Array]:
        """Drop the nodes deeper than ``limit`` [B]; 0 leaves the root alone, -1 nothing.

        Returns the tree and, per new row, the old row it came from: [B, N].
        """
        depth = jax.vmap(lambda parent: depths(parent, self.max_depth))(self.parent)
        return self.keep_with_order(depth <= limit[:, None])

    def trim(self, limit: Array) -> "Tree":
        """``trim_with_order`` without the order."""
        return self.trim_with_order(limit)[0]


class Topology(struct.PyTreeNode):
    """What follows from one tree's parents; with a leading batch axis after ``describe``.

    Attributes:
      parent: [N] int32, -1 for the root and inactive rows.
      depth: [N] int32, 0 for the root and inactive rows.
      active: [N] bool.
      ancestors: [N, N] bool, row i marks i itself and its ancestors; inactive rows mark nothing.
      order: [N] int32 node ids, parents before children, inactive rows last.
      size: [] int32.
      max_depth: the tree's static bound.
    """

    parent: Array
    depth: Array
    active: Array
    ancestors: Array
    order: Array
    size: Array
    max_depth: int = struct.field(pytree_node=False)


def describe(tree: Tree) -> Topology:
    """Derive the topology of every tree of the batch; usable inside jit."""
    return jax.vmap(functools.partial(_describe, max_depth=tree.max_depth))(tree.parent, tree.size)


@typed
def depths(parent: Int32[Array, " N"], max_depth: int) -> Int32[Array, " N"]:
    """Depth of every node by walking up at most ``max_depth`` parents."""
    depth, node = jnp.zeros_like(parent), parent
    for _ in range(max_depth):
        depth = depth + (node >= 0).astype(jnp.int32)
        node = jnp.where(node >= 0, parent[jnp.maximum(node, 0)], -1)
    return depth


def _describe(parent: Array, size: Array, max_depth: int) -> Topology:
    rows = jnp.arange(parent.shape[0], dtype=jnp.int32)
    active = rows < size
    above = ancestors(parent) & active[:, None]
    depth = jnp.maximum(above.sum(axis=1, dtype=jnp.int32) - 1, 0)
    order = jnp.argsort(jnp.where(active, depth, parent.shape[0]), stable=True).astype(jnp.int32)
    return Topology(
        parent=parent,
        depth=depth,
        active=active,
        ancestors=above,
        order=order,
        size=size,
        max_depth=max_depth,
    )


def sort_rows(topology: Topology) -> tuple[Topology, Array]:
    """One tree repacked so that parents come before children, and each old row's new row [N].

    ``topology.order`` lists the old rows in their new order; the root stays in row 0.
    """
    order = topology.order
    rows = jnp.arange(order.shape[0], dtype=jnp.int32)
    place = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
    above = topology.parent[order]
    return topology.replace(
        parent=jnp.where(above >= 0, place[jnp.maximum(above, 0)], -1),
        depth=topology.depth[order],
        ancestors=topology.ancestors[order][:, order],
        order=rows,
    ), place


def ancestors(parent: Array) -> Array:
    """Which rows are a row's ancestors or itself, [N, N] bool, of parents [N].

    By pointer doubling; row N stands for "above the root".
    """
    count = parent.shape[0]
    jump = jnp.append(jnp.where(parent < 0, count, parent), count)
    reached = jnp.eye(count + 1, count, dtype=bool)
    for _ in range(max(count - 1, 1).bit_length()):
        reached = reached | reached[jump]
        jump = jump[jump]
    return reached[:count]


@typed
def conv_rows(topology: Topology, width: int) -> Int32[Array, "N K"]:
    """Rows of concat(history [K-1], inputs [N]) that node i's convolution reads, oldest first.

    Tap s back of node i is its s-th ancestor, or the history where the path is shorter.
    """
    columns, node = [], jnp.arange(topology.parent.shape[0], dtype=jnp.int32)
    for back in range(width):
        history = width - 1 + topology.depth - back
        columns.append(jnp.where(node >= 0, width - 1 + node, history))
        node = jnp.where(node >= 0, topology.parent[jnp.maximum(node, 0)], -1)
    return jnp.stack(columns[::-1], axis=1)


@typed
def visible(topology: Topology) -> Bool[Array, "N N"]:
    """Which rows a row attends to: itself and its ancestors; inactive rows see themselves."""
    return topology.ancestors | jnp.eye(topology.parent.shape[0], dtype=bool)


def _rows(values: Any, name: str) -> list[np.ndarray]:
    nested = len(values) > 0 and np.ndim(values[0]) > 0
    rows = [np.asarray(row) for row in values] if nested else [np.asarray(values)]
    for row in rows:
        if row.ndim != 1 or row.size == 0 or not np.issubdtype(row.dtype, np.integer):
            raise ValueError(
                f"{name} must be integers of shape [n] or [B, n] with n >= 1, "
                f"got shape {row.shape} and dtype {row.dtype}"
            )
    return rows


def _ranks(parents: np.ndarray) -> np.ndarray:
    return np.array([int((parents[:i] == parents[i]).sum()) for i in range(len(parents))], np.int32)


def _validate(
    name: str,
    tokens: np.ndarray,
    parents: np.ndarray,
    capacity: int,
    max_depth: int,
    vocabulary: int | None,
    unique: bool,
) -> None:
    count = len(tokens)
    if len(parents) != count:
        raise ValueError(f"{name}: {count} tokens and {len(parents)} parents, expected as many")
    if count > capacity:
        raise ValueError(f"{name}: {count} nodes exceed the capacity of {capacity}")
    if parents[0] != -1:
        raise ValueError(f"{name}: row 0 has parent {parents[0]}, expected -1: row 0 is the root")
    for row in range(count):
        if row and parents[row] == -1:
            raise ValueError(f"{name}: row {row} is a second root (parent -1), expected only row 0")
        if row and not 0 <= parents[row] < count:
            raise ValueError(
                f"{name}: row {row} has parent {parents[row]}, expected 0..{count - 1}"
            )
        if tokens[row] < 0 or (vocabulary is not None and tokens[row] >= vocabulary):
            bound = "a token id >= 0" if vocabulary is None else f"0..{vocabulary - 1}"
            raise ValueError(f"{name}: row {row} has token {tokens[row]}, expected {bound}")
    seen: dict[tuple[int, int], int] = {}
    for row in range(count):
        node, depth = row, 0
        while node and depth <= count:
            node, depth = int(parents[node]), depth + 1
        if node:
            raise ValueError(f"{name}: row {row} lies on a cycle, expected a path to row 0")
        if depth > max_depth:
            raise ValueError(f"{name}: row {row} has depth {depth}, above the bound of {max_depth}")
        pair = (int(parents[row]), int(tokens[row]))
        if unique and pair in seen:
            raise ValueError(
                f"{name}: rows {seen[pair]} and {row} are siblings with the same token {pair[1]}; "
                "merge them, or pass unique=False for rules that draw with replacement"
            )
        seen[pair] = row
