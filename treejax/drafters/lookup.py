"""Prompt lookup on the device: where the last tokens occurred before, and what followed.

``History`` holds the committed tokens of each sequence. ``look_up`` finds the longest suffix of a
context that occurred earlier and what followed its most recent occurrences; ``best_tree`` keeps the
prefixes that most of them share, ``walk`` follows the majority from token to token. All shapes are
static and nothing visits the host. All but ``append`` is written for one sequence.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.shapes import Array, Int32, typed
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Settings of a lookup.

    Attributes:
      longest, shortest: how many of the last tokens must have occurred before, at most and least.
      matches: how many of the most recent occurrences are counted.
    """

    longest: int = 8
    shortest: int = 1
    matches: int = 8

    def __post_init__(self):
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"a lookup of {self.shortest} to {self.longest} tokens is impossible, "
                "expected 1 <= shortest <= longest"
            )
        if self.matches < 1:
            raise ValueError(
                f"a lookup of {self.matches} matches is impossible, expected 1 or more"
            )


class History(struct.PyTreeNode):
    """Committed tokens: tokens [B, S + 1], the last one a spare, and length [B]."""

    tokens: Array
    length: Array


def empty_history(batch: int, max_length: int) -> History:
    tokens = jnp.full((batch, max_length + 1), -1, jnp.int32)
    return History(tokens=tokens, length=jnp.zeros(batch, jnp.int32))


def append(history: History, tokens: Array, counts: Array) -> History:
    """Append the first ``counts`` [B] of ``tokens`` [B, T] to each sequence."""
    spare = history.tokens.shape[1] - 1
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    rows = jnp.where(steps < counts[:, None], history.length[:, None] + steps, spare)
    batch = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    written = history.tokens.at[batch, rows].set(tokens.astype(jnp.int32))
    return History(tokens=written, length=history.length + counts.astype(jnp.int32))


class Matches(struct.PyTreeNode):
    """Continuations of the longest match, the most recent occurrence first.

    Attributes:
      tokens: [J, D] int32; -1 in rows without an occurrence.
      found: [J] bool.
      same: [J, J, D] bool, whether both rows were found and agree on their first d + 1 tokens.
    """

    tokens: Array
    found: Array
    same: Array


@typed
def extend(
    tokens: Int32[Array, " W"], length: Int32[Array, ""], extra: Int32[Array, " E"]
) -> Int32[Array, " W+E"]:
    """The context ``tokens[:length]`` followed by ``extra``; what lies beyond is unspecified."""
    room = jnp.concatenate([tokens, jnp.full_like(extra, -1)])
    return lax.dynamic_update_slice(room, extra, (length,))


@typed
def match_lengths(
    context: Int32[Array, " W"], length: Int32[Array, ""], longest: int
) -> Int32[Array, " W"]:
    """How many tokens before position e equal the last tokens of ``context[:length]``.

    At most ``longest``; 0 at position 0 and at or past ``length``, where nothing follows.
    """
    width = context.shape[0]
    padded = jnp.concatenate([jnp.full(longest, -1, jnp.int32), context])
    run, total = jnp.ones(width, bool), jnp.zeros(width, jnp.int32)
    for back in range(longest):
        last = jnp.where(back < length, context[jnp.maximum(length - 1 - back, 0)], -2)
        run = run & (padded[longest - 1 - back :][:width] == last)
        total = total + run.astype(jnp.int32)
    return jnp.where(jnp.arange(width) < length, total, 0)


@typed
def look_up(
    context: Int32[Array, " W"], length: Int32[Array, ""], settings: Lookup, depth: int
) -> Matches:
    """What followed the longest suffix of ``context[:length]`` that occurred before.

    Its most recent occurrences are read ``depth`` tokens far. A continuation that reaches the end
    of the context goes on repeating from its own start, as a copy in LZ77 does.
    """
    lengths = match_lengths(context, length, settings.longest)
    best = lengths.max()
    positions = jnp.arange(context.shape[0], dtype=jnp.int32)
    candidates = jnp.where((lengths == best) & (best >= settings.shortest), positions, 0)
    starts = []
    for _ in range(settings.matches):
        starts.append(candidates.max())
        candidates = jnp.where(candidates < starts[-1], candidates, 0)
    start = jnp.stack(starts)
    found = start > 0
    steps = jnp.arange(depth, dtype=jnp.int32)[None, :]
    period = jnp.maximum(length - start, 1)[:, None]
    tokens = jnp.where(found[:, None], context[start[:, None] + steps % period], -1)
    equal = tokens[:, None, :] == tokens[None, :, :]
    both = (found[:, None] & found[None, :])[:, :, None]
    same = lax.cumprod((equal & both).astype(jnp.int32), axis=2).astype(bool)
    return Matches(tokens=tokens, found=found, same=same)


@typed
def walk(matches: Matches) -> Int32[Array, " D"]:
    """Follow the majority: at each depth the commonest next token, the most recent on a tie."""
    chosen, alive = [], matches.found
    for d in range(matches.tokens.shape[1]):
        votes = jnp.where(alive, (matches.same[:, :, d] & alive[None, :]).sum(axis=1), 0)
        leader = jnp.argmax(votes)
        chosen.append(matches.tokens[leader, d])
        alive = alive & matches.same[leader, :, d]
    return jnp.stack(chosen)


def best_tree(matches: Matches, pending: Array, nodes: int) -> Tree:
    """The ``nodes`` most frequent prefixes below ``pending``, as a tree without a batch axis.

    Ordered by count, then by depth, then by recency, so that a prefix comes before all that
    extend it and the choice is closed under taking parents.
    """
    count, depth = matches.tokens.shape
    votes = matches.same.sum(axis=1, dtype=jnp.int32)
    first = jnp.argmax(matches.same, axis=1).astype(jnp.int32)
    rows = jnp.arange(count, dtype=jnp.int32)[:, None]
    steps = jnp.arange(depth, dtype=jnp.int32)[None, :]
    stands = matches.found[:, None] & (first == rows)
    order = (votes * depth + (depth - 1 - steps)) * count + (count - 1 - rows)
    value, entry = lax.top_k(jnp.where(stands, order, -1).reshape(-1), nodes)
    used = value >= 0

    place = jnp.zeros(count * depth, jnp.int32).at[entry].set(jnp.arange(1, nodes + 1))
    row, step = entry // depth, entry % depth
    above = first[row, jnp.maximum(step - 1, 0)] * depth + step - 1
    parent = jnp.where(step > 0, place[jnp.maximum(above, 0)], 0)
    parent = jnp.append(jnp.int32(-1), jnp.where(used, parent, -1))
    token = jnp.where(used, matches.tokens.reshape(-1)[entry], -1)
    earlier = jnp.tri(nodes + 1, k=-1, dtype=bool)
    siblings = earlier & (parent[:, None] == parent[None, :]) & (parent >= 0)[:, None]
    return Tree(
        tokens=jnp.append(pending, token),
        parent=parent,
        rank=siblings.sum(axis=1, dtype=jnp.int32),
        size=1 + used.sum(dtype=jnp.int32),
        max_depth=depth,
    )
