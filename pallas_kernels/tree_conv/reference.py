"""What ``tree_conv`` computes, and what runs where the kernel does not.

The order of the arithmetic is part of the specification: taps are added oldest first.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def tree_conv(
    inputs: jax.Array,
    history: jax.Array,
    layer: jax.Array,
    taps: jax.Array,
    rows: jax.Array,
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    *,
    key_heads: int,
    key_dim: int,
    at: tuple[int, int],
) -> tuple[jax.Array, ...]:
    """q, k, v, g, alpha, beta; arguments as of the public function, ``at``: of a and b."""
    inputs, heads = inputs[..., : taps.shape[1]], A_log.shape[0]
    a, b = (x[..., start : start + heads] for x, start in zip((a, b), at, strict=True))
    total = convolve(inputs, history[layer], taps, rows)
    mixed = jax.nn.silu(total).astype(inputs.dtype).astype(jnp.float32)
    keys, shape = key_heads * key_dim, (*mixed.shape[:-1], key_heads, key_dim)
    q, k = mixed[..., :keys].reshape(shape), mixed[..., keys : 2 * keys].reshape(shape)
    v = mixed[..., 2 * keys :].reshape(*a.shape, -1)
    step = jax.nn.softplus(a.astype(jnp.float32) + dt_bias[None, None])
    g = -jnp.exp(A_log[None, None]) * step
    alpha = lax.optimization_barrier(jnp.exp(g))
    g = jnp.where(alpha > 0.5, jnp.log1p(jnp.minimum(alpha - 1.0, 0.0)), g)
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    return normalise(q) * key_dim**-0.5, normalise(k), v, g, alpha, beta


def convolve(inputs: jax.Array, past: jax.Array, taps: jax.Array, rows: jax.Array) -> jax.Array:
    """The float32 convolution [B, N, C] before its activation.

    Tap by tap a product with a selection matrix: exact, and on a CPU far cheaper than a gather.
    """
    full = jnp.concatenate([past, inputs], axis=1).astype(jnp.float32)
    chosen = rows[..., None] == jnp.arange(full.shape[1], dtype=jnp.int32)[None, None, None]
    window = jnp.einsum(
        "bnkm,bmc->kbnc", chosen.astype(jnp.float32), full, precision=lax.Precision.HIGHEST
    )
    taps = taps.astype(jnp.float32)
    terms = (window[tap] * taps[None, None, tap] for tap in range(taps.shape[0]))
    return functools.reduce(jnp.add, terms)


def normalise(x: jax.Array) -> jax.Array:
    """x / sqrt(sum x^2 + 1e-6): a zero vector stays zero."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
