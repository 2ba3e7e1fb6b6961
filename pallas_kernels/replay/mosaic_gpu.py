"""Replay for Hopper: one launch publishes all layers, in place on the pool.

A program owns 64 value rows of one head of one sequence and layer: it reads its part of the state
once, applies the path's rows and writes the part back. Reading and writing the pool bounds the
speed, so only the rows on the path are staged, each with a barrier of its own, while the state
arrives; and registers allow four programs a multiprocessor.
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
from pallas_kernels.update import MAX_DIM, advance, operand_problem


def unsupported(R: jax.Array, k: jax.Array, v: jax.Array, nodes: jax.Array) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    key_heads, key_dim = k.shape[3:]
    value_heads, value_dim = v.shape[3:]
    if value_heads % key_heads:
        return f"{value_heads} value heads do not divide among {key_heads} key heads"
    problem = operand_problem(R, (k, v))
    if problem is not None:
        return problem
    if max(key_dim, value_dim) > MAX_DIM:
        return f"the kernel takes head widths to {MAX_DIM}, got {key_dim} x {value_dim}"
    steps = nodes.shape[1]
    needed = steps * (_aligned(key_dim, k.dtype) + _aligned(TILE, k.dtype) + 2 * ALIGNMENT + 8)
    if needed + 4096 > BLOCK_BYTES:
        return (
            f"paths of {steps} rows of width {key_dim} in {k.dtype.name} need {needed} bytes of "
            f"shared memory, Hopper has {BLOCK_BYTES}"
        )
    return None


def replay(
    R: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    nodes: jax.Array,
    length: jax.Array,
    *,
    chosen: str,
) -> jax.Array:
    """The new pool; ``chosen`` is "mosaic_gpu" or "interpret"."""
    value_dim, key_dim = R.shape[3:]
    wide, deep = round_up(key_dim, 8), round_up(value_dim, TILE)
    k, v = pad_axis(k, 4, wide), pad_axis(v, 4, deep)
    heads = round_up(v.shape[3], GROUP)
    alpha, beta = pad_axis(alpha, 3, heads), pad_axis(beta, 3, heads)
    pool = jax.new_ref(pad_axis(pad_axis(R, 3, deep), 4, wide))
    _replay(pool, k, v, alpha, beta, nodes, length, chosen=chosen)
    return jax.freeze(pool)[:, :, :, :value_dim, :key_dim]


@functools.partial(jax.jit, static_argnames="chosen")
def _replay(
    pool: Ref,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    nodes: jax.Array,
    length: jax.Array,
    *,
    chosen: str,
) -> None:
    layers, batch, value_heads, value_dim, key_dim = pool.shape
    ratio = value_heads // k.shape[3]
    steps = nodes.shape[1]

    def body(k_r, v_r, a_r, b_r, nodes_r, length_r, R_r, *, key_s, value_s, gates_s, barriers):
        layer, b = lax.axis_index("l"), lax.axis_index("b")
        h, tile = lax.axis_index("h"), lax.axis_index("v")
        rows = pl.ds(tile * TILE, TILE)
        group = pl.ds(h // GROUP * GROUP, GROUP)
        count = length_r[b]

        def stage(t, _):
            node = nodes_r[b, t]
            for source, target in (
                (k_r.at[layer, b, node, h // ratio], key_s.at[t, pl.ds(0, key_dim)]),
                (v_r.at[layer, b, node, h, rows], value_s.at[t]),
                (a_r.at[layer, b, node, group], gates_s.at[0, t, pl.ds(0, GROUP)]),
                (b_r.at[layer, b, node, group], gates_s.at[1, t, pl.ds(0, GROUP)]),
            ):
                plgpu.copy_gmem_to_smem(source, target, barriers.at[t % MAX_BARRIERS])
            return _

        def step(t, R):
            plgpu.barrier_wait(barriers.at[t % MAX_BARRIERS])
            key = load(key_s.at[t, pl.ds(0, key_dim)], COLS).astype(jnp.float32)
            value = load(value_s.at[t], ROWS).astype(jnp.float32)
            return advance(R, key, value, gates_s[0, t, h % GROUP], gates_s[1, t, h % GROUP])

        @pl.when(count > 0)
        def _():
            R = load(R_r.at[layer, b, h, rows], WG)
            for start in range(0, steps, MAX_BARRIERS):  # more than one round is rare
                stop = jnp.minimum(count, start + MAX_BARRIERS)
                lax.fori_loop(start, stop, stage, 0)
                R = lax.fori_loop(start, stop, step, R)
            R_r[layer, b, h, rows] = R

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(layers, batch, value_heads, value_dim // TILE),
        grid_names=("l", "b", "h", "v"),
        scratch_types=dict(
            key_s=plgpu.SMEM((steps, _aligned(key_dim, k.dtype) // k.dtype.itemsize), k.dtype),
            value_s=plgpu.SMEM((steps, TILE), v.dtype),
            gates_s=plgpu.SMEM((2, steps, ALIGNMENT // 4), jnp.float32),
            barriers=plgpu.Barrier(num_arrivals=4, num_barriers=min(steps, MAX_BARRIERS)),
        ),
        compiler_params=compiler_params(),
        interpret=interpreter(chosen),
        kernel_name="replay",
    )
    kernel(k, v, alpha, beta, nodes, length, pool)


def _aligned(width: int, dtype: jnp.dtype) -> int:
    """Bytes of a row in shared memory, such that a bulk copy can write the next one."""
    return round_up(width * dtype.itemsize, ALIGNMENT)
