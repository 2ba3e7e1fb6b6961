"""The tree scan in plain JAX: the specification, and what runs where the kernel cannot."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.update import advance_reference, per_value_head, read_reference
from pallas_kernels.walk import Walk, slots


def path_scan(
    R: jax.Array,
    layer: jax.Array | int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    walk: Walk,
) -> jax.Array:
    """Outputs [B, N, Hv, dv] of every node, 0 at inactive rows."""
    q, k = per_value_head(q, v.shape[2]), per_value_head(k, v.shape[2])
    operands = (q, k, v.astype(jnp.float32), alpha, beta)
    return jax.vmap(_one)(lax.dynamic_index_in_dim(R, layer, keepdims=False), operands, walk)


def _one(R, operands, walk):
    """One sequence: R [Hv, dv, dk] and operands [N, Hv, ...]."""
    capacity = walk.node.shape[0]
    q, k, v, alpha, beta = (x[walk.node] for x in operands)  # in the order of the visits

    def step(carry, now):
        R, saved = carry
        q, k, v, alpha, beta, load, save, active = now
        R = jnp.where(load >= 0, saved[load], R)
        R = advance_reference(R, k, v, alpha, beta)
        saved = saved.at[jnp.where(save >= 0, save, saved.shape[0])].set(R, mode="drop")
        return (R, saved), jnp.where(active, read_reference(R, q), 0.0)

    saved = jnp.zeros((slots(capacity) + 1, *R.shape), jnp.float32)
    active = jnp.arange(capacity) < walk.size
    _, out = lax.scan(step, (R, saved), (q, k, v, alpha, beta, walk.load, walk.save, active))
    return jnp.zeros_like(out).at[walk.node].set(out, unique_indices=True)
