"""What the settings of ``Sampling`` may be: checked on the host, and made into arrays.

What jit already traces passes unchecked: its shape and type are checked, its values cannot be.
"""

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from treejax.shapes import Array

_LARGEST_BIAS = 1e30  # times any repetition penalty it still is a float32
_FLOAT32, _INT32 = np.finfo(np.float32), np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Number:
    """One number, or one a sequence: its dtype, the number that changes nothing, its range."""

    dtype: type
    neutral: float | None
    valid: Callable[[np.ndarray], Any]
    expected: str

    def prepare(self, name: str, value: Any) -> Any:
        """None if ``value`` changes nothing, else an array of no axis or [B].

        Raises:
          ValueError: wrong type or shape, or out of range.
        """
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


_PENALTY = Number(np.float32, 0.0, lambda x: np.abs(x) <= 1e6, "a number in [-1e6, 1e6]")

NUMBERS = {
    "temperature": Number(
        np.float32,
        0.0,
        lambda x: (x >= 0) & (x <= _FLOAT32.max),
        "a finite number >= 0 (0 is greedy)",
    ),
    "min_p": Number(np.float32, 0.0, lambda x: (x >= 0) & (x <= 1), "a number in [0, 1]"),
    "top_k": Number(
        np.int32,
        None,
        lambda x: (x >= 1) & (x <= _INT32.max),
        "an integer >= 1 (None keeps every token)",
    ),
    "top_p": Number(np.float32, 1.0, lambda x: (x > 0) & (x <= 1), "a number in (0, 1]"),
    "repetition_penalty": Number(
        np.float32,
        1.0,
        lambda x: (x >= 1e-6) & (x <= 1e6),
        "a number in [1e-6, 1e6] (1 changes nothing)",
    ),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "min_tokens": Number(
        np.int32, 0, lambda x: (x >= 0) & (x <= _INT32.max), "an integer >= 0 (0 asks for none)"
    ),
}


def vocabulary_of(name: str, value: Any, vocabulary: int | None) -> int | None:
    """``vocabulary``, or what a bias or a mask over it says if that is not known.

    Raises:
      ValueError: an array over another vocabulary.
    """
    if getattr(value, "ndim", 0) == 0 or (
        name != "logit_bias" and not jnp.issubdtype(value.dtype, jnp.bool_)
    ):
        return vocabulary  # nothing, a mapping, or ids
    if value.ndim > 2 or (vocabulary is not None and value.shape[-1] != vocabulary):
        size = "V" if vocabulary is None else vocabulary
        raise ValueError(
            f"{name} has shape {value.shape}, expected one value a token: ({size},) or (B, {size})"
        )
    return value.shape[-1]


def prepare_bias(value: Any, vocabulary: int | None) -> Any:
    """[V] or [B, V] float32 from a mapping of ids, or from an array; None if nothing is given."""
    if value is None or (isinstance(value, Mapping) and not value):
        return None
    if isinstance(value, Mapping):
        dense = np.zeros(_known("logit_bias", vocabulary), np.float32)
        ids = _ids("logit_bias", list(value), len(dense))
        biases = list(value.values())
        if any(isinstance(bias, Tracer) for bias in biases):
            raise _traced("logit_bias")
        for token, bias in zip(ids, biases, strict=True):
            if np.ndim(bias) > 0 or not isinstance(np.asarray(bias)[()], int | float | np.number):
                raise ValueError(f"logit_bias of token {token} is {bias!r}, expected a number")
            _check_bias(np.asarray([bias], np.float64), lambda _, token=token: token)
            dense[token] = bias
        return dense
    array = value if isinstance(value, Tracer) else np.asarray(value)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise ValueError(
            f"logit_bias is of type {array.dtype}, expected numbers, or a mapping from ids to them"
        )
    if array.ndim not in (1, 2):
        raise ValueError(f"logit_bias has shape {array.shape}, expected (V,) or (B, V)")
    vocabulary_of("logit_bias", array, vocabulary)
    if isinstance(array, np.ndarray):
        _check_bias(array, lambda wrong: int(np.argwhere(wrong)[0][-1]))
    return array.astype(np.float32)


def prepare_mask(name: str, value: Any, vocabulary: int | None) -> Any:
    """A mask [V] from token ids, or the mask [V] or [B, V] that is given; None stays None."""
    if value is None:
        return None
    if hasattr(value, "dtype"):
        array = value if isinstance(value, Tracer) else np.asarray(value)
        if jnp.issubdtype(array.dtype, jnp.bool_):
            if array.ndim not in (1, 2):
                raise ValueError(f"{name} has shape {array.shape}, expected (V,) or (B, V)")
            vocabulary_of(name, array, vocabulary)
            return array
        if isinstance(array, Tracer):
            raise _traced(name)
        value = array.tolist()
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise ValueError(f"{name} is {value!r}, expected a sequence of token ids")
    mask = np.zeros(_known(name, vocabulary), bool)
    mask[_ids(name, list(value), len(mask))] = True
    return mask


def prepare_tokens(bias: Any, allowed: Any, banned: Any, vocabulary: int | None) -> Any:
    """One bias that holds the bans as -inf: [V] or [B, V] float32, or None if nothing is given."""
    for name, value in (("logit_bias", bias), ("allowed_tokens", allowed)):
        vocabulary = vocabulary_of(name, value, vocabulary)
    bias = prepare_bias(bias, vocabulary)
    mask = prepare_mask("allowed_tokens", allowed, vocabulary)
    bias = bias if mask is None else _ban(bias, ~mask)
    if banned is None or len(banned) == 0:
        return bias
    return _ban(bias, prepare_mask("banned_tokens", banned, vocabulary))


def _ban(bias: Any, mask: Any) -> Any:
    start = np.zeros(mask.shape, np.float32) if bias is None else bias
    shape = np.broadcast_shapes(start.shape, mask.shape)
    if isinstance(start, Tracer) or isinstance(mask, Tracer):
        return jnp.where(jnp.broadcast_to(mask, shape), -jnp.inf, jnp.broadcast_to(start, shape))
    return np.where(mask, np.float32(-np.inf), start)


def check_something_left(bias: Any, ends: Any, min_tokens: Any) -> None:
    """Refuse settings that leave no token to draw, so far as they are known on the host.

    Raises:
      ValueError: every token is banned, at once or until ``min_tokens`` are there.
    """
    if isinstance(bias, Tracer):
        return
    left = np.bool_(True) if bias is None else bias > -np.inf
    if bias is not None and not left.any(axis=-1).all():
        raise ValueError(
            "allowed_tokens, banned_tokens and logit_bias leave no token to draw, expected one at "
            "least: allow another token"
        )
    if ends is None or isinstance(ends, Tracer) or isinstance(min_tokens, Tracer):
        return
    if (min_tokens > 0).any() and not (left & ~ends).any(axis=-1).all():
        raise ValueError(
            "min_tokens bans the end tokens, and no other token is allowed: allow another token"
        )


def _known(name: str, vocabulary: int | None) -> int:
    if vocabulary is None:
        raise ValueError(
            f"{name} gives token ids, and the vocabulary is not known: pass its size to prepared()"
        )
    return vocabulary


def _ids(name: str, ids: list[Any], vocabulary: int) -> list[int]:
    for token in ids:
        if isinstance(token, Tracer):
            raise _traced(name)
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(f"{name} holds {token!r}, expected token ids in 0..{vocabulary - 1}")
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"{name} holds token {token}, expected token ids in 0..{vocabulary - 1}"
            )
    return [int(token) for token in ids]


def _check_bias(values: np.ndarray, token_of: Callable[[np.ndarray], int]) -> None:
    wrong = ~((np.abs(values) <= _LARGEST_BIAS) | np.isneginf(values))
    if wrong.any():
        raise ValueError(
            f"logit_bias of token {token_of(wrong)} is {values[wrong].flat[0]}, expected a number "
            "in [-1e30, 1e30], or -inf to ban the token"
        )


def _traced(name: str) -> ValueError:
    return ValueError(
        f"{name} is traced by jit, expected arrays over the vocabulary: call prepared(vocabulary) "
        "before"
    )


def rows(name: str, value: Any, batch: int, tokens: bool = False) -> Any:
    """One value a sequence, on the device; None stays None. With ``tokens`` a value is [V].

    Raises:
      ValueError: neither one value nor one a sequence.
    """
    if value is None:
        return None
    value = jnp.asarray(value)
    one = value.shape[-1:] if tokens else ()
    if value.shape not in (one, (batch, *one)):
        raise ValueError(
            f"{name} has shape {value.shape}, expected one value or {(batch, *one)}, one a sequence"
        )
    return jnp.broadcast_to(value, (batch, *one))


def row_keys(key: Any, batch: int) -> Array:
    """[B] keys: those given, or one folded with the row.

    Raises:
      ValueError: not a typed key, or not one a sequence.
    """
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        kind = getattr(key, "dtype", type(key).__name__)
        raise ValueError(f"key is of type {kind}, expected a typed key from jax.random.key(seed)")
    if key.shape == ():
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch))
    return rows("key", key, batch)
