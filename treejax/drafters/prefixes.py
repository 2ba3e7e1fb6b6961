"""Trees and chains out of occurrences: the prefixes that most of them share.

The value of a prefix is the product of count ratios along it, which is how many occurrences begin
with it, of all that are counted. ``best_first`` makes a tree of any pool of nodes with values.
Written for one sequence; nothing visits the host.
"""

import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.drafters.best_first import packed
from treejax.drafters.lookup import Lookup, Matches
from treejax.shapes import Array, Float32, Int32, typed
from treejax.tree import Tree


class Pool(struct.PyTreeNode):
    """Nodes that may enter a tree, in any order.

    Attributes:
      tokens: [P] int32.
      parent: [P] int32, the parent's place in the pool, -1 below the root.
      value: [P] float32, at most the parent's; negative for places that hold no node.
    """

    tokens: Array
    parent: Array
    value: Array


def prefix_pool(matches: Matches, least_value: float) -> Pool:
    """Every prefix of the continuations once, P = J * D, with its value."""
    count, depth = matches.tokens.shape
    same = matches.same
    rows = jnp.arange(count, dtype=jnp.int32)[:, None]
    first = jnp.argmax(same, axis=1).astype(jnp.int32)  # the latest occurrence stands for all
    value = _shares(same.sum(axis=1, dtype=jnp.int32), matches.count)
    stands = (first == rows) & (matches.tokens >= 0) & (value >= least_value)
    above = first[:, :-1] * depth + jnp.arange(depth - 1, dtype=jnp.int32)[None, :]
    parent = jnp.concatenate([jnp.full_like(rows, -1), above], axis=1)
    return Pool(
        tokens=matches.tokens.reshape(-1),
        parent=parent.reshape(-1),
        value=jnp.where(stands, value, -1.0).reshape(-1),
    )


def tree_score(matches: Matches, settings: Lookup, nodes: int) -> Array:
    """What decides between groups: the sum of the ``nodes`` best values, or the match's length."""
    if settings.rule == "longest":
        return matches.length.astype(jnp.float32)
    votes = matches.same.sum(axis=1, dtype=jnp.int32)
    first = jnp.argmax(matches.same, axis=1) == jnp.arange(votes.shape[0])[:, None]
    good = _shares(votes, matches.count) >= settings.least_value
    votes = jnp.where(first & (matches.tokens >= 0) & good, votes, 0).reshape(-1)
    if nodes < votes.shape[0]:
        votes = lax.sort(votes)[-nodes:]
    return _shares(votes.sum(), matches.count)  # divided once, so that equal scores are equal


def chain_score(matches: Matches, settings: Lookup) -> Array:
    """``tree_score`` for a chain: the sum of the values along the majority's path."""
    if settings.rule == "longest":
        return matches.length.astype(jnp.float32)
    tokens, votes = walk(matches, settings.least_value)
    return _shares(jnp.where(tokens >= 0, votes, 0).sum(dtype=jnp.int32), matches.count)


def walk(matches: Matches, least_value: float) -> tuple[Array, Array]:
    """Follow the majority from token to token: its tokens [D], -1 once it ends, and votes [D].

    At each depth the commonest next token, the most recent on a tie.
    """
    count = matches.count

    def step(alive: Array, level: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        tokens, same = level
        votes = jnp.where(alive, (same & alive[None, :]).sum(axis=1, dtype=jnp.int32), 0)
        leader = jnp.argmax(votes)
        good = (votes[leader] > 0) & (_shares(votes[leader], count) >= least_value)
        chosen = jnp.where(good, tokens[leader], -1)
        return alive & same[leader] & good, (chosen, votes[leader])

    levels = (matches.tokens.T, jnp.moveaxis(matches.same, 2, 0))
    return lax.scan(step, matches.found, levels)[1]


@typed
def pool_order(pool: Pool, depth: int) -> Int32[Array, " P"]:
    """In which place of the order (value, parent's place, token) each node comes, from 0 on.

    The order in which a heap gives out the nodes: the largest value first, then the child of what
    came out earlier, then the lowest token. No node is deeper than ``depth``. Places are compared
    with each other's parents until nothing can change: right for nodes of depth d after d rounds.
    """
    value, above = pool.value, pool.parent
    higher = value[None, :] > value[:, None]
    equal = value[None, :] == value[:, None]
    siblings = above[None, :] == above[:, None]
    lower = siblings & (pool.tokens[None, :] < pool.tokens[:, None])

    def refine(_: Array, order: Array) -> Array:
        place = jnp.where(above < 0, -1, order[jnp.maximum(above, 0)])
        earlier = lower | (place[None, :] < place[:, None])
        return (higher | (equal & earlier)).sum(axis=1, dtype=jnp.int32)

    start = higher.sum(axis=1, dtype=jnp.int32)
    return lax.fori_loop(0, depth, refine, start)


def best_first(pool: Pool, pending: Array, nodes: int, depth: int) -> Tree:
    """The ``nodes`` best of the pool below ``pending``, as a tree without a batch axis.

    A parent's value is never below its child's, so what is kept is closed under taking parents.
    """
    order, real = pool_order(pool, depth), pool.value >= 0
    kept = real & (order < nodes)
    places = jnp.arange(pool.tokens.shape[0], dtype=jnp.int32)
    entry = jnp.full(nodes + 1, -1, jnp.int32).at[jnp.where(kept, order, nodes)].set(places)[:nodes]
    used = jnp.arange(nodes) < kept.sum()
    above = pool.parent[entry]
    parent = jnp.where(above < 0, 0, order[jnp.maximum(above, 0)] + 1)
    return packed(pool.tokens[entry], parent, used, pending, depth)


@typed
def _shares(votes: Int32[Array, " *s"], count: Int32[Array, ""]) -> Float32[Array, " *s"]:
    return votes.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
