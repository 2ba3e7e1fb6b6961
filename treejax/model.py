"""The hybrid model as functions over pytrees: one forward, used by prompts, trees and training.

``forward`` walks the layer pattern. What differs between a prompt, a tree and a training window is
only how rows see one another, and that comes in as a ``Mixing``: three functions a layer. Decoding
one token is verifying a tree of one node, through the same blocks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax import layers
from treejax.config import LINEAR, ModelConfig
from treejax.delta_rule import Operands, chunked
from treejax.shapes import Array
from treejax.state import State

PREFILL_BUCKETS = (64, 256, 1024)
"""Block lengths that prefill compiles for; longer prompts run as several blocks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model.

    Attributes:
      params: the tree that ``treejax.parameters.abstract(config)`` describes.
      config: shapes and constants, static.
      tokenizer: a ``tokenizers.Tokenizer``, or None if the folder has none.
      summary: what loading found (``treejax.checkpoint.LoadSummary``), or None.
    """

    params: dict[str, Any]
    config: ModelConfig
    tokenizer: Any = None
    summary: Any = None

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["embed"].dtype


def check_model(model: Any) -> None:
    """Refuse what is no loaded model.

    Raises:
      ValueError: one line.
    """
    if isinstance(model, Model):
        return
    if isinstance(model, str | Path):
        raise ValueError(
            f"model is the name {str(model)!r}, expected a loaded one: load_model({str(model)!r})"
        )
    raise ValueError(
        f"model is of type {type(model).__name__}, expected a treejax.Model: load_model makes one"
    )


class Output(struct.PyTreeNode):
    """Scores [..., V] float32, and the hidden rows [..., H] after the final norm."""

    logits: Array
    hidden: Array


class Mixing(NamedTuple):
    """How the rows of one forward see one another and the past.

    ``operands(i, config, p, projections)`` (see ``layers.delta_net``), ``delta(i, operands)`` and
    ``attend(i, q, k, v)`` take the index of the layer among the recurrent, or the attention layers,
    and arrays [B, T, ...].
    """

    operands: Callable[[int, ModelConfig, layers.Params, layers.Projections], Operands]
    delta: Callable[[int, Operands], tuple[Array, Any]]
    attend: Callable[[int, Array, Array, Array], Array]


class Records(NamedTuple):
    """What a forward leaves, a list entry a layer: conv inputs, delta records, keys, values."""

    conv: list[Array]
    delta: list[Any]
    keys: list[Array]
    values: list[Array]


def forward(
    config: ModelConfig, params: layers.Params, x: Array, positions: Array, mixing: Mixing
) -> tuple[Array, Records]:
    """Embedded rows x [B, T, H] through all layers: hidden rows after the final norm, and records.

    positions: [B, T] int32, absolute.
    """
    records = Records([], [], [], [])
    for kind, p in zip(config.layer_types, params["layers"], strict=True):
        h = layers.rms_norm(x, p["norm_input"], config.rms_norm_eps)
        if kind == LINEAR:
            i = len(records.conv)
            operands = functools.partial(mixing.operands, i)
            delta = functools.partial(mixing.delta, i)
            y, (inputs, record) = layers.delta_net(config, p["mixer"], h, operands, delta)
            records.conv.append(inputs)
            records.delta.append(record)
        else:
            attend = functools.partial(mixing.attend, len(records.keys))
            y, (keys, values) = layers.attention(config, p["mixer"], h, positions, attend)
            records.keys.append(keys)
            records.values.append(values)
        x = x + y
        h = layers.rms_norm(x, p["norm_post"], config.rms_norm_eps)
        x = x + layers.feed_forward(config, p["mlp"], h)
    return layers.rms_norm(x, params["norm"], config.rms_norm_eps), records


def prefill(
    model: Model,
    state: State,
    tokens: Any,
    lengths: Any,
    hidden: Literal["last", "all"] = "last",
) -> tuple[Output, State]:
    """Append tokens to each sequence with the chunked rule.

    Args:
      tokens: [B, T] int32, right-padded; T is padded further to one of ``PREFILL_BUCKETS``.
      lengths: [B]; a sequence of length 0 is left as it is, its logits are unspecified.
      hidden: "last" for out.hidden [B, H] at the last real token, "all" for [B, T, H].

    Returns:
      out, with out.logits [B, V] at the last real token, and the new state.
    """
    check_model(model)
    tokens, lengths = np.asarray(tokens, np.int32), np.asarray(lengths, np.int32)
    check_prompt(model.config, state, tokens, lengths)
    outs, blocks = [], list(prompt_blocks(tokens, lengths))
    for block, count in blocks:
        out, state = prefill_block(model.config, model.params, state, block, count)
        outs.append(out)
    counts = [count for _, count in blocks]
    last = last_rows(outs, counts)
    if hidden == "all":
        rows = jnp.concatenate([out.hidden for out in outs], axis=1)[:, : tokens.shape[1]]
        last = last.replace(hidden=rows)
    return last, state


def prompt_blocks(tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Cut [B, T] into padded blocks of bucket lengths: (block [B, bucket], real tokens [B])."""
    start, total = 0, tokens.shape[1]
    while start < total:
        rest = total - start
        bucket = next((b for b in PREFILL_BUCKETS if b >= rest), PREFILL_BUCKETS[-1])
        block = np.zeros((tokens.shape[0], bucket), np.int32)
        block[:, : min(rest, bucket)] = tokens[:, start : start + bucket]
        yield block, np.clip(lengths - start, 0, bucket).astype(np.int32)
        start += bucket


def check_prompt(
    config: ModelConfig, state: State, tokens: np.ndarray, lengths: np.ndarray
) -> None:
    """Refuse, in one line, a prompt block that the model or the state cannot take."""
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1] or len(tokens) != state.batch:
        raise ValueError(
            f"tokens {tokens.shape} and lengths {lengths.shape} do not fit a state of batch "
            f"{state.batch}, expected [B, T] and [B]"
        )
    if tokens.shape[1] == 0 or lengths.min() < 0 or lengths.max() > tokens.shape[1]:
        raise ValueError(
            f"lengths {lengths.tolist()} must lie in 0..{tokens.shape[1]}, and T be at least 1"
        )
    real = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
    if real.size and not (0 <= real.min() and real.max() < config.vocab_size):
        raise ValueError(f"tokens must lie in 0..{config.vocab_size - 1}, got {real.max()}")
    needed = int((np.asarray(state.length) + lengths).max())
    if needed > state.max_length:
        raise ValueError(
            f"the prompt needs {needed} rows and the state holds {state.max_length}; "
            "give init_state a larger max_length"
        )


def last_rows(outs: list[Output], counts: list[np.ndarray]) -> Output:
    """Logits [B, V] and hidden [B, H] at each sequence's last real token over several blocks."""
    logits, hidden = outs[0].logits, _last(outs[0].hidden, counts[0])
    for out, count in zip(outs[1:], counts[1:], strict=True):
        mine = jnp.asarray(count > 0)[:, None]
        logits = jnp.where(mine, out.logits, logits)
        hidden = jnp.where(mine, _last(out.hidden, count), hidden)
    return Output(logits, hidden)


def _last(hidden: Array, count: Any) -> Array:
    """Row ``count - 1`` of hidden [B, T, H]."""
    return jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames="config")
def prefill_block(
    config: ModelConfig, params: layers.Params, state: State, tokens: Array, count: Array
) -> tuple[Output, State]:
    """One block [B, T] of which ``count`` [B] tokens are real: all hidden rows, last logits."""
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    real = rows < count[:, None]
    positions = state.length[:, None] + rows
    R = state.policy.read(state.recurrent)
    mixing = _prompt_mixing(state, R, real)
    x = layers.embed(params, tokens)
    hidden, records = forward(config, params, x, positions, mixing)
    conv = [
        jax.vmap(shift_history)(state.conv[i], inputs, count)
        for i, inputs in enumerate(records.conv)
    ]
    slots = jnp.where(real, positions, state.max_length)
    R = jnp.stack(records.delta) if records.delta else R
    state = state.replace(
        recurrent=state.policy.init(R, config.linear_num_key_heads),
        conv=jnp.stack(conv) if conv else state.conv,
        keys=write_rows(state.keys, records.keys, slots),
        values=write_rows(state.values, records.values, slots),
        length=state.length + count,
    )
    return Output(layers.logits(params, _last(hidden, count)), hidden), state


def _prompt_mixing(state: State, R: Array, real: Array) -> Mixing:
    """Causal rows on top of a state; rows that are not real change nothing."""
    count = real.shape[1]
    causal = jnp.tril(jnp.ones((count, count), bool))

    def convolve(i: int, inputs: Array, taps: Array) -> Array:
        full = jnp.concatenate([state.conv[i], inputs], axis=1)
        return causal_convolution(full, taps, count)

    def delta(i: int, operands: Operands) -> tuple[Array, Array]:
        beta = jnp.where(real[:, :, None], operands.beta, 0.0)
        g = jnp.where(real[:, :, None], operands.g, 0.0)
        return jax.vmap(chunked)(R[i], operands.replace(beta=beta, g=g))

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        in_axes = (0, 0, 0, None, 0, 0, 0)
        past = state.keys[i], state.values[i], state.length
        return jax.vmap(layers.attend, in_axes=in_axes)(q, k, v, causal, *past)

    return Mixing(layers.by_convolution(convolve), delta, attend)


def causal_convolution(inputs: Array, taps: Array, rows: int) -> Array:
    """Depthwise convolution of [B, K-1+rows, C] by shifted sums, float32: [B, rows, C]."""
    width = taps.shape[0]
    inputs, taps = inputs.astype(jnp.float32), taps.astype(jnp.float32)
    shifted = (inputs[:, j : j + rows] * taps[None, None, j] for j in range(width))
    return functools.reduce(jnp.add, shifted)


def shift_history(history: Array, inputs: Array, count: Array) -> Array:
    """The last K-1 of history [K-1, C] followed by the first ``count`` inputs [T, C]."""
    full = jnp.concatenate([history, inputs])
    return jax.lax.dynamic_slice_in_dim(full, count, history.shape[0])


def write_rows(cache: Array, blocks: list[Array], slots: Array) -> Array:
    """Write a block [B, T, Hkv, D] a layer into cache [La, B, S+1, Hkv, D] at slots [B, T]."""
    if not blocks:
        return cache
    sequence = jnp.arange(slots.shape[0])[:, None]
    return cache.at[:, sequence, slots].set(jnp.stack(blocks), mode="promise_in_bounds")
