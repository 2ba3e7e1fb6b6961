"""The multi-token-prediction head: one attention layer that predicts one token further.

Pair t joins the model's hidden row h_t, taken after its final norm, with the next token x_{t+1},
and predicts x_{t+2} through the shared ``lm_head``. Its normed output h' serves as the hidden row
of the next pair when several tokens are drafted. Rotary positions are those of h_t, everywhere:
one cache must not mix two conventions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from treejax import layers
from treejax.config import ModelConfig
from treejax.shapes import Array


def head(
    config: ModelConfig,
    params: layers.Params,
    hidden: Array,
    tokens: Array,
    positions: Array,
    attend: Callable[[Array, Array, Array], Array],
) -> tuple[Array, tuple[Array, Array]]:
    """The head over pairs (hidden [B, T, H], tokens [B, T]): h' [B, T, H] and (keys, values).

    Args:
      params: needs ``mtp`` and ``embed``.
      positions: [B, T] of the hidden rows.
      attend: ``attend(q, k, v)`` over [B, T, heads, D], how pairs see one another.
    """
    p, eps = params["mtp"], config.rms_norm_eps
    embedded = layers.rms_norm(layers.embed(params, tokens), p["norm_embedding"], eps)
    joined = jnp.concatenate([embedded, layers.rms_norm(hidden, p["norm_hidden"], eps)], axis=-1)
    x, layer = layers.linear(joined, p["fc"]), p["layer"]
    y = layers.rms_norm(x, layer["norm_input"], eps)
    y, rows = layers.attention(config, layer["mixer"], y, positions, attend)
    x = x + y
    y = layers.rms_norm(x, layer["norm_post"], eps)
    x = x + layers.feed_forward(config, layer["mlp"], y)
    return layers.rms_norm(x, p["norm"], eps), rows


def mtp_forward(
    config: ModelConfig, params: layers.Params, hidden: Array, tokens: Array
) -> tuple[Array, tuple[Array, Array]]:
    """All pairs of whole sequences at once, causally, from position 0.

    Args:
      hidden: [B, T, H] h_0 .. h_{T-1}, after the model's final norm.
      tokens: [B, T] x_1 .. x_T.

    Returns:
      h' [B, T, H] (``layers.logits`` of it predicts x_2 .. x_{T+1}) and the head's keys and values,
      each [B, T, Hkv, D].
    """
    batch, count = tokens.shape
    causal = jnp.tril(jnp.ones((count, count), bool))
    nothing = jnp.zeros((0, config.num_key_value_heads, config.head_dim), hidden.dtype)

    def attend(q: Array, k: Array, v: Array) -> Array:
        def one(q: Array, k: Array, v: Array) -> Any:
            return layers.attend(q, k, v, causal, nothing, nothing, jnp.int32(0))

        return jax.vmap(one)(q, k, v)

    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
    return head(config, params, hidden, tokens, positions, attend)
