"""Committing a path's factors in plain JAX: the specification, and what runs elsewhere."""

import jax
import jax.numpy as jnp
from jax import lax


def commit(R: jax.Array, k: jax.Array, u: jax.Array, g: jax.Array, length: jax.Array) -> jax.Array:
    """R [Hv, dv, dk] after rows 0..length-1 of k [P, Hk, dk], u [P, Hv, dv], g [P, Hv].

    exp(sum of g) R + sum over rows j of exp(sum of g after j) u_j k_j^T.
    """
    k = jnp.repeat(k.astype(jnp.float32), u.shape[1] // k.shape[1], axis=1)
    counts = (jnp.arange(len(g)) < length)[:, None]
    g = jnp.where(counts, g, 0.0)
    from_here = jnp.cumsum(g[::-1], axis=0)[::-1]
    weight = jnp.where(counts, jnp.exp(from_here - g), 0.0)
    weighed = jnp.where(counts[:, :, None], u * weight[:, :, None], 0.0)
    written = jnp.einsum("jhv,jhk->hvk", weighed, k, precision=lax.Precision.HIGHEST)
    return jnp.where(length > 0, jnp.exp(from_here[0])[:, None, None] * R + written, R)
