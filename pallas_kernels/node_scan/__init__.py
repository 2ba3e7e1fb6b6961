"""Verify a tree and keep every node's state: what engines do by default, as a fair baseline.

The walk, the update and the outputs are those of ``path_scan``. The states' bytes bound its speed:
one state matrix a visit and value head, and ``walk.plan`` visits a node once. This scan also takes
the longer walks of ``walk.plan_paths``, which visit a node once a leaf below it and write the same
bits every time.
"""

import jax

from pallas_kernels.implementation import resolve
from pallas_kernels.node_scan import mosaic_gpu, reference
from pallas_kernels.path_scan.mosaic_gpu import unsupported
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
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, N, Hv, dv], 0 at inactive rows, and states [B, N, Hv, dv, dk], both float32.

    The states of inactive rows are unspecified. Arguments are those of ``path_scan``.
    """
    problem = unsupported(R, q, k, v, steps=walk.node.shape[1], export=True)
    chosen = resolve(implementation, problem)
    if chosen == "xla":
        return reference.node_scan(R, layer, q, k, v, alpha, beta, walk)
    return mosaic_gpu.node_scan(R, layer, q, k, v, alpha, beta, walk, chosen=chosen)
