"""Candidates grown level by level, and the best tree among them."""

import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.drafters.topologies import Best
from treejax.shapes import Array
from treejax.tree import Tree


class Grown(struct.PyTreeNode):
    """Every candidate that was seen, level by level: parents come before children.

    Attributes:
      tokens: [B, M] int32.
      values: [B, M] float32 log-probability of the path down to it.
      above: [B, M] int32, which candidate it hangs below; -1 below the root.
    """

    tokens: Array
    values: Array
    above: Array


def best_tree(grown: Grown, pending: Array, shape: Best) -> Tree:
    """The ``shape.nodes`` candidates of highest value, for one sequence, best first.

    A parent's value is at least its child's and it comes earlier in ``grown``, so that it is taken
    first on a tie too; the first n rows of the tree are the best tree of n rows. Banned tokens, of
    value -inf, are left out.
    """
    values, entry = lax.top_k(grown.values, shape.nodes)
    used = values > -jnp.inf
    place = (
        jnp.zeros(grown.values.shape[0], jnp.int32)
        .at[entry]
        .set(jnp.arange(1, shape.nodes + 1, dtype=jnp.int32))
    )
    above = grown.above[entry]
    parent = jnp.where(above >= 0, place[jnp.maximum(above, 0)], 0)
    return packed(grown.tokens[entry], parent, used, pending, shape.depth)


def packed(tokens: Array, parent: Array, used: Array, pending: Array, depth: int) -> Tree:
    """One sequence's tree: ``pending`` in row 0, then the candidates [N] that are ``used``, which
    come first. ``parent`` [N] are rows of the tree; siblings rank in the order of their rows."""
    parent = jnp.append(jnp.int32(-1), jnp.where(used, parent, -1))
    earlier = jnp.tri(parent.shape[0], k=-1, dtype=bool)
    siblings = earlier & (parent[:, None] == parent[None, :]) & (parent >= 0)[:, None]
    return Tree(
        tokens=jnp.append(pending.astype(jnp.int32), jnp.where(used, tokens, -1)),
        parent=parent,
        rank=siblings.sum(axis=1, dtype=jnp.int32),
        size=1 + used.sum(dtype=jnp.int32),
        max_depth=depth,
    )
