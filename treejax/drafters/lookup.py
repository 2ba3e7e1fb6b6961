"""Where the last tokens of a context occurred before, and what followed: on the device.

``look_up`` reads the context itself, ``look_up_store`` earlier responses (``ResponseStore``). Both
give the most recent occurrences, one group a length of the match that may decide; ``find_best``
keeps the group with the best score. All shapes are static, nothing visits the host, and every
function is written for one sequence. Method: prompt lookup with the counts and the score of
SuffixDecoding (arXiv 2411.04975).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from treejax.shapes import Array, Int32, typed

RULES = ("longest", "score")


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Settings of a lookup.

    Attributes:
      longest, shortest: how many of the last tokens must have occurred before, at most and least.
      matches: how many of the most recent occurrences are counted.
      rule: "longest" takes the longest match, "score" the length whose tree has the largest sum of
        values; the longer one on a tie.
      least_value: prefixes below this value (how often they were seen, of all occurrences counted)
        are not proposed.
    """

    longest: int = 8
    shortest: int = 1
    matches: int = 8
    rule: str = "longest"
    least_value: float = 0.0

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
        if self.rule not in RULES:
            raise ValueError(f"lookup rule {self.rule!r} is unknown, expected {' or '.join(RULES)}")
        if not 0.0 <= self.least_value <= 1.0 or math.isnan(self.least_value):
            raise ValueError(f"least_value is {self.least_value}, expected a number from 0 to 1")


class Matches(struct.PyTreeNode):
    """Occurrences of the last tokens, the most recent first; a leading axis G holds groups.

    Attributes:
      tokens: [J, D] int32 what followed; -1 in rows without an occurrence and where text ends.
      found: [J] bool.
      length: [] int32, tokens of the match; 0 if there is none.
    """

    tokens: Array
    found: Array
    length: Array

    @property
    def same(self) -> Array:
        """[J, J, D] bool, whether both rows hold d + 1 tokens and agree on all of them."""
        real = self.tokens >= 0
        equal = (self.tokens[:, None] == self.tokens[None]) & real[:, None] & real[None]
        return jnp.cumprod(equal.astype(jnp.int32), axis=2).astype(bool)

    @property
    def count(self) -> Array:
        """How many occurrences were counted: [] int32."""
        return self.found.sum(dtype=jnp.int32)


@typed
def match_lengths(
    text: Int32[Array, " W"], last: Int32[Array, " L"], valid: Int32[Array, ""]
) -> Int32[Array, " W"]:
    """How many tokens before each position of ``text[:valid]`` equal the last of a context.

    ``last``: the context's last tokens, the latest first, -2 where it has no more. 0 at position 0
    and at or past ``valid``, where nothing follows.
    """
    width, longest = text.shape[0], last.shape[0]
    padded = jnp.concatenate([jnp.full(longest, -1, jnp.int32), text])
    run, total = jnp.ones(width, bool), jnp.zeros(width, jnp.int32)
    for back in range(longest):
        run = run & (padded[longest - 1 - back :][:width] == last[back])
        total = total + run.astype(jnp.int32)
    return jnp.where(jnp.arange(width) < valid, total, 0)


@typed
def look_up(
    context: Int32[Array, " W"], length: Int32[Array, ""], settings: Lookup, depth: int
) -> Matches:
    """What followed the last tokens of ``context[:length]`` where they occurred in it before.

    Occurrences are read ``depth`` tokens far. A continuation that reaches the end of the context
    goes on repeating from its own start, as a copy in LZ77 does.
    """
    lengths = match_lengths(context, last_tokens(context, length, settings), length)
    start, sizes = _starts(lengths, settings)
    steps = jnp.arange(depth, dtype=jnp.int32)[None, None, :]
    period = jnp.maximum(length - start, 1)[:, :, None]
    tokens = context[start[:, :, None] + steps % period]
    found = start > 0
    return Matches(tokens=jnp.where(found[:, :, None], tokens, -1), found=found, length=sizes)


@typed
def look_up_store(
    store: Int32[Array, " C"], last: Int32[Array, " L"], settings: Lookup, depth: int
) -> Matches:
    """What followed ``last`` (as of ``last_tokens``) in earlier responses, up to their ends."""
    width = store.shape[0]
    lengths = match_lengths(store, last, jnp.int32(width))
    start, sizes = _starts(jnp.where(store >= 0, lengths, 0), settings)
    place = start[:, :, None] + jnp.arange(depth, dtype=jnp.int32)[None, None, :]
    tokens = jnp.where(place < width, store[jnp.minimum(place, width - 1)], -1)
    inside = jnp.cumprod((tokens >= 0).astype(jnp.int32), axis=2).astype(bool)
    found = start > 0
    tokens = jnp.where(inside & found[:, :, None], tokens, -1)
    return Matches(tokens=tokens, found=found, length=sizes)


@typed
def last_tokens(
    context: Int32[Array, " W"], length: Int32[Array, ""], settings: Lookup
) -> Int32[Array, " L"]:
    """The last ``settings.longest`` tokens of ``context[:length]``, the latest first, then -2."""
    back = jnp.arange(settings.longest, dtype=jnp.int32)
    return jnp.where(back < length, context[jnp.maximum(length - 1 - back, 0)], -2)


def find_best(
    context: Array,
    length: Array,
    settings: Lookup,
    depth: int,
    score: Callable[[Matches], Array],
    weights: dict[str, Array],
) -> Matches:
    """The best matches of the last tokens of ``context[:length]``, here or in a store."""
    sources = [look_up(context, length, settings, depth)]
    if "store" in weights:
        last = last_tokens(context, length, settings)
        sources.append(look_up_store(weights["store"], last, settings, depth))
    # The longest match first, and on a tie the context: the first of the best scores is taken.
    stacked = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *sources)
    groups = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)
    best = jnp.argmax(jax.vmap(score)(groups))
    return jax.tree.map(lambda x: x[best], groups)


def _starts(lengths: Array, settings: Lookup) -> tuple[Array, Array]:
    """Where the latest occurrences go on: [G, J], 0 for none; and the groups' lengths [G].

    "score" makes a group of every length, the longest first, "longest" one of the longest match.
    """
    if settings.rule == "score":
        sizes = jnp.arange(settings.longest, settings.shortest - 1, -1, dtype=jnp.int32)
    else:
        sizes = jnp.maximum(lengths.max(), settings.shortest)[None]
    positions = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    fits = jnp.where(lengths[None, :] >= sizes[:, None], positions[None, :], 0)
    starts = [fits.max(axis=1)]
    for _ in range(settings.matches - 1):
        earlier = jnp.where(fits < starts[-1][:, None], fits, 0)
        starts.append(earlier.max(axis=1))
    start = jnp.stack(starts, axis=1)
    return start, jnp.where(start[:, 0] > 0, sizes, 0)
