"""Merging what the programs of a context found into outputs: one program a row.

A row's outputs are the sum over its parts of 2^(m_i - m) o_i, divided by the same sum of the l_i,
with m the largest of the maxima m_i. A part is what one program of one split found. Parts are taken
``TOGETHER`` at a time, so that their loads overlap.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import Ref, compiler_params, load, store
from pallas_kernels.tree_attention.kernel import LOWEST
from pallas_kernels.tree_attention.sizes import BLOCK, Sizes
from pallas_kernels.tree_attention.split import tiles_of
from pallas_kernels.tree_conv.mosaic_gpu import row_layout

TOGETHER = 8


def merge_parts(
    sizes: Sizes, arrays: dict[str, jax.Array], outputs: jax.Array, sums: jax.Array, interpret: Any
) -> jax.Array:
    """[B, N, Hkv, G, D] bfloat16; rows that saw nothing are 0.

    Args:
      arrays: layer, length and takes_part, as ``attend_splits`` takes them.
      outputs, sums: what it returns.
    """
    names = ("layer", "length", "takes_part")

    def program(layer_r: Ref, length_r: Ref, takes_part_r: Ref, *refs: Ref) -> None:
        outputs_r, sums_r, merged = refs
        b, head, node, member = (lax.axis_index(n) for n in ("b", "head", "node", "member"))
        base = (layer_r[0] * sizes.batch + b) * sizes.capacity
        cached, each = tiles_of(sizes, base, length_r[b], takes_part_r[b] > 0)
        total = cached + sizes.block_tiles
        splits = jnp.where(each > 0, (total + each - 1) // jnp.maximum(each, 1), 0)
        row = node * sizes.group + member
        block = row // BLOCK
        row_tile, block = block // sizes.blocks, lax.rem(block, sizes.blocks)
        # In a pair each program has a block of its own, and both have parts of the third.
        shared = block == 2 if sizes.paired else False
        programs = jnp.where(shared, 2, 1)
        warpgroup = jnp.where(shared, 1, 0) if sizes.paired else block
        place = warpgroup * BLOCK + lax.rem(row, BLOCK)
        parts = splits * programs
        layout = row_layout(sizes.width)

        def part(index: Any) -> tuple[Any, ...]:
            index = jnp.minimum(index, parts - 1)
            program = jnp.where(shared, lax.rem(index, 2), block) if sizes.paired else 0
            return b, head, row_tile, index // programs, program

        def take(turn: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            acc, top, weight = carry
            indices = [turn * TOGETHER + i for i in range(TOGETHER)]
            rows = [
                load(outputs_r.at[*part(i), pl_row(place)], layout).astype(jnp.float32)
                for i in indices
            ]
            tops = [jnp.where(i < parts, sums_r[*part(i), 0, place], LOWEST) for i in indices]
            totals = [jnp.where(i < parts, sums_r[*part(i), 1, place], 0.0) for i in indices]
            higher = top
            for each_top in tops:
                higher = jnp.maximum(higher, each_top)
            shrink = jnp.exp2(top - higher)
            acc, weight = acc * shrink, weight * shrink
            for i, x, each_top, each_total in zip(indices, rows, tops, totals, strict=True):
                factor = jnp.where(i < parts, jnp.exp2(each_top - higher), 0.0)
                acc, weight = acc + x * factor, weight + each_total * factor
            return acc, higher, weight

        acc = plgpu.layout_cast(jnp.zeros((1, sizes.width), jnp.float32), layout)
        start = acc, jnp.float32(LOWEST), jnp.float32(0.0)
        turns = (parts + TOGETHER - 1) // TOGETHER
        acc, _, weight = lax.fori_loop(0, turns, take, start)
        inverse = jnp.where(weight > 0.0, 1.0 / weight, 0.0)
        store(merged.at[b, node, head, pl_row(member)], (acc * inverse).astype(merged.dtype))

    shape = sizes.batch, sizes.nodes, sizes.key_heads, sizes.group, sizes.width
    return plgpu.kernel(
        program,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        grid=(sizes.batch, sizes.key_heads, sizes.nodes, sizes.group),
        grid_names=("b", "head", "node", "member"),
        compiler_params=compiler_params(),
        interpret=interpret,
        kernel_name="tree_attention_merge",
    )(*(arrays[name] for name in names), outputs, sums)


def pl_row(row: Any) -> Any:
    """One row as a slice, so that a tile [1, D] is read or written."""
    return pl.ds(row, 1)
