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
    R: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *, steps: int, export: bool = False
) -> str | None:
    """Why the kernel cannot take these arguments and a walk of ``steps``, or None if it can."""
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
    rows, steps = round_up(capacity, 8), _padded_steps(capacity, steps)
    needed = memory.plan(rows, steps, round_up(key_dim, 8), q.dtype, export).bytes
    if needed > memory.BLOCK_BYTES:
        walked = "" if steps == rows else f", walked in {steps} steps,"
        return (
            f"{capacity} nodes{walked} of width {key_dim} in {q.dtype.name} need {needed} bytes "
            f"of shared memory, Hopper has {memory.BLOCK_BYTES}"
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
    capacity, steps = round_up(nodes, 8), _padded_steps(nodes, walk.node.shape[1])
    if capacity != nodes:
        q, k, v, alpha, beta = (pad_axis(x, 1, capacity) for x in (q, k, v, alpha, beta))
        rows = jnp.arange(nodes, capacity, dtype=jnp.int32)
        more = jnp.broadcast_to(rows, (walk.node.shape[0], capacity - nodes))
        walk = walk.replace(node=jnp.concatenate([walk.node, more], axis=1))
    walk = Walk(
        node=pad_axis(walk.node, 1, steps),
        load=pad_axis(walk.load, 1, steps, -1),
        save=pad_axis(walk.save, 1, steps, -1),
        size=walk.size,
    )
    gates = round_up(value_heads, GROUP)
    alpha, beta = pad_axis(alpha, 2, gates), pad_axis(beta, 2, gates)
    layer = jnp.reshape(jnp.asarray(layer, jnp.int32), (1,))
    return tree_scan(R, layer, q, k, v, alpha, beta, walk, export=export, chosen=chosen)


def _padded_steps(nodes: int, steps: int) -> int:
    """Steps of a walk of that many once its rows are padded: as many as rows, or more as before."""
    return round_up(steps + round_up(nodes, 8) - nodes, 8)
