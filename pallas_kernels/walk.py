"""The depth-first program of a tree: in which order a scan visits the nodes, and what it keeps.

A scan that continues every node from its parent's state can walk the tree depth first with the
state in hand, and must remember a state only where other children still wait. Children are visited
lightest subtree first. So once a node's heaviest child starts, its saved state is no longer needed,
and few slots suffice (``slots``). Rows may be packed in any order.

``plan_paths`` is the naive program to compare with: each root-to-leaf path alone, nothing kept.
"""

import flax.struct
import jax
import jax.numpy as jnp

RESTART = -2
"""A step that continues no other: it starts from the sequence's own state."""


class Walk(flax.struct.PyTreeNode):
    """One program a sequence; step t visits ``node[t]``. S = N steps, more if paths are walked.

    Attributes:
      node: [B, S] int32. Steps from ``size`` on list the inactive rows; if S > N, what is left
        after them names any row.
      load: [B, S] int32. The slot to load the parent's state from; -1: it is the one in hand;
        ``RESTART``, only if S > N: the sequence's own state again. Step 0 has -1: the state in hand
        is then the sequence's own.
      save: [B, S] int32. The slot that keeps the new state for later children, or -1; all -1 if
        S > N.
      size: [B] int32 steps.
    """

    node: jax.Array
    load: jax.Array
    save: jax.Array
    size: jax.Array


def slots(capacity: int) -> int:
    """Saved states that suffice for every tree of at most ``capacity`` nodes.

    A node's slot is the number of its strict ancestors that still have a child to visit. Let m(s)
    be the fewest nodes of a tree with a saving node in slot s. A saving node has two children, so
    m(0) = 3. For slot s + 1 some outermost strict ancestor still waits for a child at least as
    heavy as the one that holds the saving node, whose own subtree has the node in slot s: so
    m(s + 1) = 1 + 2 m(s), and m(s) = 2^(s + 2) - 1. Slot s occurs only if m(s) <= capacity, hence
    floor(log2(capacity + 1)) - 1 slots: floor(log2(leaves)) for the (capacity + 1) / 2 leaves of
    the worst, binary tree.
    """
    return max(0, (capacity + 1).bit_length() - 2)


def plan(parent: jax.Array, size: jax.Array) -> Walk:
    """The programs of a batch of trees, inside jit.

    Args:
      parent: [B, N] int32 row of each node's parent; row 0 is the root. Any packing order.
      size: [B] int32 number of active rows; a size of 0 visits nothing.
    """
    return jax.vmap(_plan_one)(parent, size)


def _plan_one(parent: jax.Array, size: jax.Array) -> Walk:
    rows = jnp.arange(parent.shape[0], dtype=jnp.int32)
    active = rows < size
    child = active & (rows > 0)
    parent = jnp.where(child, parent, -1)
    above = _ancestors_or_self(jnp.where(child, parent, rows)) & active[:, None] & active[None, :]
    weight = above.sum(0, dtype=jnp.int32)  # nodes in each subtree

    siblings = (parent[:, None] == parent[None, :]) & child[:, None] & child[None, :]
    lighter = (weight[:, None] < weight[None, :]) | (
        (weight[:, None] == weight[None, :]) & (rows[:, None] < rows[None, :])
    )
    earlier = siblings & lighter  # [i, j]: i is visited before its sibling j
    first, last = ~earlier.any(0), ~earlier.any(1)

    stride = 1 + jnp.where(earlier, weight[:, None], 0).sum(0)  # steps between parent and child
    step = jnp.where(active, jnp.where(above, stride[None, :], 0).sum(1) - 1, rows)
    slot = (above & ~last[None, :]).sum(1, dtype=jnp.int32)
    children = ((parent[None, :] == rows[:, None]) & child[None, :]).sum(1)
    save = jnp.where(children >= 2, slot, -1)
    load = jnp.where(child & ~first, slot[jnp.maximum(parent, 0)], -1)
    node = jnp.zeros_like(rows).at[step].set(rows, unique_indices=True)
    return Walk(node=node, load=load[node], save=save[node], size=size)


def path_steps(capacity: int, max_depth: int) -> int:
    """Steps that suffice to walk every path of a tree by itself, and to list its inactive rows.

    Below a deepest path of d + 1 nodes at most N - d leaves find room, each with d + 1 nodes on its
    path or fewer: a chain of d nodes with N - d leaves has the most, and d = (N - 1) / 2 the most
    of those. An inactive row takes one step and saves one at least.
    """
    depth = min(max_depth, (capacity - 1) // 2)
    return (capacity - depth) * (depth + 1)


def plan_paths(parent: jax.Array, size: jax.Array, max_depth: int) -> Walk:
    """The programs that visit every root-to-leaf path from its root on, leaves in row order.

    A node is visited once for every leaf below it. Arguments are those of ``plan``; no tree may be
    deeper than ``max_depth``, which bounds the steps (``path_steps``).
    """
    steps = path_steps(parent.shape[1], max_depth)
    return jax.vmap(lambda parent, size: _plan_paths_one(parent, size, steps))(parent, size)


def _plan_paths_one(parent: jax.Array, size: jax.Array, steps: int) -> Walk:
    rows = jnp.arange(parent.shape[0], dtype=jnp.int32)
    active = rows < size
    child = active & (rows > 0)
    above = _ancestors_or_self(jnp.where(child, parent, rows))
    leaf = active & ~((parent[:, None] == rows[None, :]) & child[:, None]).any(0)
    length = jnp.where(leaf, above.sum(1, dtype=jnp.int32), 0)
    end = jnp.cumsum(length)
    start = end - length

    # Step of node j on the path to leaf i; pairs that are none go to a step that is cut off.
    depth = above.sum(1, dtype=jnp.int32) - 1
    step = jnp.where(leaf[:, None] & above, start[:, None] + depth[None, :], steps)
    idle = jnp.where(active, steps, end[-1] + rows - size)
    node = jnp.zeros(steps + 1, jnp.int32).at[step].set(jnp.broadcast_to(rows, step.shape))
    node = node.at[idle].set(rows)[:steps]
    again = jnp.where(leaf & (start > 0), start, steps)
    load = jnp.full(steps + 1, -1, jnp.int32).at[again].set(RESTART)[:steps]
    return Walk(node=node, load=load, save=jnp.full_like(load, -1), size=end[-1])


def _ancestors_or_self(parent: jax.Array) -> jax.Array:
    """[N, N]: whether column j is row i or above it. Row 0 and inactive rows are their own parents.

    Doubling: after a round, rows know twice as many generations and jump twice as far.
    """
    count = parent.shape[0]
    above = jnp.eye(count, dtype=bool)
    jump = parent
    for _ in range((count - 1).bit_length()):
        above = above | above[jump]
        jump = jump[jump]
    return above
