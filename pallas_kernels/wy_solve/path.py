"""Committing the previous step's path into the state that a solve is about to read."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import ROWS, WG, load, split_bf16
from pallas_kernels.wy_solve.program import Program, accumulate
from pallas_kernels.wy_solve.sizes import BLOCK, HALF, PAIRS, PATH_BLOCK

TILE = (HALF, PATH_BLOCK)


def stage_path(p: Program) -> None:
    """Start copying the previous path's factors into SMEM."""
    bar, eight = p.s.path_loaded, pl.ds((p.h // BLOCK) * BLOCK, BLOCK)
    k, u, g = (
        x.at[p.layer if x.shape[0] > 1 else 0, p.b]
        for x in (p.inputs.path_k, p.inputs.path_u, p.inputs.path_g)
    )
    for term in range(p.sizes.path_terms):
        plgpu.copy_gmem_to_smem(k.at[term, :, p.key_head], p.s.path_k.at[term], bar)
    plgpu.copy_gmem_to_smem(u.at[:, p.h, p.channels], p.s.path_u, bar)
    plgpu.copy_gmem_to_smem(g.at[:, eight], p.s.path_g, bar)


def commit_path(p: Program) -> None:
    """Commit the previous path into this warpgroup's rows of the state, in SMEM and, if the program
    ``writes``, in GMEM.

    R <- exp(G) R + sum over rows j of exp(G - G_j) u_j k_j^T, as in ``wy_commit.tile``, with the
    sums on the tensor cores: float32 u as three terms, a bfloat16 k as it is.
    """
    plgpu.barrier_wait(p.s.path_loaded)
    decay = _weigh(p)
    one_block = p.sizes.path == PATH_BLOCK
    first = _terms(p, 0) if one_block else None
    plgpu.barrier_wait(p.arrived)

    def commit_chunk(chunk, carry):
        slot = p.s.state.at[p.rows, p.columns(chunk)]
        tile = load(slot, WG) * decay

        def add(block, tile):
            terms = _terms(p, block) if first is None else first
            return tile + _written(p, terms, block, chunk)

        blocks = (p.length + PATH_BLOCK - 1) // PATH_BLOCK
        slot[...] = add(0, tile) if one_block else lax.fori_loop(0, blocks, add, tile)
        return carry

    @pl.when(p.length > 0)
    def _():
        lax.fori_loop(0, p.sizes.chunks, commit_chunk, 0)
        plgpu.commit_smem()

        @pl.when(p.owns_state & p.writes)
        def _():
            plgpu.copy_smem_to_gmem(p.s.state.at[p.rows], p.state(0))


def _weigh(p: Program) -> jax.Array:
    """Weigh this warpgroup's pseudo-values by the decays after them; the decay of the state.

    The exponents are added up from the end, because differences of large sums lose digits.
    """
    head = p.h % BLOCK

    def weigh(back, after):
        t = p.length - 1 - back
        u = p.s.path_u.at[t, p.rows]
        u[...] = load(u, ROWS) * jnp.exp(after)
        return after + p.s.path_g[t, head]

    after = lax.fori_loop(0, p.length, weigh, jnp.float32(0))
    plgpu.commit_smem()
    return jnp.exp(after)


def _terms(p: Program, block: int | jax.Array) -> tuple[jax.Array, ...]:
    """Weighed pseudo-values of 16 rows [64 channels, 16], as bfloat16 terms; 0 past the path."""
    u = p.s.path_u.at[pl.ds(PATH_BLOCK * block, PATH_BLOCK), p.rows]
    u = plgpu.layout_cast(load(u.T, plgpu.Layout.WGMMA_TRANSPOSED), WG)
    row = plgpu.broadcasted_iota(jnp.int32, TILE, 1, layout=WG) + PATH_BLOCK * block
    return split_bf16(jnp.where(row < p.length, u, 0.0), 3)


def _written(p: Program, terms: tuple[jax.Array, ...], block, chunk) -> jax.Array:
    """What those rows write into a chunk of the state [64, 32]."""
    pairs = [pair for pair in PAIRS["ieee"] if pair[1] < p.sizes.path_terms]
    rows = pl.ds(PATH_BLOCK * block, PATH_BLOCK)
    keys = p.s.path_k.at[:, rows, p.columns(chunk)]
    factors = [(terms[i], keys.at[j]) for i, j in pairs]
    return accumulate(p, (HALF, p.sizes.chunk), factors)
