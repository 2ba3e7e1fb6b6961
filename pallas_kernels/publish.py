"""The kernel that applies paths to a pool of states, for ``replay`` and ``wy_commit``.

One launch serves all layers, in place. A program owns 64 value rows of one head of one sequence and
layer: it reads its part of the state once, applies the path's rows and writes the part back.
Reading and writing the pool bounds the speed, so only the rows on the path are staged, each with a
barrier of its own, while the state arrives; and registers allow four programs a multiprocessor.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.padding import pad_axis, round_up
from pallas_kernels.path_scan.memory import ALIGNMENT, BLOCK_BYTES, GROUP, TILE
from pallas_kernels.tiles import COLS, ROWS, WG, Ref, compiler_params, interpreter, load
from pallas_kernels.update import MAX_DIM

MAX_BARRIERS = 32
"""Barriers that Mosaic lets one array of them have."""


class Rows(NamedTuple):
    """Readers of row t of the path: key(t) [dk], value(t) [64], gate(which, t) scalar."""

    key: Callable[[jax.Array], jax.Array]
    value: Callable[[jax.Array], jax.Array]
    gate: Callable[[int, jax.Array], jax.Array]


class Update(NamedTuple):
    """What a path does to a tile of the state [64, dk]; both functions must be hashable.

    Attributes:
      name: of the kernel.
      step: (tile, t, rows) -> tile, once a row in order, as soon as the row is there.
      finish: (tile, length, rows) -> tile, after the last row; length is at least 1.
    """

    name: str
    step: Callable[[jax.Array, jax.Array, Rows], jax.Array]
    finish: Callable[[jax.Array, jax.Array, Rows], jax.Array]


def unsupported(k: jax.Array, values: jax.Array, gates: int, nodes: jax.Array) -> str | None:
    """Why the kernel cannot take these shapes, or None if it can."""
    key_heads, key_dim = k.shape[3:]
    value_heads, value_dim = values.shape[3:]
    if value_heads % key_heads:
        return f"{value_heads} value heads do not divide among {key_heads} key heads"
    if max(key_dim, value_dim) > MAX_DIM:
        return f"the kernel takes head widths to {MAX_DIM}, got {key_dim} x {value_dim}"
    steps = nodes.shape[1]
    row = _row_bytes(key_dim, k.dtype) + _row_bytes(TILE, values.dtype) + gates * ALIGNMENT
    needed = steps * row + 4096
    if needed > BLOCK_BYTES:
        return (
            f"paths of {steps} rows of width {key_dim} in {k.dtype.name} need {needed} bytes of "
            f"shared memory, Hopper has {BLOCK_BYTES}"
        )
    return None


def publish(
    update: Update,
    R: jax.Array,
    k: jax.Array,
    values: jax.Array,
    gates: tuple[jax.Array, ...],
    nodes: jax.Array,
    length: jax.Array,
    *,
    chosen: str,
) -> jax.Array:
    """The new pool [L, B, Hv, dv, dk]; ``chosen`` is "mosaic_gpu" or "interpret".

    k [L, B, T, Hk, dk], values [L, B, T, Hv, dv], each gate [L, B, T, Hv]; nodes [B, P] row ids,
    length [B]. A sequence of length 0 keeps its bytes at no cost.
    """
    value_dim, key_dim = R.shape[3:]
    wide, deep = round_up(key_dim, 8), round_up(value_dim, TILE)
    k, values = pad_axis(k, 4, wide), pad_axis(values, 4, deep)
    gates = tuple(pad_axis(gate, 3, round_up(gate.shape[3], GROUP)) for gate in gates)
    pool = jax.new_ref(pad_axis(pad_axis(R, 3, deep), 4, wide))
    _publish(pool, k, values, gates, nodes, length, update=update, chosen=chosen)
    return jax.freeze(pool)[:, :, :, :value_dim, :key_dim]


@functools.partial(jax.jit, static_argnames=("update", "chosen"))
def _publish(
    pool: Ref,
    k: jax.Array,
    values: jax.Array,
    gates: tuple[jax.Array, ...],
    nodes: jax.Array,
    length: jax.Array,
    *,
    update: Update,
    chosen: str,
) -> None:
    layers, batch, value_heads, value_dim, key_dim = pool.shape
    ratio = value_heads // k.shape[3]
    steps = nodes.shape[1]
    rounds = range(0, steps, MAX_BARRIERS)  # more than one is rare

    def body(k_r, values_r, *refs, key_s, value_s, gates_s, loaded):
        *gates_r, nodes_r, length_r, R_r = refs
        layer, b = lax.axis_index("l"), lax.axis_index("b")
        h, tile = lax.axis_index("h"), lax.axis_index("v")
        mine = pl.ds(tile * TILE, TILE)
        group = pl.ds(h // GROUP * GROUP, GROUP)
        count = length_r[b]
        rows = Rows(
            key=lambda t: load(key_s.at[t, pl.ds(0, key_dim)], COLS).astype(jnp.float32),
            value=lambda t: load(value_s.at[t], ROWS).astype(jnp.float32),
            gate=lambda which, t: gates_s[which, t, h % GROUP],
        )

        def stage(t, carry):
            # A length past the path's end reads row 0, as the reference does, and no row -1.
            node, barrier = jnp.maximum(nodes_r[b, t], 0), loaded.at[t % MAX_BARRIERS]
            key, value = k_r.at[layer, b, node, h // ratio], values_r.at[layer, b, node, h, mine]
            plgpu.copy_gmem_to_smem(key, key_s.at[t, pl.ds(0, key_dim)], barrier)
            plgpu.copy_gmem_to_smem(value, value_s.at[t], barrier)
            for which, gate in enumerate(gates_r):
                target = gates_s.at[which, t, pl.ds(0, GROUP)]
                plgpu.copy_gmem_to_smem(gate.at[layer, b, node, group], target, barrier)
            return carry

        def step(t, R):
            plgpu.barrier_wait(loaded.at[t % MAX_BARRIERS])
            return update.step(R, t, rows)

        @pl.when(count > 0)
        def _():
            R = load(R_r.at[layer, b, h, mine], WG)
            for start in rounds:
                stop = jnp.minimum(count, start + MAX_BARRIERS)
                lax.fori_loop(start, stop, stage, 0)
                R = lax.fori_loop(start, stop, step, R)
            R_r[layer, b, h, mine] = update.finish(R, count, rows)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(layers, batch, value_heads, value_dim // TILE),
        grid_names=("l", "b", "h", "v"),
        scratch_types=dict(
            key_s=plgpu.SMEM((steps, _row_bytes(key_dim, k.dtype) // k.dtype.itemsize), k.dtype),
            value_s=plgpu.SMEM((steps, TILE), values.dtype),
            gates_s=plgpu.SMEM((len(gates), steps, ALIGNMENT // 4), jnp.float32),
            loaded=plgpu.Barrier(
                num_arrivals=2 + len(gates), num_barriers=min(steps, MAX_BARRIERS)
            ),
        ),
        compiler_params=compiler_params(),
        interpret=interpreter(chosen),
        kernel_name=update.name,
    )
    kernel(k, values, *gates, nodes, length, pool)


def _row_bytes(width: int, dtype: jnp.dtype) -> int:
    """Bytes of a row in shared memory, such that a bulk copy can write the next one."""
    return round_up(width * dtype.itemsize, ALIGNMENT)
