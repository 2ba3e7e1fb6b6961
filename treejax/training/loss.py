"""The training loss: the model's own forward with causal windows, and the chained MTP head.

``forward`` and ``mtp.head`` are what decoding runs; ``window_mixing`` is the only part of its own:
a convolution of shifted sums, the differentiable rule, and a fused attention where there is one.
Masters are float32; inside the loss they are cast to the compute dtype except the gate parameters,
which stay float32. Invariant: in float32 the first term is the model's mean negative
log-likelihood, as ``treejax.score`` gives it.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from treejax import layers, mtp
from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.model import Mixing, causal_convolution, forward
from treejax.parameters import FLOAT32_ALWAYS
from treejax.shapes import Array
from treejax.training.rule import contract, delta_windows

AttentionKernel = Literal["cudnn", "xla"]
AHEAD = 3  # a window of T rows is T + AHEAD tokens: the second MTP pass predicts x_{t+3}


class Losses(NamedTuple):
    """Mean negative log-likelihoods in nats a token: next token, MTP, MTP fed with its own h'."""

    main: Array
    mtp: Array
    chained: Array


def attention_kernel(dtype: Any) -> AttentionKernel:
    """cuDNN's fused attention for bfloat16 on a GPU, the plain one elsewhere."""
    return "cudnn" if jax.default_backend() == "gpu" and dtype == jnp.bfloat16 else "xla"


def cast_params(params: layers.Params, dtype: Any) -> layers.Params:
    """Parameters in ``dtype``, but the gate parameters in float32."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path[-1].key in FLOAT32_ALWAYS else leaf.astype(dtype), params
    )


def window_mixing(dtype: Any, kernel: AttentionKernel) -> Mixing:
    """Causal rows of windows [B, T] that start from an empty state; T a multiple of 64."""

    def convolve(i: int, inputs: Array, taps: Array) -> Array:
        before = taps.shape[0] - 1
        padded = jnp.pad(inputs, ((0, 0), (before, 0), (0, 0)))
        return causal_convolution(padded, taps, inputs.shape[1])

    def delta(i: int, operands: Operands) -> tuple[Array, None]:
        return delta_windows(operands, dtype), None

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)

    return Mixing(layers.by_convolution(convolve), delta, attend)


def _rows(tokens: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def window_hidden(
    config: ModelConfig, params: layers.Params, tokens: Array, kernel: AttentionKernel
) -> Array:
    """Hidden rows [B, T, H] of windows of tokens [B, T]."""
    mixing = window_mixing(params["embed"].dtype, kernel)
    x = layers.embed(params, tokens)
    return forward(config, params, x, _rows(tokens), mixing)[0]


def window_mtp(
    config: ModelConfig,
    params: layers.Params,
    hidden: Array,
    tokens: Array,
    kernel: AttentionKernel,
) -> Array:
    """h' [B, T, H] of the pairs (hidden row t, tokens[:, t] = x_{t+1})."""
    mixing = window_mixing(params["embed"].dtype, kernel)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return mixing.attend(0, q, k, v)

    return mtp.head(config, params, hidden, tokens, _rows(tokens), attend)[0]


def negative_log_likelihood(params: layers.Params, hidden: Array, targets: Array) -> Array:
    """-log p(target) in nats, [B, T] float32, from hidden rows [B, T, H]."""
    head = params.get("lm_head", params["embed"])
    scores = contract("bth,vh->btv", hidden, head)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - picked


def window_loss(
    config: ModelConfig,
    masters: layers.Params,
    tokens: Array,
    weights: tuple[float, float],
    dtype: Any,
    kernel: AttentionKernel,
) -> tuple[Array, Losses]:
    """Weighted loss of windows: main + weights[0] * mtp + weights[1] * chained.

    Args:
      masters: float32 parameters with an MTP head.
      tokens: [B, T + AHEAD] int32.
      weights: of the head's first pass and of its second, which is fed the first one's h'.
      dtype: of activations and products.
    """
    params = cast_params(masters, dtype)
    rows = tokens.shape[1] - AHEAD

    def ahead(count: int) -> Array:
        return tokens[:, count : count + rows]

    hidden = window_hidden(config, params, tokens[:, :rows], kernel)
    first = window_mtp(config, params, hidden, ahead(1), kernel)
    second = window_mtp(config, params, first, ahead(2), kernel)
    losses = Losses(
        negative_log_likelihood(params, hidden, ahead(1)).mean(),
        negative_log_likelihood(params, first, ahead(2)).mean(),
        negative_log_likelihood(params, second, ahead(3)).mean(),
    )
    return losses.main + weights[0] * losses.mtp + weights[1] * losses.chained, losses
