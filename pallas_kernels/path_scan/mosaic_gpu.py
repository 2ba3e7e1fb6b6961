"""What the tree scan takes on Hopper, and the padding that leads to it; ``kernel`` holds the scan.

``node_scan`` runs the same kernel with its export of states switched on.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.padding import pad_axis, round_up
from pallas_kernels.path_scan import memory
from pallas_kernels.path_scan.kernel import tree_scan
from pallas_kernels.path_scan.memory import GROUP, TILE
from pallas_kernels.update import MAX_DIM, MAX_ROWS, operand_problem
from pallas_kernels.walk import Walk


def unsupported(
    R: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *, export: bool
) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    capacity, key_heads, key_dim = q.shape[1:]
    value_heads, value_dim = v.shape[2:]
    if value_heads % key_heads:
        return f"{value_heads} value heads do not divide among {key_heads} key heads"
    problem = operand_problem(R, (q, k, v))
    if problem is not None:
        return problem
    if max(key_dim, value_dim) > MAX_DIM or capacity > MAX_ROWS:
        return (
            f"the kernel takes head widths to {MAX_DIM} and {MAX_ROWS} nodes, "
            f"got {key_dim} x {value_dim} and {capacity}"
        )
    needed = memory.plan(round_up(capacity, 8), round_up(key_dim, 8), q.dtype, export).bytes
    if needed > memory.BLOCK_BYTES:
        return (
            f"{capacity} nodes of width {key_dim} in {q.dtype.name} need {needed} bytes of shared "
            f"memory, Hopper has {memory.BLOCK_BYTES}"
        )
    return None


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
    chosen: str,
) -> jax.Array:
    """Outputs; ``chosen`` is "mosaic_gpu" or "interpret"."""
    (out,) = padded_scan(R, layer, q, k, v, alpha, beta, walk, export=False, chosen=chosen)
    return out[:, : v.shape[1], :, : v.shape[3]]


def padded_scan(
    R: jax.Array,
    layer: jax.Array | int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    walk: Walk,
    *,
    export: bool,
    chosen: str,
) -> list[jax.Array]:
    """The scan of operands padded to sizes that the kernel takes; results keep the padding."""
    nodes, value_heads, value_dim = v.shape[1:]
    key_dim = round_up(q.shape[3], 8)
    value_dim = round_up(value_dim, TILE)
    if (value_dim, key_dim) != R.shape[3:]:
        R = lax.dynamic_index_in_dim(R, layer)  # pad one layer, not the pool
        R, layer = pad_axis(pad_axis(R, 3, value_dim), 4, key_dim), 0
        q, k, v = pad_axis(q, 3, key_dim), pad_axis(k, 3, key_dim), pad_axis(v, 3, value_dim)
    capacity = round_up(nodes, 8)
    if capacity != nodes:
        q, k, v, alpha, beta = (pad_axis(x, 1, capacity) for x in (q, k, v, alpha, beta))
        rows = jnp.arange(nodes, capacity, dtype=jnp.int32)
        more = jnp.broadcast_to(rows, (walk.node.shape[0], capacity - nodes))
        node = jnp.concatenate([walk.node, more], axis=1)
        load, save = (pad_axis(x, 1, capacity, -1) for x in (walk.load, walk.save))
        walk = Walk(node=node, load=load, save=save, size=walk.size)
    gates = round_up(value_heads, GROUP)
    alpha, beta = pad_axis(alpha, 2, gates), pad_axis(beta, 2, gates)
    layer = jnp.reshape(jnp.asarray(layer, jnp.int32), (1,))
    return tree_scan(R, layer, q, k, v, alpha, beta, walk, export=export, chosen=chosen)
