"""Decide which path of a verified tree is emitted, and the token that follows it.

A rule looks at one sequence; ``select`` maps it over the batch. The shipped rule is ``match``: draw
the target's own token at the root, follow the child that carries it, draw there, and so on; the
draw that no child carries is emitted. Every emitted token is therefore one that plain decoding
with the same key would have drawn, whatever the tree holds: lossless for every drafter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.sampling import GREEDY, Sampling, draw, per_sequence
from treejax.shapes import Array
from treejax.tree import Tree


class Choice(struct.PyTreeNode):
    """The path that a step keeps, and the next pending token.

    Attributes:
      path: [B, max_depth + 1] int32 node ids from the root down, -1 padded.
      length: [B] int32 nodes in the path, the root included; 0 in a row that takes no part.
      pending: [B] int32 the token after the path: emitted, and the root of the next tree.
    """

    path: Array
    length: Array
    pending: Array

    @property
    def accepted(self) -> Array:
        """[B] int32 number of accepted candidates: neither the root nor the pending token."""
        return jnp.maximum(self.length - 1, 0)

    def emitted(self, tree: Tree) -> tuple[Array, Array]:
        """What the step adds to the text: (tokens [B, max_depth + 1], count [B]).

        The accepted candidates' tokens, then the pending token, then -1; ``count`` is ``length``.
        ``tree`` is the tree that was verified.
        """
        below = jnp.pad(self.path[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        tokens = jnp.take_along_axis(tree.tokens, jnp.maximum(below, 0), axis=1)
        tokens = jnp.where(below >= 0, tokens, -1)
        last = lax.broadcasted_iota(jnp.int32, tokens.shape, 1) == self.length[:, None] - 1
        return jnp.where(last, self.pending[:, None], tokens), self.length

    def mask(self, active: Array) -> "Choice":
        """Rows where ``active`` [B] is false take no part: length 0, path -1, pending as it is."""
        return self.replace(
            path=jnp.where(active[:, None], self.path, -1),
            length=jnp.where(active, self.length, 0),
        )


def select(
    tree: Tree,
    logits: Array,
    *,
    sampling: Sampling = GREEDY,
    key: Array | None = None,
    position: Any = None,
    history: Any = None,
    rule: str = "match",
    q: Array | None = None,
) -> Choice:
    """Choose a path of every tree of the batch; usable alone and inside jit.

    Args:
      tree: the verified tree.
      logits: [B, N, V] target logits of its rows, any float type; computed with in float32.
      sampling: the settings.
      key: one typed key (folded with the row), or [B] keys; needed when sampling.
      position: ``state.length``, an integer or [B]; needed when sampling. A node of depth d draws
        the token at absolute position ``position + 1 + d``.
      history: token counts for penalties; no present rule or setting reads them.
      rule: a name in ``RULES``.
      q: [B, N, V] proposal probabilities, row v for v's children; ``match`` does not need them.

    Raises:
      ValueError: an unknown rule, wrong shapes, a setting out of range, key or position missing.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown, expected one of: {', '.join(sorted(RULES))}")
    logits = jnp.asarray(logits)
    if logits.ndim != 3 or logits.shape[:2] != tree.tokens.shape:
        raise ValueError(
            f"logits have shape {logits.shape}, expected (B, N, V) with the tree's (B, N) = "
            f"{tree.tokens.shape}"
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits are of type {logits.dtype}, expected a float type")
    return _select(tree, logits, *per_sequence(tree.batch, sampling, key, position), rule=rule)


@partial(jax.jit, static_argnames=("rule",))
def _select(
    tree: Tree,
    logits: Array,
    sampling: Sampling,
    keys: Array | None,
    position: Array | None,
    rule: str,
) -> Choice:
    return jax.vmap(RULES[rule])(tree, logits, sampling, keys, position)


def match(
    tree: Tree, logits: Array, sampling: Sampling, key: Array | None, position: Array | None
) -> Choice:
    """Coupled sample-match for one sequence: follow the target's own draws down the tree.

    One draw a visited node, with the noise of its absolute position. No redraw: a mismatch emits
    the very draw that it was compared with. Optimal among lossless rules for a tree that is a
    function of the context, since then P(v accepted) is the product of p along v's path, which no
    lossless rule can exceed. With temperature 0 this is greedy acceptance.
    """

    def draw_at(node: Array, depth: Array) -> Array:
        row = lax.dynamic_index_in_dim(logits, node, keepdims=False)
        return draw(row, sampling, key, None if position is None else position + 1 + depth)

    return walk(tree, draw_at)


def walk(tree: Tree, draw_at: Callable[[Array, Array], Array]) -> Choice:
    """Follow ``draw_at(node, depth) -> token`` from the root of one tree while a child carries it.

    Only the nodes of the path are drawn at, so a step costs (accepted + 1) rows of logits and
    noise, not N. Of equal siblings the first wins: lowest rank, then lowest row. Inactive rows
    never match, as no draw is -1.
    """
    capacity, bound = tree.tokens.shape[0], tree.max_depth + 1
    rows = jnp.arange(capacity, dtype=jnp.int32)

    def step(carry):
        path, length, _, _ = carry
        node = path[length - 1]
        token = draw_at(node, length - 1)
        carries = (tree.parent == node) & (tree.tokens == token) & (rows < tree.size)
        order = jnp.where(carries, tree.rank, capacity)
        child = jnp.argmin(order).astype(jnp.int32)
        found = carries.any() & (length < bound)
        path = jnp.where((jnp.arange(bound) == length) & found, child, path)
        return path, length + found.astype(jnp.int32), token, ~found

    path = jnp.full(bound, -1, jnp.int32).at[0].set(0)
    start = (path, jnp.int32(1), jnp.int32(-1), jnp.bool_(False))
    path, length, pending, _ = lax.while_loop(lambda carry: ~carry[3], step, start)
    return Choice(path=path, length=length, pending=pending)


RULES = {"match": match}
