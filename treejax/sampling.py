"""From logits to a token: one function for every row that is ever drawn.

Tree nodes, the bonus token, plain decoding and the token after prefill all go through ``draw``;
probabilities of a target or a drafter are ``softmax(process(logits))``. The Gumbel noise of a draw
depends on (sequence key, absolute position, purpose, slot) alone, so that a stream is the same
alone, in a batch, with padding and with any tree: drafting decides only how many draws one step
reveals, never what they are.

Cost for a row of V logits: greedy is one argmax. Sampling adds 2 V random numbers; top-k and top-p
add ``_SEARCH_ROUNDS`` passes each over the row (no sort: on a CPU 10 to 25 times cheaper).
"""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.core import Tracer

from treejax.shapes import Array, Bool, Float, Float32, Int, Int32, Key, typed

TARGET = 0  # purpose of the noise that draws the output itself; coupled drafters rank with it too
_SEARCH_ROUNDS = 32  # one a bit of a float32
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Sampling(struct.PyTreeNode):
    """How to draw: each setting is a number, or an array [B] with one value a sequence.

    Values are data; which settings are present (not None) is static. The order is temperature,
    min-p, top-k, top-p. Ties are kept by value, so that the order of tokens never matters.

    Attributes:
      temperature: >= 0; 0 or None is greedy. In an array, rows with 0 are greedy.
      top_k: >= 1; keeps every token whose logit reaches the k-th largest.
      top_p: in (0, 1]; keeps the smallest set of highest values with at least this mass.
      min_p: in [0, 1]; keeps probabilities of at least ``min_p`` times the largest.
      repetition_penalty, presence_penalty, frequency_penalty: refused until supported.
    """

    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None

    def prepared(self) -> "Sampling":
        """Validate and canonicalise on the host, before settings enter a jitted function.

        Numbers that change nothing (temperature 0, top_p 1, min_p 0) become None, others arrays;
        what jit already traces passes unchecked. ``temperature=None`` then means that no row
        samples, and the other stages are dropped: none of them moves an argmax. Preparing twice is
        preparing once.

        Raises:
          ValueError: a setting out of range, or a penalty, by name.
        """
        for name, neutral in _PENALTIES.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, numbers.Real) and value == neutral):
                raise ValueError(
                    f"{name} is not supported yet, expected None or {neutral}: leave it out"
                )
        settings = {
            name: stage.prepare(name, getattr(self, name)) for name, stage in STAGES.items()
        }
        if settings["temperature"] is None:
            return Sampling(temperature=None)
        return Sampling(**settings)


GREEDY = Sampling()


@dataclasses.dataclass(frozen=True)
class _Stage:
    """What one setting may be: its dtype, the number that switches it off, its range in words."""

    dtype: type
    neutral: float | None
    valid: Callable[[np.ndarray], Any]
    expected: str

    def prepare(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        array = value if isinstance(value, Tracer) else np.asarray(value)
        kinds = (jnp.integer,) if self.dtype is np.int32 else (jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
            raise ValueError(f"{name} is of type {array.dtype}, expected {self.expected}")
        if array.ndim > 1:
            raise ValueError(f"{name} has shape {array.shape}, expected one number or [B] of them")
        if isinstance(array, np.ndarray):
            wrong = array[~self.valid(array)]
            if wrong.size:
                raise ValueError(f"{name} is {wrong.flat[0]}, expected {self.expected}")
            if isinstance(value, numbers.Real) and value == self.neutral:
                return None
        return array.astype(self.dtype)


STAGES = {
    "temperature": _Stage(
        np.float32,
        0.0,
        lambda x: (x >= 0) & (x <= np.finfo(np.float32).max),
        "a finite number >= 0 (0 is greedy)",
    ),
    "min_p": _Stage(np.float32, 0.0, lambda x: (x >= 0) & (x <= 1), "a number in [0, 1]"),
    "top_k": _Stage(
        np.int32,
        None,
        lambda x: (x >= 1) & (x <= np.iinfo(np.int32).max),
        "an integer >= 1 (None keeps every token)",
    ),
    "top_p": _Stage(np.float32, 1.0, lambda x: (x > 0) & (x <= 1), "a number in (0, 1]"),
}


@typed
def process(logits: Float[Array, "*rows V"], sampling: Sampling) -> Float32[Array, "*rows V"]:
    """Log-weights of the distribution that is drawn from; -inf outside it.

    ``softmax`` of the result is p (or q). The largest weight is exactly 0. At temperature 0 (or
    None) the result is one-hot: 0 at the largest logit of lowest id. Settings are scalars here;
    vmap for one a row.
    """
    logits = logits.astype(jnp.float32)
    top = logits.max(axis=-1, keepdims=True)
    best = first_argmax(logits)[..., None]
    one_hot = jnp.where(_token_ids(logits) == best, 0.0, -jnp.inf)
    temperature = sampling.temperature
    if temperature is None:
        return one_hot
    # Shifted before the division: z stays finite at any temperature and g is added near zero.
    z = (logits - top) / jnp.where(temperature > 0, temperature, 1.0)
    if sampling.min_p is not None:
        z = jnp.where(jnp.exp(z) >= sampling.min_p, z, -jnp.inf)
    if sampling.top_k is not None:
        count = jnp.minimum(sampling.top_k, logits.shape[-1]).astype(jnp.float32)
        z = jnp.where(_top_set(logits, jnp.ones_like(z), count), z, -jnp.inf)
    if sampling.top_p is not None:
        weight = jnp.exp(z)  # relative: the survivors are renormalised by comparing with their sum
        mass = sampling.top_p * weight.sum(axis=-1, keepdims=True)
        # At exactly 1 rounding could hide the lightest tokens from the sum; keep every one.
        z = jnp.where(_top_set(logits, weight, mass) | (sampling.top_p >= 1), z, -jnp.inf)
    return jnp.where(temperature > 0, z, one_hot)


@typed
def noise(
    key: Key[Array, ""], position: Int[Array, ""], vocab: int, purpose: int = TARGET, slot: int = 0
) -> Float32[Array, " V"]:
    """Standard Gumbel noise for the draw of the token at absolute ``position``.

    ``mode="high"``, since JAX's default ends near 16 and could never draw a token below 1e-7.
    """
    for data in (position, purpose, slot):
        key = jax.random.fold_in(key, data)
    return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")


@typed
def draw(
    logits: Float[Array, " V"],
    sampling: Sampling,
    key: Key[Array, ""] | None,
    position: Int[Array, ""] | None,
) -> Int32[Array, ""]:
    """The token at absolute ``position``, from one row of logits and prepared, scalar settings.

    argmax(z + g) draws from softmax(z) (Gumbel-max). Ties go to the lowest id. ``key`` and
    ``position`` may be None when greedy (temperature None), which draws no noise.
    """
    if sampling.temperature is None:
        return first_argmax(logits.astype(jnp.float32))
    if key is None or position is None:
        raise ValueError("a key and a position are needed to sample, or temperature=None")
    return first_argmax(process(logits, sampling) + noise(key, position, logits.shape[-1]))


def sample(
    logits: Array,
    *,
    sampling: Sampling = GREEDY,
    key: Array | None = None,
    position: Any = None,
) -> Array:
    """Draw one token a sequence, by the function that draws at every tree node.

    Args:
      logits: [B, V], any float type; computed with in float32.
      sampling: the settings.
      key: one typed key (folded with the row), or [B] keys; needed when sampling.
      position: absolute position of the token drawn, ``state.length`` after prefill; an integer or
        [B]; needed when sampling.

    Returns:
      [B] int32 tokens.

    Raises:
      ValueError: wrong shapes, a setting out of range, key or position missing.
    """
    logits = jnp.asarray(logits)
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"logits have shape {logits.shape} and type {logits.dtype}, expected floats [B, V]"
        )
    return _sample(logits, *per_sequence(logits.shape[0], sampling, key, position))


@jax.jit
def _sample(logits: Array, sampling: Sampling, keys: Array | None, position: Array | None):
    return jax.vmap(draw)(logits, sampling, keys, position)


def per_sequence(
    batch: int, sampling: Sampling, key: Array | None, position: Any
) -> tuple[Sampling, Array | None, Array | None]:
    """Validated settings, keys and positions with a leading batch axis; usable inside jit.

    Key and position are None when every row is greedy.
    """
    sampling = sampling.prepared()
    if sampling.temperature is None:
        return sampling, None, None
    for name, value in (("key", key), ("position", position)):
        if value is None:
            raise ValueError(
                f"sampling needs a {name}: pass {name}=, or temperature=0.0 for greedy decoding"
            )
    settings = {
        name: _rows(name, getattr(sampling, name), batch)
        for name in STAGES
        if getattr(sampling, name) is not None
    }
    position = jnp.asarray(position)
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"position is of type {position.dtype}, expected integers")
    position = _rows("position", position.astype(jnp.int32), batch)
    return Sampling(**settings), _row_keys(key, batch), position


def _rows(name: str, value: Any, batch: int) -> Array:
    value = jnp.asarray(value)
    if value.shape not in ((), (batch,)):
        raise ValueError(
            f"{name} has shape {value.shape}, expected one value or ({batch},), one a sequence"
        )
    return jnp.broadcast_to(value, (batch,))


def _row_keys(key: Any, batch: int) -> Array:
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        kind = getattr(key, "dtype", type(key).__name__)
        raise ValueError(f"key is of type {kind}, expected a typed key from jax.random.key(seed)")
    if key.shape == ():
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch))
    return _rows("key", key, batch)


@typed
def first_argmax(values: Float32[Array, "*rows V"]) -> Int32[Array, "*rows"]:
    """Lowest index of the maximum. Two vectorised passes: XLA's argmax is 3 times slower on CPU."""
    ids, size = _token_ids(values), values.shape[-1]
    first = jnp.where(values == values.max(axis=-1, keepdims=True), ids, size - 1)
    return first.min(axis=-1)


def _token_ids(like: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)


@typed
def _top_set(
    values: Float32[Array, "*rows V"],
    weight: Float32[Array, "*rows V"],
    need: Float32[Array, "..."],
) -> Bool[Array, "*rows V"]:
    """The smallest set {values >= t} whose weight reaches ``need`` (at most the whole weight).

    The largest such t is found by bisection over the float32 numbers in their order, which ends on
    a value of the row. A float sum in a fixed order is monotone in its terms, so the search is
    exact with respect to it.
    """
    low = jnp.full((*values.shape[:-1], 1), _ordinal(jnp.float32(-jnp.inf)))
    high = _ordinal(values.max(axis=-1, keepdims=True)) + 1

    def halve(_, bracket):
        low, high = bracket
        # low and high may be 2^32 - 1 apart: halve the distance as an unsigned number.
        middle = low + ((high - low).astype(jnp.uint32) >> 1).astype(jnp.int32)
        inside = jnp.where(values >= _number(middle), weight, 0.0)
        reached = inside.sum(axis=-1, keepdims=True) >= need
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low, _ = lax.fori_loop(0, _SEARCH_ROUNDS, halve, (low, high))
    return values >= _number(low)


def _ordinal(x: Array) -> Array:
    """float32 -> int32 such that integer order is the order of the numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _number(ordinal: Array) -> Array:
    return lax.bitcast_convert_type(ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF), jnp.float32)
