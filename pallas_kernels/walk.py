"""The depth-first program of a tree: in which order a scan visits the nodes, and what it keeps.

A scan that continues every node from its parent's state can walk the tree depth first with the
state in hand, and must remember a state only where other children still wait. Children are visited
lightest subtree first. So once a node's heaviest child starts, its saved state is no longer needed,
and few slots suffice (``slots``). Rows may be packed in any order.
"""

import flax.struct
import jax
import jax.numpy as jnp


class Walk(flax.struct.PyTreeNode):
    """One program a sequence; step t visits ``node[t]``.

    Attributes:
      node: [B, N] int32. Steps at or past ``size`` list the inactive rows.
      load: [B, N] int32. The slot to load the parent's state from, or -1: it is the one in hand.
        Step 0 has -1: the state in hand is then the sequence's own.
      save: [B, N] int32. The slot that keeps the new state for later children, or -1.
      size: [B] int32.
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
