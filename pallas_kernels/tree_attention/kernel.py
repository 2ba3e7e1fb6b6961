"""Attention over one split of the context: outputs that are not yet divided, maxima and sums.

Only the cached tiles at the two ends of a sequence and the tree block need a mask: the tiles
between them are a loop without one. Scores are in log2 units; maxima and sums are float32, weights
are rounded to bfloat16 for their product with the values.
"""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import ROWS, WG, Ref, along_rows, compiler_params, load, store
from pallas_kernels.tree_attention.sizes import BLOCK, PAIR, TILE, WORD, Sizes, scratch_types
from pallas_kernels.tree_attention.split import (
    KEYS,
    VALUES,
    Split,
    copy_tiles,
    release,
    skip,
    tiles_of,
    wait_for,
)

LOWEST = -1e30
"""The maximum of a row that saw nothing: finite, so that differences of maxima are."""

COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24
"""Of the threads of two computing warpgroups, and of the one that starts copies."""

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Outputs [64, D], maxima [64] and sums [64] of a warpgroup's rows."""


def attend_splits(
    sizes: Sizes, arrays: dict[str, jax.Array], interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """What every program found, float32; programs without tiles write nothing.

    Returns outputs [B, Hkv, T, splits, programs, rows, D], and maxima and sums
    [B, Hkv, T, splits, programs, 2, rows]. Rows are those of the program's warpgroups.

    Args:
      arrays: layer [1], length [B], takes_part [B] int32; seen [B, words, rows] int32, bit j of
        word w: whether the row sees row 32 w + j of the tree block; q [B, Hkv, rows, D];
        k, v [B, N, Hkv, D]; keys, values [La B (S + 1), Hkv, D].
    """
    names = tuple(arrays)

    def program(*refs: Ref, **scratch: Any) -> None:
        inputs = SimpleNamespace(**dict(zip(names, refs, strict=False)))
        out, sums = refs[len(names) :]
        b, head, row_tile, split = (lax.axis_index(n) for n in ("b", "head", "row_tile", "split"))
        base = (inputs.layer[0] * sizes.batch + b) * sizes.capacity
        length = inputs.length[b]
        cached, each = tiles_of(sizes, base, length, inputs.takes_part[b] > 0)
        pair = lax.axis_index(PAIR) if sizes.paired else 0
        p = Split(
            sizes=sizes,
            interpreted=interpret is not None,
            group=lax.axis_index("group"),
            pair=pair,
            b=b,
            head=head,
            row_tile=row_tile,
            base=base,
            length=length,
            cached=cached,
            first=split * each,
            last=jnp.minimum((split + 1) * each, cached + sizes.block_tiles),
            s=SimpleNamespace(**scratch),
            inputs=inputs,
        )

        @pl.when((p.first < p.last) & (p.group == sizes.warpgroups))
        def _() -> None:
            if sizes.warpgroups == 2:
                plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            copy_tiles(p)

        def compute(shares: bool) -> None:
            if sizes.warpgroups == 2:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            place = b, head, row_tile, split, pair
            rows = pl.ds(pl.multiple_of(p.group * BLOCK, BLOCK), BLOCK)
            acc, top, total = run(dataclasses.replace(p, shares=shares))
            store(out.at[*place, rows], acc)
            store(sums.at[*place, 0, rows], top)
            store(sums.at[*place, 1, rows], total)

        alone = (p.group == 0) if sizes.paired else (p.group < sizes.warpgroups)
        pl.when((p.first < p.last) & alone)(lambda: compute(shares=False))
        if sizes.paired:
            pl.when((p.first < p.last) & (p.group == 1))(lambda: compute(shares=True))

    of = jax.ShapeDtypeStruct
    places = sizes.batch, sizes.key_heads, sizes.row_tiles, sizes.splits, sizes.programs
    rows = sizes.warpgroups * BLOCK
    together = {"cluster": (2,), "cluster_names": (PAIR,)} if sizes.paired else {}
    return plgpu.kernel(
        program,
        out_type=[
            of((*places, rows, sizes.width), jnp.float32),
            of((*places, 2, rows), jnp.float32),
        ],
        grid=(sizes.batch, sizes.splits, sizes.key_heads, sizes.row_tiles),
        grid_names=("b", "split", "head", "row_tile"),
        **together,
        num_threads=sizes.warpgroups + 1,
        thread_name="group",
        scratch_types=scratch_types(sizes),
        compiler_params=compiler_params().replace(approx_math=True),
        interpret=interpret,
        kernel_name="tree_attention",
    )(*arrays.values())


def run(p: Split) -> Carry:
    """All tiles of the split that are this warpgroup's."""
    asked = p.s.asked.at[p.group]
    plgpu.copy_gmem_to_smem(p.inputs.q.at[p.b, p.head, p.rows], queries(p), asked)
    carry = (
        plgpu.layout_cast(jnp.zeros((BLOCK, p.sizes.width), jnp.float32), WG),
        plgpu.layout_cast(jnp.full((BLOCK,), LOWEST, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), ROWS),
    )
    plgpu.barrier_wait(asked)
    return run_every_second(p, carry) if p.shares else run_all(p, carry)


def run_all(p: Split, carry: Carry) -> Carry:
    """The keys of a tile are multiplied while the weights of the one before are formed."""

    def turn(tile: Any, state: Any, masked: bool) -> Any:
        scores, carry = state
        if masked:
            scores = jnp.where(allowed(p, tile), scores, -jnp.inf)
        products, (weights, carry) = multiply_keys(p, tile + 1, lambda: weigh(p, scores, carry))
        return products, take_values(p, tile, weights, carry, masked)

    state = multiply_keys(p, p.first, lambda: carry)
    state = lax.fori_loop(p.first, p.unmasked, lambda i, s: turn(i, s, masked=False), state)
    return lax.fori_loop(p.unmasked, p.last, lambda i, s: turn(i, s, masked=True), state)[1]


def run_every_second(p: Split, carry: Carry) -> Carry:
    """One tile at a time. Items are released in the order of their copies, those of the other
    program's tiles too: otherwise slots would stay taken that others wait for."""
    start = p.first + p.pair

    def turn(index: Any, carry: Carry, masked: bool) -> Carry:
        tile = start + 2 * index
        scores, _ = multiply_keys(p, tile, lambda: carry)
        pl.when(tile > p.first)(lambda: skip(p, tile - 1, VALUES))
        pl.when(tile + 1 < p.last)(lambda: skip(p, tile + 1, KEYS))
        if masked:
            scores = jnp.where(allowed(p, tile), scores, -jnp.inf)
        return take_values(p, tile, *weigh(p, scores, carry), masked)

    def turns(end: Any) -> Any:
        return jnp.maximum(end - start + 1, 0) // 2

    pl.when(p.pair == 1)(lambda: skip(p, p.first, KEYS))
    plain, count = turns(p.unmasked), turns(p.last)
    carry = lax.fori_loop(0, plain, lambda i, c: turn(i, c, masked=False), carry)
    carry = lax.fori_loop(plain, count, lambda i, c: turn(i, c, masked=True), carry)
    others = lax.rem(p.last - start, 2) == 0
    pl.when(others)(lambda: skip(p, p.last - 1, VALUES))
    return carry


def weigh(p: Split, scores: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
    """The weights of a tile's values, and the carry scaled for them."""
    acc, top, total = carry
    unit = p.sizes.width**-0.5 * math.log2(math.e)
    higher = jnp.maximum(top, jnp.max(scores, axis=1) * unit)
    weights = jnp.exp2(scores * unit - along_rows(higher, scores.shape))
    shrink = jnp.exp2(top - higher)
    total = total * shrink + jnp.sum(weights, axis=1)
    acc = acc * along_rows(shrink, acc.shape)
    return weights.astype(jnp.bfloat16), (acc, higher, total)


def take_values(p: Split, tile: Any, weights: jax.Array, carry: Carry, masked: bool) -> Carry:
    """Add a tile's weighted values, once they are there."""
    acc, top, total = carry
    values = wait_for(p, tile, VALUES, not masked)
    if masked:
        pl.when(tile < p.cached)(lambda: clear_hidden(p, tile, values))
    acc = add_values(p, acc, weights, values)
    release(p, tile, VALUES)
    return acc, top, total


def queries(p: Split) -> Ref:
    """This warpgroup's queries in SMEM."""
    return p.s.queries.at[pl.ds(pl.multiple_of(p.group * BLOCK, BLOCK), BLOCK)]


def multiply_keys(p: Split, tile: Any, meanwhile: Callable[[], Any]) -> tuple[jax.Array, Any]:
    """[64, 64]: products of the queries with a tile's keys, and what was done meanwhile.

    Past the end of the split they are products with whatever the slot holds, and nobody's.
    """
    ours = tile < p.last

    @pl.when(ours)
    def _() -> None:
        wait_for(p, tile, KEYS, cached=False)

    keys = p.s.ring.at[p.slot(tile, KEYS)]
    if p.interpreted:
        made = meanwhile()
        products = jnp.dot(_wide(queries(p)), _wide(keys).T, precision="highest")
    else:

        def scoped(products: Ref) -> tuple[jax.Array, Any]:
            plgpu.wgmma(products, queries(p), keys.T)
            made = meanwhile()
            return products[...], made

        accumulator = plgpu.WGMMAAccumulatorRef((BLOCK, TILE), jnp.float32)
        products, made = pl.run_scoped(scoped, accumulator)
    pl.when(ours)(lambda: release(p, tile, KEYS))
    return products, made


def add_values(p: Split, acc: jax.Array, weights: jax.Array, values: Ref) -> jax.Array:
    """acc + weights values, [64, D]."""
    if p.interpreted:
        return acc + jnp.dot(weights.astype(jnp.float32), _wide(values), precision="highest")

    def stateful(sums: Ref) -> None:
        plgpu.wgmma(sums, weights, values)

    started: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(stateful)(started)


def clear_hidden(p: Split, tile: Any, values: Ref) -> None:
    """Zero the values of a cached tile that are no row of the sequence: it may hold up to 7 rows of
    the one before it, and 0 times a NaN of theirs would be one. All warpgroups write the same."""
    low, high = p.visible(tile)

    def clear(index: Any, carry: Any) -> Any:
        part = values.at[:, pl.ds(pl.multiple_of(index * TILE, TILE), TILE)]
        x = load(part, WG)
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=WG) + p.start(tile)
        part[...] = jnp.where((row >= low) & (row < high), x, jnp.zeros_like(x))
        return carry

    lax.fori_loop(0, p.sizes.width // TILE, clear, None)
    plgpu.commit_smem()


def _wide(ref: Ref) -> jax.Array:
    return ref[...].astype(jnp.float32)


def allowed(p: Split, tile: Any) -> jax.Array:
    """[64, 64] bool: which keys of a tile this warpgroup's rows see."""
    shape = BLOCK, TILE
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WG)
    row = column + p.start(tile)
    low, high = p.visible(tile)
    cached = (row >= low) & (row < high) & (tile < p.cached)
    first = jnp.maximum(tile - p.cached, 0) * (TILE // WORD)
    words = [load(p.inputs.seen.at[p.b, first + i, p.rows], ROWS) for i in range(TILE // WORD)]
    bits = jnp.where(column < WORD, along_rows(words[0], shape), along_rows(words[1], shape))
    seen = lax.shift_right_logical(bits, column & (WORD - 1)) & 1 != 0
    return cached | (seen & (tile >= p.cached))
