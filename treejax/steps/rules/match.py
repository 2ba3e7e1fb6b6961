"""Coupled sample-match: follow the target's own draws down the tree. The default."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from treejax.history import History, after, along_paths
from treejax.sampling import draw
from treejax.shapes import Array
from treejax.steps.choice import Choice
from treejax.steps.rules.base import Rule
from treejax.tree import Tree, ancestors


@dataclasses.dataclass(frozen=True)
class Match(Rule):
    """Draw the target's token at the root, follow the child that carries it, draw there, and so on.

    One draw a visited node, with the noise of its absolute position: every emitted token is one
    that plain decoding with the same key would have drawn, whatever the tree holds. No redraw: a
    mismatch emits the very draw that it was compared with. Optimal among lossless rules for a tree
    that is a function of the context, since then P(v accepted) is the product of p along v's path,
    which no lossless rule can exceed. With temperature 0 this is greedy acceptance.
    """

    name = "match"
    lossless = True
    takes = frozenset({"fixed", "coupled", "iid", "without_replacement"})
    needs_q = False

    def choose(self, tree, logits, sampling, key, position, history, q) -> Choice:
        def draw_at(node: Array, depth: Array, context: History | None) -> Array:
            row = lax.dynamic_index_in_dim(logits, node, keepdims=False)
            at = None if position is None else position + 1 + depth
            return draw(row, sampling, key, at, context)

        def in_turn() -> Choice:
            return walk(tree, draw_at, history)

        def together() -> Choice:
            rows = jnp.arange(tree.tokens.shape[0], dtype=jnp.int32)
            above = ancestors(tree.parent)
            depth = above.sum(axis=1, dtype=jnp.int32) - 1
            contexts = None if history is None else along_paths(history, tree.tokens, above)
            return follow(tree, jax.vmap(draw_at)(rows, depth, contexts))

        # A GPU draws at all rows while it would wait for the host to be told of the next one.
        return lax.platform_dependent(cpu=in_turn, default=together)


def walk(
    tree: Tree,
    draw_at: Callable[[Array, Array, History | None], Array],
    history: History | None = None,
) -> Choice:
    """Follow ``draw_at(node, depth, context) -> token`` from the root while a child carries it.

    Only the nodes of the path are drawn at, so a step costs (accepted + 1) rows of logits and
    noise, not N. ``context`` is ``history`` and every token from the root to the node. Of equal
    siblings the first wins: lowest rank, then lowest row. Inactive rows never match, as no draw is
    -1.
    """
    capacity, bound = tree.tokens.shape[0], tree.max_depth + 1
    rows = jnp.arange(capacity, dtype=jnp.int32)

    def passed(context: History | None, token: Array) -> History | None:
        return None if context is None else after(context, token)

    def step(carry):
        path, length, _, _, context = carry
        node = path[length - 1]
        token = draw_at(node, length - 1, context)
        carries = (tree.parent == node) & (tree.tokens == token) & (rows < tree.size)
        order = jnp.where(carries, tree.rank, capacity)
        child = jnp.argmin(order).astype(jnp.int32)
        found = carries.any() & (length < bound)
        path = jnp.where((jnp.arange(bound) == length) & found, child, path)
        return path, length + found.astype(jnp.int32), token, ~found, passed(context, token)

    path = jnp.full(bound, -1, jnp.int32).at[0].set(0)
    root = passed(history, tree.tokens[0])
    start = (path, jnp.int32(1), jnp.int32(-1), jnp.bool_(False), root)
    path, length, pending, _, _ = lax.while_loop(lambda carry: ~carry[3], step, start)
    return Choice(path=path, length=length, pending=pending)


def follow(tree: Tree, drawn: Array) -> Choice:
    """What ``walk`` chooses where the draws [N] of all rows are there already; no loop."""
    capacity, bound = tree.tokens.shape[0], tree.max_depth + 1
    rows, parent = jnp.arange(capacity, dtype=jnp.int32), tree.parent
    above = ancestors(parent)
    carries = (parent >= 0) & (rows < tree.size) & (tree.tokens == drawn[jnp.maximum(parent, 0)])
    place = tree.rank * capacity + rows
    equal = carries[None, :] & (parent[None, :] == parent[:, None])  # [i, j]: j would do for i
    beaten = (equal & (place[None, :] < place[:, None])).any(axis=1)  # by one that comes first
    followed = (carries & ~beaten) | (rows == 0)
    accepted = ~(above & ~followed[None, :]).any(axis=1) & followed
    depth = above.sum(axis=1, dtype=jnp.int32) - 1
    at = accepted[None, :] & (depth[None, :] == jnp.arange(bound, dtype=jnp.int32)[:, None])
    path = jnp.where(at.any(axis=1), jnp.argmax(at, axis=1).astype(jnp.int32), -1)
    length = at.any(axis=1).sum(dtype=jnp.int32)
    return Choice(path=path, length=length, pending=drawn[path[length - 1]].astype(jnp.int32))
