"""Arithmetic on rows of logits: the stages of ``sampling.process``, each a function of arrays.

Sets are found by searching for the least value kept and never by sorting, so that ties are kept by
value and the order of tokens never matters; where exactly k tokens are wanted, lower ids go first
among equals.
"""

import operator

import jax.numpy as jnp
import numpy as np
from jax import lax

from treejax.history import History
from treejax.shapes import Array, Bool, Float32, Int32, typed

_BITS = 32  # of a float32
_DIGIT = 4  # bits that a round on an accelerator finds


@typed
def add_bias(
    logits: Float32[Array, "*rows V"], bias: Float32[Array, " V"]
) -> Float32[Array, "*rows V"]:
    """Logits and bias; a bias of -inf bans a token."""
    return logits + jnp.broadcast_to(bias, logits.shape)


@typed
def ban_ends(
    logits: Float32[Array, "*rows V"],
    ends: Bool[Array, " V"],
    emitted: Int32[Array, "*rows"],
    at_least: Int32[Array, ""],
) -> Float32[Array, "*rows V"]:
    """Ban the tokens of ``ends`` in rows whose context holds fewer than ``at_least`` outputs."""
    short = (emitted < at_least)[..., None]
    return jnp.where(short & jnp.broadcast_to(ends, logits.shape), -jnp.inf, logits)


@typed
def penalise_repetition(
    logits: Float32[Array, "*rows V"], history: History, penalty: Float32[Array, ""]
) -> Float32[Array, "*rows V"]:
    """Divide positive logits of tokens seen in prompt or output, multiply the others.

    CTRL, arXiv 1909.05858, section 4.1, with the sign fix that is now common.
    """
    seen = history.prompt | (history.output > 0)
    moved = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, moved, logits)


@typed
def penalise_frequency(
    logits: Float32[Array, "*rows V"], history: History, penalty: Float32[Array, ""]
) -> Float32[Array, "*rows V"]:
    """Take away ``penalty`` for every time that a token was put out."""
    return logits - penalty * history.output.astype(jnp.float32)


@typed
def penalise_presence(
    logits: Float32[Array, "*rows V"], history: History, penalty: Float32[Array, ""]
) -> Float32[Array, "*rows V"]:
    """Take away ``penalty`` once from every token that was put out."""
    return logits - penalty * (history.output > 0).astype(jnp.float32)


@typed
def first_argmax(values: Float32[Array, "*rows V"]) -> Int32[Array, "*rows"]:
    """Lowest index of the maximum. Two vectorised passes: XLA's argmax is 3 times slower on CPU."""
    ids, size = token_ids(values), values.shape[-1]
    first = jnp.where(values == values.max(axis=-1, keepdims=True), ids, size - 1)
    return first.min(axis=-1)


def token_ids(like: Array) -> Array:
    """Every token's id, in the shape of ``like`` [.., V]."""
    return lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)


@typed
def top_k_set(
    values: Float32[Array, "*rows V"], k: Int32[Array, ""], exact: bool
) -> Bool[Array, "*rows V"]:
    """Every token that reaches the k-th largest value; if ``exact`` k of them, lowest ids first."""
    k = jnp.minimum(k, values.shape[-1])
    least = _threshold(values, jnp.ones_like(values), k.astype(jnp.float32))
    if not exact:
        return values >= least
    above, equal = values > least, values == least
    room = k - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room))


@typed
def top_p_set(
    values: Float32[Array, "*rows V"], weight: Float32[Array, "*rows V"], p: Float32[Array, ""]
) -> Bool[Array, "*rows V"]:
    """The smallest set of highest values that holds a share p of all ``weight``."""
    need = p * weight.sum(axis=-1, keepdims=True)
    # At exactly 1 rounding could hide the lightest tokens from the sum; keep every one.
    return (values >= _threshold(values, weight, need)) | (p >= 1)


@typed
def _threshold(
    values: Float32[Array, "*rows V"],
    weight: Float32[Array, "*rows V"],
    need: Float32[Array, "..."],
) -> Float32[Array, "*rows 1"]:
    """The largest t for which {values >= t} weighs ``need`` (at most the whole weight).

    A search over the float32 numbers in their order, which ends on a value of the row. A float sum
    in a fixed order is monotone in its terms, so the search is exact with respect to it.
    """
    return lax.platform_dependent(
        *(values, weight, need), cpu=threshold_by_halves, default=threshold_by_digits
    )


def threshold_by_halves(values: Array, weight: Array, need: Array) -> Array:
    """A bit a round: fewest comparisons, for one core."""
    low = jnp.full((*values.shape[:-1], 1), _ordinal(jnp.float32(-jnp.inf)))
    high = _ordinal(values.max(axis=-1, keepdims=True)) + 1

    def halve(_, bracket):
        low, high = bracket
        # low and high may be 2^32 - 1 apart: halve the distance as an unsigned number.
        middle = low + ((high - low).astype(jnp.uint32) >> 1).astype(jnp.int32)
        inside = jnp.where(values >= _number(middle), weight, 0.0)
        reached = inside.sum(axis=-1, keepdims=True) >= need
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low, _ = lax.fori_loop(0, _BITS, halve, (low, high))
    return _number(low)


def threshold_by_digits(values: Array, weight: Array, need: Array) -> Array:
    """A digit of several bits a round, and no loop: an accelerator compares a value that it has
    read with many others in the time that it takes to read the next, and waits for a host between
    the turns of a loop."""
    places = _place_in_order(values)
    found = jnp.zeros((*values.shape[:-1], 1), jnp.uint32)
    for shift in range(_BITS - _DIGIT, -1, -_DIGIT):
        digits = [found + jnp.uint32(digit << shift) for digit in range(1, 1 << _DIGIT)]
        inside = [jnp.where(places >= digit, weight, 0.0) for digit in digits]
        sums = lax.reduce(
            inside,
            [jnp.float32(0)] * len(inside),
            lambda total, part: [*map(operator.add, total, part)],
            [values.ndim - 1],
        )
        reached = sum((total[..., None] >= need).astype(jnp.uint32) for total in sums)
        found = found + (reached << shift)
    least, most = jnp.float32(-jnp.inf), values.max(axis=-1, keepdims=True)
    found = jnp.clip(found, _place_in_order(least), _place_in_order(most))  # not a pattern of NaN
    return _number(lax.bitcast_convert_type(found ^ _SIGN, jnp.int32))


_SIGN = np.uint32(1 << (_BITS - 1))


def _place_in_order(x: Array) -> Array:
    """float32 -> uint32 such that integer order is the order of the numbers."""
    return lax.bitcast_convert_type(_ordinal(x), jnp.uint32) ^ _SIGN


def _ordinal(x: Array) -> Array:
    """float32 -> int32 such that integer order is the order of the numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _number(ordinal: Array) -> Array:
    return lax.bitcast_convert_type(ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF), jnp.float32)
