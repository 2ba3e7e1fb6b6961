"""Publish an accepted path by replaying it: the native single-token update, row by row.

    R' = alpha R     u = beta (v - R' k)     R = R' + u k^T     for each row of the path

All layers go in one launch. A path of one row is single-token decoding, through the same body: so
the published state is bitwise the decoded one, on the same device and from the same operands.
"""

import jax

from pallas_kernels.implementation import resolve
from pallas_kernels.replay import mosaic_gpu, reference


def replay(
    R: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    nodes: jax.Array,
    length: jax.Array,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """The pool with every sequence's path applied to all its layers; in place if R is donated.

    Args:
      R: [L, B, Hv, dv, dk] float32. With dk not a multiple of 8 or dv not of 64 the kernel works
        on a padded copy: right, but slower.
      k: [L, B, T, Hk, dk] normalised keys; value head h uses key head h // (Hv / Hk).
      v: [L, B, T, Hv, dv]. Both float32, or both bfloat16.
      alpha, beta: [L, B, T, Hv] float32 decay and write strength.
      nodes: [B, P] int32, the path's rows among the T, -1 past its end.
      length: [B] int32 rows on the path. With 0 the state keeps its bytes at no cost.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".

    Raises:
      ValueError: the kernel was asked for where it cannot run.
    """
    chosen = resolve(implementation, mosaic_gpu.unsupported(R, k, v, nodes))
    if chosen == "xla":
        return reference.replay(R, k, v, alpha, beta, nodes, length)
    return mosaic_gpu.replay(R, k, v, alpha, beta, nodes, length, chosen=chosen)
