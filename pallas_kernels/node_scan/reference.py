"""The scan that keeps every state, in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.update import advance_reference, per_value_head, read_reference
from pallas_kernels.walk import RESTART, Walk, slots


def node_scan(
    R: jax.Array,
    layer: jax.Array | int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    walk: Walk,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, N, Hv, dv], 0 at inactive rows, and states [B, N, Hv, dv, dk]."""
    q, k = per_value_head(q, v.shape[2]), per_value_head(k, v.shape[2])
    operands = (q, k, v.astype(jnp.float32), alpha, beta)
    return jax.vmap(_one)(lax.dynamic_index_in_dim(R, layer, keepdims=False), operands, walk)


def _one(R0, operands, walk):
    """One sequence: every visit's state goes to its row, and saved ones are read back from it."""
    capacity, steps = operands[0].shape[0], walk.node.shape[0]
    home = jnp.zeros(slots(capacity) + 1, jnp.int32)  # the row whose state a slot holds

    def step(t, carry):
        R, home, out, states = carry
        node, load, save = walk.node[t], walk.load[t], walk.save[t]
        q, k, v, alpha, beta = (x[node] for x in operands)
        R = jnp.where(load >= 0, states[home[load]], jnp.where(load == RESTART, R0, R))
        R = advance_reference(R, k, v, alpha, beta)
        home = home.at[jnp.where(save >= 0, save, home.shape[0])].set(node, mode="drop")
        row = jnp.where(t < walk.size, node, capacity)
        out = out.at[row].set(read_reference(R, q), mode="drop")
        return R, home, out, states.at[row].set(R, mode="drop")

    out = jnp.zeros((capacity, *R0.shape[:2]), jnp.float32)
    states = jnp.zeros((capacity, *R0.shape), jnp.float32)
    return lax.fori_loop(0, steps, step, (R0, home, out, states))[2:]
