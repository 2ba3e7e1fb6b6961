"""The path schedule: a tree cut into paths that run side by side, level by level.

Every node lies on exactly one path, so every node is updated exactly once. A path begins at the
root, at a child that is not its parent's main child (the child with the largest subtree), or right
after the last branching node of its chain: from there the rest is one more branch. A path starts
from R0 or from a *cut state*, the state kept at a branching node. Paths of one level depend on
earlier levels alone (LumoTree's path-parallel schedule; its 28-row tree gives two levels).
"""

import jax.numpy as jnp
from flax import struct

from treejax.shapes import Array
from treejax.tree import Topology


class PathSchedule(struct.PyTreeNode):
    """Paths of one tree, sorted by level and then longest first; row counts are static bounds.

    Attributes:
      nodes: [N, max_depth + 1] int32 node ids of path p from its start, N (no node) past its end.
      length: [N] int32 nodes on the path, 0 past the last path.
      level: [N] int32 level of the path, N past the last path.
      source: [N] int32 cut slot that the path starts from; slot 0 holds R0.
      cut_slot: [N + 1] int32 slot where a node's state is kept, ``spare`` for most; row N too.
      count: [] int32 number of paths.
      spare: static index of the slot that nobody reads; there are ``spare + 1`` slots.
    """

    nodes: Array
    length: Array
    level: Array
    source: Array
    cut_slot: Array
    count: Array
    spare: int = struct.field(pytree_node=False)


def cut_slots(capacity: int) -> int:
    """Slots for R0, every node that can branch, and the spare: half of the rows have 2 children."""
    return 1 + (capacity - 1) // 2 + 1


def schedule(topology: Topology, max_depth: int) -> PathSchedule:
    """Cut one tree into its paths; usable inside jit."""
    count = topology.parent.shape[0]
    rows = jnp.arange(count, dtype=jnp.int32)
    parent, active, ancestors = topology.parent, topology.active, topology.ancestors
    above = jnp.maximum(parent, 0)
    is_child = parent[:, None] == rows[None, :]  # [child, parent]
    branching = is_child.sum(axis=0) >= 2

    # Main child: the largest subtree, the lowest row among equals.
    subtree = ancestors.sum(axis=0, dtype=jnp.int32)
    weight = jnp.where(is_child, subtree[:, None], -1)
    is_main = (jnp.argmax(weight, axis=0)[above] == rows) & (parent >= 0)

    # A chain follows main children; a path ends early at its chain's last branching node.
    chain = _nearest(ancestors, ~is_main, topology.depth)
    deeper = topology.depth[None, :] > topology.depth[:, None]
    same_chain = chain[None, :] == chain[:, None]
    more_below = (same_chain & deeper & branching[None, :] & active[None, :]).any(axis=1)
    after_last = branching[above] & ~more_below[above]
    is_head = active & (~is_main | after_last)

    head = _nearest(ancestors, is_head, topology.depth)
    level_of = (ancestors & is_head[None, :]).sum(axis=1, dtype=jnp.int32) - 1
    length_of = ((head[:, None] == rows[None, :]) & active[:, None]).sum(axis=0, dtype=jnp.int32)
    key = level_of * (count + 1) - length_of
    sorted_heads = jnp.argsort(jnp.where(is_head, key, count * (count + 2)), stable=True)
    paths = is_head.sum(dtype=jnp.int32)
    valid = rows < paths

    rank = jnp.zeros(count, jnp.int32).at[sorted_heads].set(rows)
    step = jnp.clip(topology.depth - topology.depth[head], 0, max_depth)
    nodes = jnp.full((count + 1, max_depth + 1), count, jnp.int32)
    nodes = nodes.at[jnp.where(active, rank[head], count), step].set(rows)[:count]

    spare = cut_slots(count) - 1
    slot = jnp.where(branching, jnp.cumsum(branching, dtype=jnp.int32), spare)
    source = jnp.where(parent[sorted_heads] >= 0, slot[above[sorted_heads]], 0)
    return PathSchedule(
        nodes=nodes,
        length=jnp.where(valid, length_of[sorted_heads], 0),
        level=jnp.where(valid, level_of[sorted_heads], count),
        source=jnp.where(valid, source, spare),
        cut_slot=jnp.append(slot, spare),
        count=paths,
        spare=spare,
    )


def _nearest(ancestors: Array, marked: Array, depth: Array) -> Array:
    """For every node the deepest marked node among itself and its ancestors: [N] int32."""
    candidates = jnp.where(ancestors & marked[None, :], depth[None, :], -1)
    return jnp.argmax(candidates, axis=1).astype(jnp.int32)
