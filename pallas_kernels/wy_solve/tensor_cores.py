"""Operands of the tensor cores, and the products of the state with all keys and queries.

Tensor cores multiply bfloat16 (or tf32). A float32 factor goes as a sum of bfloat16 terms, so that
"ieee" loses nothing of a product but what lies below 2**-24. The accumulator of a tensor core cuts
digits off at every addition, so only the 32 columns of a chunk are added up there, small terms
first, and chunks are added in registers. Tiles are in the ``WG`` layout.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import COLS, WG, Ref, along_columns, load, split_bf16
from pallas_kernels.wy_solve.program import Program, accumulate
from pallas_kernels.wy_solve.sizes import HALF, SEGMENT

SQUARE = (HALF, 2 * SEGMENT)


def convert(p: Program, to: Ref) -> None:
    """Write the raw keys and queries [64, dk] to ``to`` [terms, 64, dk] as wgmma needs them.

    The warpgroups take turns with the chunks; all must have arrived before ``to`` is read.
    """
    for chunk in range(p.sizes.chunks):
        columns = p.columns(chunk)

        @pl.when(p.group == chunk % p.sizes.warpgroups)
        def _(columns=columns):
            raw = load(p.s.raw.at[:, columns], WG)
            terms = (raw,) if p.sizes.tf32 else split_bf16(raw, p.sizes.terms)
            for i, term in enumerate(terms):
                to.at[i, :, columns][...] = term.astype(to.dtype)


def fetch_state(p: Program, window: int | jax.Array) -> None:
    """Start copying a window of this warpgroup's rows of the state into SMEM."""
    plgpu.copy_gmem_to_smem(p.state(window), p.s.state.at[p.rows], p.arrived)


def products(p: Program, committed: bool) -> jax.Array:
    """[64, 64]: R0 k_i, then R0 q_i of this warpgroup's rows of R0 and its segment of the pass.

    ``committed``: the whole state has arrived, and a path was committed into it.
    """
    sizes = p.sizes
    windows = sizes.chunks // sizes.window

    def add_window(window, total):
        if not committed:
            plgpu.barrier_wait(p.arrived)
        # A loop, not a list: left to the compiler, all chunks' sums would wait in registers.
        total = lax.fori_loop(
            0,
            sizes.window,
            lambda chunk, total: total + _chunk_products(p, window, chunk),
            total,
        )
        if windows > 1:

            @pl.when(window + 1 < windows)
            def _():
                plgpu.commit_smem()  # all have read this window
                fetch_state(p, window + 1)

        return total

    total = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WG)
    return lax.fori_loop(0, windows, add_window, total) if windows > 1 else add_window(0, total)


def scaled(p: Program, total: jax.Array) -> jax.Array:
    """The products of R0 times -beta_i exp(G_i) in a key's column, exp(G_i) in a query's."""
    lines = p.s.lines.at[p.half, p.part]
    minus_beta, grown = (load(lines.at[line], COLS) for line in (1, 2))
    is_key = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=WG) < SEGMENT
    factor = along_columns(grown, SQUARE)
    return total * jnp.where(is_key, along_columns(minus_beta, SQUARE) * factor, factor)


def _chunk_products(p: Program, window: int | jax.Array, chunk: jax.Array) -> jax.Array:
    slot = p.s.state.at[p.rows, p.columns(chunk)]
    terms = (slot,) if p.sizes.tf32 else split_bf16(load(slot, WG), 3)
    keys = p.s.kq.at[:, p.keys_and_queries(p.part), p.columns(p.sizes.window * window + chunk)]
    return accumulate(p, SQUARE, [(terms[i], keys.at[j].T) for i, j in p.sizes.state_pairs])
