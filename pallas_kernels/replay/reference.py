"""Replay in plain JAX: the native single-token update over the rows of a path."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.update import advance_reference, per_value_head


def replay(
    R: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    nodes: jax.Array,
    length: jax.Array,
) -> jax.Array:
    """The pool R [L, B, Hv, dv, dk] with every sequence's path applied to its states."""
    operands = (per_value_head(k, v.shape[3]), v.astype(jnp.float32), alpha, beta)
    over_batch = jax.vmap(_one)
    return jax.vmap(over_batch, in_axes=(0, 0, None, None))(R, operands, nodes, length)


def _one(R, operands, nodes, length):
    """One layer and sequence: R [Hv, dv, dk], operands [T, Hv, ...], nodes [P]."""

    def step(R, now):
        t, node = now
        k, v, alpha, beta = (x[jnp.maximum(node, 0)] for x in operands)
        return jnp.where(t < length, advance_reference(R, k, v, alpha, beta), R), None

    return lax.scan(step, R, (jnp.arange(nodes.shape[0]), nodes))[0]
