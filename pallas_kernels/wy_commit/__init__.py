"""Publish an accepted path from its factors, all layers in one launch.

    R <- exp(G) R + sum over the path's rows j of exp(G - G_j) u_j k_j^T

u are the pseudo-values that ``wy_solve`` left, G_j the log decays summed from the path's first row
to row j, G the whole sum (TreeWY; design section 3).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import resolve
from pallas_kernels.wy_commit import mosaic_gpu, reference


def wy_commit(
    R: jax.Array,
    k: jax.Array,
    u: jax.Array,
    g: jax.Array,
    nodes: jax.Array,
    length: jax.Array,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """The pool with every sequence's path committed in all its layers; in place if R is donated.

    Args:
      R: [L, B, Hv, dv, dk] float32. With dk not a multiple of 8 or dv not of 64 the kernel works
        on a padded copy: right, but slower.
      k: [L, B, T, Hk, dk] normalised keys, float32 or bfloat16.
      u: [L, B, T, Hv, dv] float32 pseudo-values. g: [L, B, T, Hv] float32 log decays.
      nodes: [B, P] int32, the path's rows among the T, -1 past its end.
      length: [B] int32 rows on the path. With 0 the state keeps its bytes at no cost.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".

    Raises:
      ValueError: the kernel was asked for where it cannot run.
    """
    chosen = resolve(implementation, mosaic_gpu.unsupported(R, k, u, nodes))
    if chosen != "xla":
        return mosaic_gpu.commit(R, k, u, g, nodes, length, chosen=chosen)
    rows = jnp.maximum(nodes, 0)
    k, u, g = (jax.vmap(jax.vmap(lambda x, i: x[i]), (0, None))(x, rows) for x in (k, u, g))
    over_batch = jax.vmap(reference.commit)
    return jax.vmap(over_batch, in_axes=(0, 0, 0, 0, None))(R, k, u, g, length)
