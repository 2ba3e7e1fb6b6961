"""Verify a tree with the native recurrence: the output of every node, no state kept.

    R' = alpha R_parent     u = beta (v - R' k)     R = R' + u k^T     o = R q

The scan follows a ``Walk``. It runs the update of replay and decoding, so its outputs are the ones
that decoding a path would give. Errors are those of the sequential float32 recurrence.
"""

import jax

from pallas_kernels.implementation import resolve
from pallas_kernels.path_scan import mosaic_gpu, reference
from pallas_kernels.walk import Walk


def path_scan(
    R: jax.Array,
    layer: jax.Array | int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    walk: Walk,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """Outputs [B, N, Hv, dv] float32 of every node; inactive rows are 0.

    Args:
      R: [L, B, Hv, dv, dk] float32, the pool of states; only ``layer`` is read. Sizes that the
        kernel does not take (dk not a multiple of 8, dv not of 64) make a padded copy of a layer.
      layer: index into the pool, static or traced.
      q, k: [B, N, Hk, dk] normalised, q scaled; value head h uses key head h // (Hv / Hk).
      v: [B, N, Hv, dv]. All three float32, or all three bfloat16.
      alpha, beta: [B, N, Hv] float32 decay and write strength.
      walk: the program of each tree, ``walk.plan(parent, size)``. A size of 0 costs nothing.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".

    Raises:
      ValueError: the kernel was asked for where it cannot run, or the walk is longer than the rows.
    """
    if walk.node.shape != q.shape[:2]:
        raise ValueError(
            f"the walk has shape {walk.node.shape} and the rows {q.shape[:2]}, expected the same: "
            "only node_scan takes longer walks"
        )
    chosen = resolve(implementation, mosaic_gpu.unsupported(R, q, k, v, steps=q.shape[1]))
    if chosen == "xla":
        return reference.path_scan(R, layer, q, k, v, alpha, beta, walk)
    return mosaic_gpu.path_scan(R, layer, q, k, v, alpha, beta, walk, chosen=chosen)
