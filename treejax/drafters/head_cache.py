"""The MTP head's cache, which follows the accepted path.

Row t of the cache holds the pair of h_t and x_{t+1}, always computed from the target's own hidden
row: accepted hidden rows wait until the token after the last one is known, and the next proposal
begins by turning them all into cache rows. Rows of candidates stay outside the cache, so that a
rejection needs no rollback and full acceptance no repair.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax import layers
from treejax.config import ModelConfig
from treejax.drafters.base import Draft, path_tokens
from treejax.mtp import head
from treejax.shapes import Array
from treejax.tree import Tree


class HeadMemory(struct.PyTreeNode):
    """The head's cache, and what waits to enter it.

    Attributes:
      keys, values: [B, S + 1, Hkv, D]; row S is a spare that absorbs writes of inactive rows.
      rows: [B] int32, pairs in the cache.
      waiting: [B, W, H] hidden rows that follow them, W = the tree's depth + 1.
      after: [B, W] int32, the token after each; unknown after the last, the pending token.
      count: [B] int32, how many wait; ``rows + count`` is the committed length.
      stored: [B] int32, how many of them proposing has put into the cache, from the first on; they
        are counted in ``rows`` by observing.
    """

    keys: Array
    values: Array
    rows: Array
    waiting: Array
    after: Array
    count: Array
    stored: Array


def empty_head(
    config: ModelConfig, dtype: Any, batch: int, max_length: int, depth: int
) -> HeadMemory:
    cache = (batch, max_length + 1, config.num_key_value_heads, config.head_dim)
    return HeadMemory(
        keys=jnp.zeros(cache, dtype),
        values=jnp.zeros(cache, dtype),
        rows=jnp.zeros(batch, jnp.int32),
        waiting=jnp.zeros((batch, depth + 1, config.hidden_size), dtype),
        after=jnp.zeros((batch, depth + 1), jnp.int32),
        count=jnp.zeros(batch, jnp.int32),
        stored=jnp.zeros(batch, jnp.int32),
    )


def prime_head(
    draft: Draft, memory: HeadMemory, hidden: Array, tokens: Array, lengths: Array
) -> HeadMemory:
    """Take in hidden [B, T, H] of tokens [B, T], of which ``lengths`` [B] are real.

    The new tokens complete the rows that wait; the last new hidden row waits in turn.
    """
    held = memory.waiting.shape[1]
    steps = jnp.arange(held + tokens.shape[1], dtype=jnp.int32)[None, :]
    count, lengths = memory.count[:, None], lengths.astype(jnp.int32)[:, None]
    part = lengths > 0
    known = jnp.where(part, count + lengths - 1, 0)  # pairs whose two halves are both known

    every = jnp.concatenate([memory.waiting, hidden], axis=1)
    source = jnp.where(steps < count, steps, jnp.minimum(held + steps - count, every.shape[1] - 1))
    rows = jnp.take_along_axis(every, source[:, :, None], axis=1)
    following = jnp.concatenate([memory.after, tokens.astype(jnp.int32)], axis=1)
    shifted = jnp.minimum(held + steps - (count - 1), following.shape[1] - 1)
    source = jnp.where(steps < count - 1, steps, shifted)
    after = jnp.take_along_axis(following, source, axis=1)

    memory = _store(draft, memory, rows, after, steps < known)
    last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, :, None], axis=1)
    return memory.replace(
        rows=memory.rows + known[:, 0],
        waiting=jnp.where(part[:, :, None], memory.waiting.at[:, :1].set(last), memory.waiting),
        count=jnp.where(part, 1, count)[:, 0],
    )


def observe_head(memory: HeadMemory, tree: Tree, choice: Any, hidden: Array) -> HeadMemory:
    """Count the rows that proposing stored; what else waited and the accepted path wait now."""
    room = memory.waiting.shape[1]
    path = choice.path[:, :room]
    path = jnp.pad(path, ((0, 0), (0, room - path.shape[1])), constant_values=-1)
    part = (choice.length > 0)[:, None]
    rows = jnp.take_along_axis(hidden, jnp.maximum(path, 0)[:, :, None], axis=1)
    after = jnp.roll(path_tokens(tree, path), -1, axis=1)

    stored = memory.stored[:, None]
    kept = memory.count[:, None] - stored
    steps = jnp.arange(room, dtype=jnp.int32)[None, :]
    source = jnp.where(steps < kept, stored + steps, room + steps - kept)
    every = jnp.concatenate([memory.waiting, rows.astype(memory.waiting.dtype)], axis=1)
    following = jnp.concatenate([memory.after, after], axis=1)
    waiting = jnp.take_along_axis(every, source[:, :, None], axis=1)
    return memory.replace(
        rows=jnp.where(part[:, 0], memory.rows + memory.stored, memory.rows),
        waiting=jnp.where(part[:, :, None], waiting, memory.waiting),
        after=jnp.where(part, jnp.take_along_axis(following, source, axis=1), memory.after),
        count=jnp.where(part, kept + choice.length[:, None], memory.count[:, None])[:, 0],
        stored=jnp.zeros_like(memory.stored),
    )


def rest_head(draft: Draft, memory: HeadMemory, pending: Array) -> HeadMemory:
    """Propose nothing: the pending token [B] is what follows the newest row.

    Hidden rows go on waiting, so that plain steps cost the head nothing, until a sequence has no
    room for one more. Then all but the newest of every sequence enter the cache for good: the
    tokens after them are known whatever comes next. Only new rows go through the condition, where
    a cache would be copied.
    """
    memory = memory.replace(after=_after(memory, pending.astype(jnp.int32)))
    full = (memory.count >= memory.waiting.shape[1]).any()

    def nothing(memory: HeadMemory) -> tuple[Array, Array]:
        shape = (*memory.after.shape, *memory.keys.shape[2:])
        return jnp.zeros(shape, memory.keys.dtype), jnp.zeros(shape, memory.values.dtype)

    def compute(memory: HeadMemory) -> tuple[Array, Array]:
        return _pairs(draft, memory, memory.waiting, memory.after)

    older = jnp.where(full, jnp.maximum(memory.count - 1, 0), 0)[:, None]
    steps = jnp.arange(memory.waiting.shape[1], dtype=jnp.int32)[None, :]
    memory = _put(memory, lax.cond(full, compute, nothing, memory), steps < older)
    source = jnp.minimum(steps + older, memory.waiting.shape[1] - 1)
    return memory.replace(
        rows=memory.rows + older[:, 0],
        waiting=jnp.take_along_axis(memory.waiting, source[:, :, None], axis=1),
        after=jnp.take_along_axis(memory.after, source, axis=1),
        count=memory.count - older[:, 0],
        stored=jnp.zeros_like(memory.stored),
    )


class Passes:
    """Head passes below one pending token a sequence; lives while one program is traced.

    Attributes:
      memory: with the waiting rows in its cache, not yet counted: proposing twice gives the same.
      newest: [B, H] hidden row above the root, the target's own.
      past: [B] int32 cached rows that every candidate sees; the newest pair is the root.
    """

    def __init__(self, draft: Draft, memory: HeadMemory, pending: Array):
        steps = jnp.arange(memory.waiting.shape[1], dtype=jnp.int32)[None, :]
        last = jnp.maximum(memory.count - 1, 0)[:, None]
        after, real = _after(memory, pending), steps < memory.count[:, None]
        stored = _store(draft, memory, memory.waiting, after, real)
        self.memory = stored.replace(stored=memory.count)
        self.newest = jnp.take_along_axis(memory.waiting, last[:, :, None], axis=1)[:, 0]
        self.past = memory.rows + memory.count - 1
        self._draft, self._made = draft, []

    def level(self, above: Array, tokens: Array, depth: int, mask: Any) -> Array:
        """The head's rows at ``m`` nodes of one depth: h' [B, m, H].

        Args:
          above: [B, m, H] hidden rows above the nodes: h' of their parents, or ``newest``.
          tokens: [B, m] int32, the nodes' own.
          mask: [m, M] or [B, m, M] bool: which of the M rows passed so far, this level's included,
            lie on each node's path.
        """
        positions = jnp.broadcast_to((self.past + depth)[:, None], tokens.shape)
        attend = _attend_drafted(self.memory, self.past, jnp.asarray(mask), self._made)
        weights, config = self._draft.weights, self._draft.config
        outputs, made = head(config, weights, above, tokens, positions, attend)
        self._made = [*self._made, made]
        return outputs


def _after(memory: HeadMemory, pending: Array) -> Array:
    """``memory.after`` [B, W] once the token after the newest row is known: the pending one."""
    steps = jnp.arange(memory.waiting.shape[1], dtype=jnp.int32)[None, :]
    last = jnp.maximum(memory.count - 1, 0)[:, None]
    return jnp.where(steps == last, pending[:, None], memory.after)


def _store(
    draft: Draft, memory: HeadMemory, hidden: Array, after: Array, real: Array
) -> HeadMemory:
    """Write the pairs that follow the cache into it, where they are ``real`` [B, T]."""
    return _put(memory, _pairs(draft, memory, hidden, after), real)


def _pairs(draft: Draft, memory: HeadMemory, hidden: Array, after: Array) -> tuple[Array, Array]:
    """Keys and values [B, T, Hkv, D] of the pairs that follow the cache.

    The head has one layer, so that keys and values come before any attention: what attends here
    goes nowhere and is never computed.
    """
    steps = jnp.arange(after.shape[1], dtype=jnp.int32)[None, :]
    positions = memory.rows[:, None] + steps
    return head(draft.config, draft.weights, hidden, after, positions, lambda q, k, v: q)[1]


def _put(memory: HeadMemory, pairs: tuple[Array, Array], real: Array) -> HeadMemory:
    steps = jnp.arange(real.shape[1], dtype=jnp.int32)[None, :]
    slots = jnp.where(real, memory.rows[:, None] + steps, memory.keys.shape[1] - 1)
    batch = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    keys, values = pairs
    return memory.replace(
        keys=memory.keys.at[batch, slots].set(keys, mode="promise_in_bounds"),
        values=memory.values.at[batch, slots].set(values, mode="promise_in_bounds"),
    )


def _attend_drafted(
    memory: HeadMemory, past: Array, mask: Array, earlier: Sequence[tuple[Array, Array]]
) -> Callable[[Array, Array, Array], Array]:
    """Attention over ``past`` [B] cached rows, the earlier levels' rows and the level's own."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        keys = jnp.concatenate([*(k for k, _ in earlier), k], axis=1)
        values = jnp.concatenate([*(v for _, v in earlier), v], axis=1)
        in_axes = (0, 0, 0, 0 if mask.ndim == 3 else None, 0, 0, 0)
        cache = memory.keys, memory.values, past
        return jax.vmap(layers.attend, in_axes=in_axes)(q, keys, values, mask, *cache)

    return attend
