"""The commit for Hopper: ``publish`` with all rows at once, when the last of them is there."""

import jax
import jax.numpy as jnp

from pallas_kernels import publish
from pallas_kernels.wy_commit.tile import commit as commit_tile


def unsupported(R: jax.Array, k: jax.Array, u: jax.Array, nodes: jax.Array) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    if R.dtype != jnp.float32 or u.dtype != jnp.float32:
        return f"states and pseudo-values must be float32, got {R.dtype.name} and {u.dtype.name}"
    if k.dtype.name not in ("float32", "bfloat16"):
        return f"keys must be float32 or bfloat16, got {k.dtype.name}"
    return publish.unsupported(k, u, 1, nodes)


def commit(
    R: jax.Array,
    k: jax.Array,
    u: jax.Array,
    g: jax.Array,
    nodes: jax.Array,
    length: jax.Array,
    *,
    chosen: str,
) -> jax.Array:
    """The new pool; ``chosen`` is "mosaic_gpu" or "interpret"."""
    return publish.publish(REBUILD, R, k, u, (g,), nodes, length, chosen=chosen)


def _finish(R: jax.Array, length: jax.Array, rows: publish.Rows) -> jax.Array:
    return commit_tile(R, length, lambda t: rows.gate(0, t), rows.value, rows.key)


REBUILD = publish.Update("wy_commit", lambda R, t, rows: R, _finish)
