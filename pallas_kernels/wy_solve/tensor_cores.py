"""The matrix products of the WY solve: keys with keys and queries, and the state with both.

Tensor cores multiply bfloat16 (or tf32). A float32 factor goes as a sum of bfloat16 terms, so that
"ieee" loses nothing of a product but what lies below 2**-24. The accumulator of a tensor core cuts
digits off at every addition, so only the 32 columns of a chunk are added up there, small terms
first, and chunks are added in registers. Tiles are in the ``WG`` layout.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import (
    COLS,
    ROWS,
    WG,
    Ref,
    along_columns,
    along_rows,
    load,
    split_bf16,
)
from pallas_kernels.wy_solve.program import Program
from pallas_kernels.wy_solve.sizes import HALF, SEGMENT

KEYS = SEGMENT // 2  # whose couplings a warpgroup forms
COUPLING = (2 * SEGMENT, KEYS)
SQUARE = (HALF, 2 * SEGMENT)


def convert(p: Program, to: Ref) -> None:
    """Write the raw keys and queries [64, dk] to ``to`` [terms, 64, dk] as wgmma needs them.

    The warpgroups take turns with the chunks; both must have arrived before ``to`` is read.
    """
    for chunk in range(p.sizes.chunks):
        columns = p.columns(chunk)

        @pl.when(p.group == chunk % 2)
        def _(columns=columns):
            raw = load(p.s.raw.at[:, columns], WG)
            terms = (raw,) if p.sizes.tf32 else split_bf16(raw, p.sizes.terms)
            for i, term in enumerate(terms):
                to.at[i, :, columns][...] = term.astype(to.dtype)


def couplings(p: Program, keys: Ref, seen: jax.Array, G_keys: jax.Array) -> jax.Array:
    """[64, 16]: how the pseudo-values of this warpgroup's keys (columns) enter a segment's rows.

    The first 32 rows are -L, the others the weights in the outputs.

    Args:
      keys: [terms, 64, dk] whose first 32 rows are keys, of this segment or of an earlier one.
      seen: [64, 16] bool, which row takes which pseudo-value.
      G_keys: [16] cumulative log decays of the keys.
    """
    pairs = p.sizes.key_pairs or ((0, 0),)
    mine = pl.ds(KEYS * p.group, KEYS)
    if p.interpreted:
        gram = sum(_dot(p.s.kq[i], keys[j, mine]) for i, j in pairs)
    else:

        def scoped(*sums):
            for chunk, acc in enumerate(sums):
                columns = p.columns(chunk)
                for i, j in pairs:
                    plgpu.wgmma(acc, p.s.kq.at[i, :, columns], keys.at[j, mine, columns].T)
            return [acc[...] for acc in sums]

        sums = pl.run_scoped(scoped, *[accumulator(COUPLING)] * p.sizes.chunks)
        gram = functools.reduce(jnp.add, map(lax.optimization_barrier, sums))
    G, minus_beta = (load(p.s.lines.at[p.group, line], ROWS) for line in (0, 1))
    # The difference is masked before exp: exp of a positive difference overflows.
    difference = along_rows(G, COUPLING) - along_columns(G_keys, COUPLING)
    decay = jnp.exp(jnp.where(seen, difference, 0.0))
    solves = plgpu.broadcasted_iota(jnp.int32, COUPLING, 0, layout=WG) < SEGMENT
    scale = jnp.where(solves, along_rows(minus_beta, COUPLING), 1.0)
    return jnp.where(seen, gram * decay * scale, 0.0)


def fetch_state(p: Program) -> None:
    """Start copying the first chunks of this warpgroup's rows of the state into SMEM."""
    for c in range(p.sizes.slots):
        plgpu.copy_gmem_to_smem(p.state(c), p.slot(c), p.arrived(c))


def products(p: Program, committed: bool) -> jax.Array:
    """[64, 64]: R0 k_i times -beta_i exp(G_i), then R0 q_i times exp(G_i); R0 is read once.

    ``committed``: the whole state has arrived, and a path was committed into it.
    """
    # A loop, not a list: left to the compiler, all chunks' sums would wait in registers.
    total = lax.fori_loop(
        0,
        p.sizes.chunks,
        lambda chunk, total: total + _chunk_products(p, chunk, committed),
        plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WG),
    )
    minus_beta, grown = (load(p.s.lines.at[p.group, line], COLS) for line in (1, 2))
    is_key = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=WG) < SEGMENT
    factor = along_columns(grown, SQUARE)
    return total * jnp.where(is_key, along_columns(minus_beta, SQUARE) * factor, factor)


def _chunk_products(p: Program, chunk: jax.Array, committed: bool) -> jax.Array:
    sizes, slot, columns = p.sizes, p.slot(chunk), p.columns(chunk)
    if not committed:
        plgpu.barrier_wait(p.arrived(chunk))
    tile = load(slot, WG)
    terms = (tile,) if sizes.tf32 else split_bf16(tile, 3)
    pairs = sizes.state_pairs or ((0, 0),)
    if p.interpreted:
        total = sum(_dot(terms[i], p.s.kq[j, :, columns]) for i, j in pairs)
    else:

        def scoped(acc):
            for i, j in pairs:
                factor = slot if sizes.tf32 else terms[i]
                plgpu.wgmma(acc, factor, p.s.kq.at[j, :, columns].T)
            return acc[...]

        total = lax.optimization_barrier(pl.run_scoped(scoped, accumulator(SQUARE)))
    if sizes.slots < sizes.chunks:

        @pl.when(chunk + sizes.slots < sizes.chunks)
        def _():
            plgpu.commit_smem()  # all have read the slot
            later = chunk + sizes.slots
            plgpu.copy_gmem_to_smem(p.state(later), slot, p.arrived(later))

    return total


def accumulator(shape: tuple[int, int]) -> plgpu.WGMMAAccumulatorRef:
    return plgpu.WGMMAAccumulatorRef(shape, jnp.float32)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y^T in float32: what a wgmma of these terms accumulates."""
    return jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32).T, precision="highest")
