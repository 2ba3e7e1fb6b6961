"""Candidates of several sources in one pool: equal siblings become one node.

Sources say for every node the chance that it is accepted once its parent is. Where two of them
propose the same token below the same node, the larger chance holds. Written for one sequence.
"""

import jax
import jax.numpy as jnp
from jax import lax

from treejax.drafters.prefixes import Pool
from treejax.shapes import Array


def join(*parts: Pool) -> Pool:
    """One pool of several, each of whose parents are places in the joined pool."""
    return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


def merge(chances: Pool, depth: int) -> Pool:
    """Path values of a pool whose ``value`` is each node's chance given its parent.

    Equal siblings, and what hangs below them, are merged: the first in the pool stays. Nodes of
    chance 0, and what hangs below them, are left out. No node is deeper than ``depth``; the
    children of a node come after it or before it.
    """
    real, tokens = chances.value > 0, chances.tokens
    alike = real[:, None] & real[None, :] & (tokens[:, None] == tokens[None, :])
    places = jnp.arange(tokens.shape[0], dtype=jnp.int32)

    def above(stands: Array) -> Array:
        return jnp.where(chances.parent < 0, -1, stands[jnp.maximum(chances.parent, 0)])

    def equal(stands: Array) -> Array:
        parent = above(stands)
        return alike & (parent[:, None] == parent[None, :])

    def first(_: Array, stands: Array) -> Array:
        # A place without a node stands for itself: what hangs below it must not move elsewhere.
        return jnp.where(real, jnp.argmax(equal(stands), axis=1).astype(jnp.int32), places)

    # After d rounds every node of depth d knows which of its equals stands for it.
    stands = lax.fori_loop(0, depth, first, places)
    chance = jnp.where(equal(stands), chances.value[None, :], 0.0).max(axis=1)
    parent = above(stands)

    def along(_: Array, value: Array) -> Array:
        return chance * jnp.where(parent < 0, 1.0, value[jnp.maximum(parent, 0)])

    value = lax.fori_loop(0, depth, along, chance)
    kept = (value > 0) & (stands == places)  # nothing is above 0 below a node that is not
    return Pool(tokens=tokens, parent=parent, value=jnp.where(kept, value, -1.0))
