"""The tree scan of ``path_scan`` with its export of states switched on.

Every state leaves through one of two buffers in shared memory and an asynchronous bulk copy, so
that the stores, which bound the speed, overlap the arithmetic of the next nodes.
"""

import jax

from pallas_kernels.path_scan.mosaic_gpu import padded_scan
from pallas_kernels.walk import Walk


def node_scan(
    R: jax.Array,
    layer: jax.Array | int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    walk: Walk,
    *,
    chosen: str,
) -> tuple[jax.Array, jax.Array]:
    """Outputs and states; ``chosen`` is "mosaic_gpu" or "interpret"."""
    nodes, value_dim, key_dim = q.shape[1], v.shape[3], q.shape[3]
    out, states = padded_scan(R, layer, q, k, v, alpha, beta, walk, export=True, chosen=chosen)
    return out[:, :nodes, :, :value_dim], states[:, :nodes, :, :value_dim, :key_dim]
