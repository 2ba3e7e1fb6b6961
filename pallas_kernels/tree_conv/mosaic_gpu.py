"""One launch a layer: each program makes one head's channels of a few nodes.

The head's inputs of every node and its history come into SMEM by two bulk copies, while the gates,
the taps and the row numbers are read; then a node's taps are rows of SMEM. Nodes lie in registers
as the rows of a tile whose columns are spread over all threads, so that one reduction serves the
norms of all of them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import (
    Ref,
    along_columns,
    along_rows,
    compiler_params,
    interpreter,
    load,
    store,
)

NODES = 8
"""Nodes computed at once: enough independent work to hide latencies."""

PROGRAMS = 264
"""Programs that fill the 132 processors twice over; in a larger grid each takes more nodes."""


def row_layout(width: int) -> Any:
    """Tiles [n, width] with columns spread over the threads; repeated if they are too few."""
    spread = math.gcd(width, 128)
    lanes = min(spread, 32)
    warps = spread // lanes
    tiles = [(1, spread), (lanes,), (1,)] if warps > 1 else [(1, spread), (1,)]
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles[:1] if spread == 1 else tiles)),
        _partition(4, warps, -3),
        _partition(32, lanes, -2),
        -1,
    )


def _partition(total: int, used: int, dimension: int) -> tuple[Any, ...]:
    repeated = (plgpu.Replicated(total // used),) if used < total else ()
    return (*repeated, dimension) if used > 1 else repeated


def chunks_per_program(batch: int, nodes: int, heads: int) -> int:
    """How many times NODES a program computes: one, unless the grid is large anyway."""
    chunks = pl.cdiv(nodes, NODES)
    return min(max(batch * heads * chunks // PROGRAMS, 1), chunks)


def tree_conv(
    inputs: jax.Array,
    history: jax.Array,
    layer: jax.Array,
    taps: jax.Array,
    rows: jax.Array,
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    *,
    key_heads: int,
    key_dim: int,
    at: tuple[int, int],
    chosen: str,
) -> tuple[jax.Array, ...]:
    """q, k, v, g, alpha, beta; arguments as of the public function, ``at``: of a and b."""
    batch, nodes, _ = inputs.shape
    (width, channels), value_heads = taps.shape, A_log.shape[0]
    value_dim = (channels - 2 * key_heads * key_dim) // value_heads
    heads = 2 * key_heads + value_heads
    step = min(NODES, nodes)  # the last chunk overlaps the one before it
    chunks = chunks_per_program(batch, nodes, heads)
    groups = pl.cdiv(nodes, chunks * step)
    past = -(-nodes // 8) * 8  # where the history lies in SMEM: at a multiple of 128 bytes

    def body(*refs: Ref) -> None:
        inputs_r, history_r, layer_r, taps_r, rows_r, *gates_r = refs[:9]
        q_r, k_r, v_r, *decays_r = refs[9:15]
        windows, barrier = refs[15:]
        sequence, group, head = (lax.axis_index(name) for name in ("batch", "group", "head"))

        def chunk(i: Any) -> Any:
            return jnp.minimum((group * chunks + i) * step, nodes - step)

        def places(i: Any) -> list[list[jax.Array]]:
            """The rows of SMEM that a chunk reads: one list a tap."""

            def place(node: int, tap: int) -> jax.Array:
                index = rows_r[sequence, chunk(i) + node, tap]
                return jnp.where(index < width - 1, past + index, index - (width - 1))

            return [[place(node, tap) for node in range(step)] for tap in range(width)]

        def activated(
            read: list[list[jax.Array]], window: Ref, weights: list[jax.Array], layout: Any
        ) -> jax.Array:
            """The convolution of ``step`` nodes, after its activation: [step, dk or dv]."""
            shape = (step, window.shape[1])
            total = None
            for tap in range(width):
                pieces = [load(window.at[pl.ds(place, 1)], layout) for place in read[tap]]
                read_rows = lax.concatenate(pieces, 0)
                term = read_rows.astype(jnp.float32) * along_columns(weights[tap], shape)
                total = term if total is None else total + term
            assert total is not None
            return (total * lax.logistic(total)).astype(inputs_r.dtype).astype(jnp.float32)

        def prepare(window: Ref, start: Any, layout: Any) -> list[jax.Array]:
            """Start the copies of the head's channels and read its taps meanwhile."""
            channel = pl.ds(start, window.shape[1])
            plgpu.copy_gmem_to_smem(
                inputs_r.at[sequence, :, channel], window.at[pl.ds(0, nodes)], barrier
            )
            plgpu.copy_gmem_to_smem(
                history_r.at[layer_r[0], sequence, :, channel],
                window.at[pl.ds(past, width - 1)],
                barrier,
            )
            return [
                load(taps_r.at[tap, channel], layout.reduce(0)).astype(jnp.float32)
                for tap in range(width)
            ]

        @pl.when(head < 2 * key_heads)
        def _() -> None:
            window, layout = windows[0], row_layout(key_dim)
            weights = prepare(window, head * key_dim, layout)
            is_query = head < key_heads
            scale = jnp.where(is_query, jnp.float32(key_dim**-0.5), jnp.float32(1.0))
            read = places(0)
            plgpu.barrier_wait(barrier)

            def one(i: Any, read: list[list[jax.Array]]) -> list[list[jax.Array]]:
                first = chunk(i)
                x = activated(read, window, weights, layout)
                norm = lax.rsqrt(jnp.sum(x * x, axis=1) + 1e-6)
                x = x * along_rows(norm, (step, key_dim)) * scale

                @pl.when(is_query)
                def _() -> None:
                    store(q_r.at[sequence, pl.ds(first, step), head], x)

                @pl.when(head >= key_heads)
                def _() -> None:
                    store(k_r.at[sequence, pl.ds(first, step), head - key_heads], x)

                return places(i + 1)

            lax.fori_loop(0, chunks, one, read)

        @pl.when(head >= 2 * key_heads)
        def _() -> None:
            window, layout = windows[1], row_layout(value_dim)
            value = head - 2 * key_heads
            weights = prepare(window, 2 * key_heads * key_dim + value * value_dim, layout)
            read = places(0)

            def gates(i: Any, _: Any) -> None:
                place = (sequence, pl.ds(chunk(i), step))
                values = _gates(place, row_layout(step).reduce(0), value, at, *gates_r)
                for ref, x in zip(decays_r, values, strict=True):
                    store(ref.at[*place, value], x)

            lax.fori_loop(0, chunks, gates, None)
            plgpu.barrier_wait(barrier)

            def one(i: Any, read: list[list[jax.Array]]) -> list[list[jax.Array]]:
                x = activated(read, window, weights, layout)
                store(v_r.at[sequence, pl.ds(chunk(i), step), value], x)
                return places(i + 1)

            lax.fori_loop(0, chunks, one, read)

    def out(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, nodes, *shape), jnp.float32)

    window = [plgpu.SMEM((past + width - 1, d), inputs.dtype) for d in (key_dim, value_dim)]
    return plgpu.kernel(
        body,
        out_type=[out(key_heads, key_dim)] * 2
        + [out(value_heads, value_dim)]
        + [out(value_heads)] * 3,
        grid=(batch, groups, heads),
        grid_names=("batch", "group", "head"),
        scratch_types=[
            plgpu.RefUnion(*window),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=compiler_params().replace(reduction_scratch_bytes=NODES * 512),
        interpret=interpreter(chosen),
        kernel_name="tree_conv",
    )(inputs, history, layer.reshape(1), taps, rows, a, b, A_log, dt_bias)


def _gates(
    place: Any,
    layout: Any,
    head: Any,
    at: tuple[int, int],
    a_r: Ref,
    b_r: Ref,
    A_log_r: Ref,
    dt_bias_r: Ref,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """g, alpha and beta of some nodes for one value head."""
    a, b = (
        load(ref.at[*place, start + head], layout)
        for ref, start in zip((a_r, b_r), at, strict=True)
    )
    x = a.astype(jnp.float32) + dt_bias_r[head]
    g = -jnp.exp(A_log_r[head]) * softplus(x)
    alpha = jnp.exp(g)
    g = jnp.where(alpha > 0.5, log1p(jnp.minimum(alpha - 1.0, 0.0)), g)
    beta = lax.logistic(b.astype(jnp.float32))
    return g, alpha, beta


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + e^x) to a few units in the last place, for large negative x as well."""
    return jnp.maximum(x, 0.0) + log1p(jnp.exp(-jnp.abs(x)))


def log1p(y: jax.Array) -> jax.Array:
    """log(1 + y) for y from -1/2 to 1, which log(1 + y) would lose to rounding; Mosaic has none.

    With z = y / (2 + y), at most 1/3 in size, it is 2 artanh z = 2 z (1 + z^2 / 3 + z^4 / 5 + ...).
    """
    z = y / (2.0 + y)
    square = z * z
    series = jnp.full_like(square, 1 / 15)
    for power in range(13, 0, -2):
        series = series * square + 1 / power
    return 2.0 * z * series
