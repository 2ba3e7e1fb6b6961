"""The arithmetic of one node, once for kernels and once for references.

Every kernel of the native recurrence (replay, path scan, node scan, single-token decoding) runs
``advance`` and ``read`` on a tile of value rows held in registers. So a replayed state is the
decoded one by construction: same operations, same order, same contraction into FMAs.

A node continues its parent's state R [dv, dk]:

    R' = alpha R        u = beta (v - R' k)        R = R' + u k^T        o = R q
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import along_columns, along_rows

MAX_DIM = 256
"""Widest key or value head of the kernels: a wider state tile does not fit into registers."""

MAX_ROWS = 256
"""Most rows that one bulk copy moves."""


def advance(
    R: jax.Array, k: jax.Array, v: jax.Array, alpha: jax.Array, beta: jax.Array
) -> jax.Array:
    """Decay, predict and write on a tile: R [rows, dk], k [dk], v [rows], alpha and beta scalar."""
    shape = (R.shape[0], R.shape[1])
    keys = along_columns(k, shape)
    R = R * alpha
    u = (v - jnp.sum(R * keys, axis=1)) * beta
    return R + along_rows(u, shape) * keys


def read(R: jax.Array, q: jax.Array) -> jax.Array:
    """The tile's outputs [rows] for the query q [dk]."""
    return jnp.sum(R * along_columns(q, (R.shape[0], R.shape[1])), axis=1)


def advance_reference(
    R: jax.Array, k: jax.Array, v: jax.Array, alpha: jax.Array, beta: jax.Array
) -> jax.Array:
    """All value heads at once: R [Hv, dv, dk], k [Hv, dk], v [Hv, dv], alpha, beta [Hv]."""
    R = alpha[:, None, None] * R
    predicted = jnp.einsum("hvk,hk->hv", R, k, precision=jax.lax.Precision.HIGHEST)
    u = beta[:, None] * (v - predicted)
    return R + u[:, :, None] * k[:, None, :]


def read_reference(R: jax.Array, q: jax.Array) -> jax.Array:
    """Outputs [Hv, dv] of the states R [Hv, dv, dk] for the queries q [Hv, dk]."""
    return jnp.einsum("hvk,hk->hv", R, q, precision=jax.lax.Precision.HIGHEST)


def per_value_head(x: jax.Array, value_heads: int) -> jax.Array:
    """Key-head rows [..., Hk, dk] as float32 [..., Hv, dk]: value head h uses head h // ratio."""
    ratio = value_heads // x.shape[-2]
    return jnp.repeat(x.astype(jnp.float32), ratio, axis=-2)


def operand_problem(R: jax.Array, operands: tuple[jax.Array, ...]) -> str | None:
    """Why kernels cannot take the dtypes of a pool and its row operands, or None if they can."""
    if R.dtype != jnp.float32:
        return f"states must be float32, got {R.dtype.name}"
    names = {x.dtype.name for x in operands}
    if names not in ({"float32"}, {"bfloat16"}):
        return f"operands must be all float32 or all bfloat16, got {', '.join(sorted(names))}"
    return None
