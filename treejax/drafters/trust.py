"""How often copies come true: measured while generating, by length of the match and occurrences.

A count ratio is over-confident, most of all where one occurrence was seen (ratio 1). The chance
that a copied token is right, once all before it were, is the ratio times a factor of its bucket:
hits by ratios offered, with add-one smoothing, and older steps fading away.
"""

import jax
import jax.numpy as jnp
from flax import struct

from treejax.shapes import Array, Bool, Float32, Int32, typed


class Trust(struct.PyTreeNode):
    """Counts by bucket: [B, L + 1, 2] float32, L the longest match; last axis: one or more seen.

    Attributes:
      offered: sum of the ratios of copied tokens whose truth is known.
      hits: how many of them were right.
    """

    offered: Array
    hits: Array


class Copies(struct.PyTreeNode):
    """A chain of copied tokens below one node.

    Attributes:
      tokens: [D] int32, -1 past its end.
      ratios: [D] float32, occurrences that agree by occurrences counted, given all tokens before.
      length: [] int32, the match above the first token; each token that comes true adds one.
      several: [D] bool, whether more than one occurrence was counted.
    """

    tokens: Array
    ratios: Array
    length: Array
    several: Array


def no_trust(batch: int, longest: int) -> Trust:
    shape = (batch, longest + 1, 2)
    return Trust(offered=jnp.zeros(shape, jnp.float32), hits=jnp.zeros(shape, jnp.float32))


@typed
def factors(trust: Trust) -> Float32[Array, " *B L 2"]:
    """Hits by ratios offered, add-one smoothed; at most 1.

    With nothing measured a match of m tokens has m / (m + 1): the one miss that smoothing adds,
    against a hit for every token that agreed.
    """
    agreed = jnp.arange(trust.hits.shape[-2], dtype=jnp.float32)[:, None]
    agreed = jnp.broadcast_to(agreed, trust.hits.shape)
    return jnp.minimum((trust.hits + agreed) / (trust.offered + agreed + 1.0), 1.0)


@typed
def chances(
    factor: Float32[Array, "L 2"],
    ratios: Float32[Array, " D"],
    lengths: Int32[Array, " D"],
    several: Bool[Array, " D"],
) -> Float32[Array, " D"]:
    """The chance of each copied token whose match is ``lengths`` long."""
    bucket = jnp.clip(lengths, 0, factor.shape[0] - 1)
    return ratios * factor[bucket, several.astype(jnp.int32)]


@typed
def learn(
    trust: Trust, copies: Copies, truth: Int32[Array, " D"], count: Int32[Array, ""], decay: float
) -> Trust:
    """One sequence's counts after a step that emitted the first ``count`` tokens of ``truth``.

    Tokens count from the first on as long as all before them were right. Buckets that saw nothing
    stay as they are, the others keep ``decay`` of what they had.
    """
    steps = jnp.arange(copies.tokens.shape[0], dtype=jnp.int32)
    right = (copies.tokens == truth) & (copies.tokens >= 0)
    before = jnp.cumprod(right.astype(jnp.int32))
    reached = (jnp.roll(before, 1).at[0].set(1) > 0) & (copies.tokens >= 0) & (steps < count)
    bucket = jnp.minimum(copies.length + steps, trust.hits.shape[0] - 1)
    here = jax.nn.one_hot(bucket, trust.hits.shape[0])[:, :, None]
    here = here * jax.nn.one_hot(copies.several.astype(jnp.int32), 2)[:, None, :]
    here = here * reached.astype(jnp.float32)[:, None, None]
    kept = jnp.where((here > 0).any(axis=0), jnp.float32(decay), jnp.float32(1.0))
    return Trust(
        offered=trust.offered * kept + (here * copies.ratios[:, None, None]).sum(axis=0),
        hits=trust.hits * kept + (here * right.astype(jnp.float32)[:, None, None]).sum(axis=0),
    )
