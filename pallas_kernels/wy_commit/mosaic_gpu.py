"""The commit for Hopper: one launch publishes all layers, in place on the pool.

A program owns 64 value rows of one head of one sequence and layer: it reads its part of the state
once, adds the path's rows and writes the part back. Reading and writing the pool bounds the speed;
only the rows on the path are staged, while the state arrives.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.padding import pad_axis, round_up
from pallas_kernels.path_scan.memory import ALIGNMENT, BLOCK_BYTES, GROUP, TILE
from pallas_kernels.tiles import (
    COLS,
    MAX_BARRIERS,
    ROWS,
    WG,
    Ref,
    compiler_params,
    interpreter,
    load,
)
from pallas_kernels.update import MAX_DIM
from pallas_kernels.wy_commit.tile import commit as commit_tile


def unsupported(R: jax.Array, k: jax.Array, u: jax.Array, nodes: jax.Array) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    key_heads, key_dim = k.shape[3:]
    value_heads, value_dim = u.shape[3:]
    if value_heads % key_heads:
        return f"{value_heads} value heads do not divide among {key_heads} key heads"
    if R.dtype != jnp.float32 or u.dtype != jnp.float32:
        return f"states and pseudo-values must be float32, got {R.dtype.name} and {u.dtype.name}"
    if k.dtype.name not in ("float32", "bfloat16"):
        return f"keys must be float32 or bfloat16, got {k.dtype.name}"
    if max(key_dim, value_dim) > MAX_DIM:
        return f"the kernel takes head widths to {MAX_DIM}, got {key_dim} x {value_dim}"
    steps = nodes.shape[1]
    needed = steps * (_row_bytes(key_dim, k.dtype) + 4 * TILE + ALIGNMENT) + 4096
    if needed > BLOCK_BYTES:
        return (
            f"paths of {steps} rows of width {key_dim} in {k.dtype.name} need {needed} bytes of "
            f"shared memory, Hopper has {BLOCK_BYTES}"
        )
    return None


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
    value_dim, key_dim = R.shape[3:]
    wide, deep = round_up(key_dim, 8), round_up(value_dim, TILE)
    k, u = pad_axis(k, 4, wide), pad_axis(u, 4, deep)
    g = pad_axis(g, 3, round_up(u.shape[3], GROUP))
    pool = jax.new_ref(pad_axis(pad_axis(R, 3, deep), 4, wide))
    _commit(pool, k, u, g, nodes, length, chosen=chosen)
    return jax.freeze(pool)[:, :, :, :value_dim, :key_dim]


@functools.partial(jax.jit, static_argnames="chosen")
def _commit(
    pool: Ref,
    k: jax.Array,
    u: jax.Array,
    g: jax.Array,
    nodes: jax.Array,
    length: jax.Array,
    *,
    chosen: str,
) -> None:
    layers, batch, value_heads, value_dim, key_dim = pool.shape
    ratio = value_heads // k.shape[3]
    steps = nodes.shape[1]

    def body(k_r, u_r, g_r, nodes_r, length_r, R_r, *, key_s, u_s, gate_s, loaded):
        layer, b = lax.axis_index("l"), lax.axis_index("b")
        h, tile = lax.axis_index("h"), lax.axis_index("v")
        rows = pl.ds(tile * TILE, TILE)
        group = pl.ds(h // GROUP * GROUP, GROUP)
        count = length_r[b]

        def stage(t, carry):
            node = nodes_r[b, t]
            for source, target in (
                (k_r.at[layer, b, node, h // ratio], key_s.at[t, pl.ds(0, key_dim)]),
                (u_r.at[layer, b, node, h, rows], u_s.at[t]),
                (g_r.at[layer, b, node, group], gate_s.at[t, pl.ds(0, GROUP)]),
            ):
                plgpu.copy_gmem_to_smem(source, target, loaded.at[t % MAX_BARRIERS])
            return carry

        def wait(t, carry):
            plgpu.barrier_wait(loaded.at[t % MAX_BARRIERS])
            return carry

        @pl.when(count > 0)
        def _():
            R = load(R_r.at[layer, b, h, rows], WG)
            for start in range(0, steps, MAX_BARRIERS):  # more than one round is rare
                stop = jnp.minimum(count, start + MAX_BARRIERS)
                lax.fori_loop(start, stop, stage, 0)
                lax.fori_loop(start, stop, wait, 0)
            R_r[layer, b, h, rows] = commit_tile(
                R,
                count,
                log_decay=lambda t: gate_s[t, h % GROUP],
                u=lambda t: load(u_s.at[t], ROWS),
                k=lambda t: load(key_s.at[t, pl.ds(0, key_dim)], COLS).astype(jnp.float32),
            )

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(layers, batch, value_heads, value_dim // TILE),
        grid_names=("l", "b", "h", "v"),
        scratch_types=dict(
            key_s=plgpu.SMEM((steps, _row_bytes(key_dim, k.dtype) // k.dtype.itemsize), k.dtype),
            u_s=plgpu.SMEM((steps, TILE), jnp.float32),
            gate_s=plgpu.SMEM((steps, ALIGNMENT // 4), jnp.float32),
            loaded=plgpu.Barrier(num_arrivals=3, num_barriers=min(steps, MAX_BARRIERS)),
        ),
        compiler_params=compiler_params(),
        interpret=interpreter(chosen),
        kernel_name="wy_commit",
    )
    kernel(k, u, g, nodes, length, pool)


def _row_bytes(width: int, dtype: jnp.dtype) -> int:
    """Bytes of a key in shared memory, such that a bulk copy can write the next one."""
    return round_up(width * dtype.itemsize, ALIGNMENT)
