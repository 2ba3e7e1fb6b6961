"""Committing the previous step's path into the state that a solve is about to read."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import ROWS, WG, Ref, load, split_bf16
from pallas_kernels.wy_solve.program import Program, accumulate
from pallas_kernels.wy_solve.sizes import BLOCK, HALF, PAIRS, PATH_BLOCK

TILE = (HALF, PATH_BLOCK)


def stage_path(p: Program) -> None:
    """Start copying the log decays of the path before, and its last block of other factors."""
    gates = _layer(p, p.inputs.path_g).at[:, pl.ds((p.h // BLOCK) * BLOCK, BLOCK)]
    plgpu.copy_gmem_to_smem(gates, p.s.path_g, p.s.path_gates)
    _stage_block(p, _last_block(p))


def _stage_block(p: Program, block: int | jax.Array) -> None:
    rows = pl.ds(PATH_BLOCK * block, PATH_BLOCK)
    k, u = _layer(p, p.inputs.path_k), _layer(p, p.inputs.path_u)
    for term in range(p.sizes.path_terms):
        source, target = k.at[term, rows, p.key_head], p.s.path_k.at[term]
        plgpu.copy_gmem_to_smem(source, target, p.s.path_loaded)
    plgpu.copy_gmem_to_smem(u.at[rows, p.h, p.channels], p.s.path_u, p.s.path_loaded)


def _layer(p: Program, pool: Ref) -> Ref:
    """This sequence's part of a pool, whose layer axis is 1 where the layer was copied out."""
    return pool.at[p.layer if pool.shape[0] > 1 else 0, p.b]


def _last_block(p: Program) -> jax.Array:
    return jnp.maximum(p.length - 1, 0) // PATH_BLOCK


def drop_path(p: Program) -> None:
    """Wait for what ``stage_path`` started, where nothing is committed."""
    plgpu.barrier_wait(p.s.path_gates)
    plgpu.barrier_wait(p.s.path_loaded)


def commit_path(p: Program) -> None:
    """Commit the previous path into this warpgroup's rows of the state, in SMEM and, if the program
    ``writes``, in GMEM.

    R <- exp(G) R + sum over rows j of exp(G - G_j) u_j k_j^T, as in ``wy_commit.tile``, with the
    sums on the tensor cores: float32 u as three terms, a bfloat16 k as it is. Blocks of 16 rows
    come one after the other, the last first, so that a long path takes no more SMEM than a short.
    """
    plgpu.barrier_wait(p.s.path_gates)
    plgpu.barrier_wait(p.s.path_loaded)
    last = _last_block(p)
    after, terms = _weigh(p, last, jnp.float32(0))
    earlier = _sum_decays(p, PATH_BLOCK * last) if p.sizes.path > PATH_BLOCK else 0.0
    decay = jnp.exp(after + earlier)
    plgpu.barrier_wait(p.arrived)

    @pl.when(p.length > 0)
    def _():
        _add(p, terms, decay)
        if p.sizes.path > PATH_BLOCK:
            lax.fori_loop(0, last, functools.partial(_earlier_block, p), after)
        plgpu.commit_smem()

        @pl.when(p.owns_state & p.writes)
        def _():
            plgpu.copy_smem_to_gmem(p.s.state.at[p.rows], p.state(0))


def _earlier_block(p: Program, back: jax.Array, after: jax.Array) -> jax.Array:
    """Fetch the block before the one at hand, when nobody reads that any more, and commit it."""
    plgpu.barrier_arrive(p.s.path_free)
    plgpu.barrier_wait(p.s.path_free)
    block = _last_block(p) - 1 - back

    @pl.when(p.group == 0)
    def _():
        _stage_block(p, block)

    plgpu.barrier_wait(p.s.path_loaded)
    after, terms = _weigh(p, block, after)
    _add(p, terms, None)
    return after


def _sum_decays(p: Program, count: jax.Array) -> jax.Array:
    """The log decays of the first rows, added up from their end."""
    head = p.h % BLOCK

    def add(back, total):
        return total + p.s.path_g[count - 1 - back, head]

    return lax.fori_loop(0, count, add, jnp.float32(0))


def _weigh(
    p: Program, block: jax.Array, after: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Weigh the block's pseudo-values by the decays after them: the log decay from the block's
    first row on, and the terms of what was weighed.

    The exponents are added up from the end, because differences of large sums lose digits.
    """
    head, first = p.h % BLOCK, PATH_BLOCK * block
    count = jnp.clip(p.length - first, 0, PATH_BLOCK)

    def weigh(back, after):
        t = count - 1 - back
        u = p.s.path_u.at[t, p.rows]
        u[...] = load(u, ROWS) * jnp.exp(after)
        return after + p.s.path_g[first + t, head]

    after = lax.fori_loop(0, count, weigh, after)
    plgpu.commit_smem()
    return after, _terms(p, count)


def _terms(p: Program, count: jax.Array) -> tuple[jax.Array, ...]:
    """Weighed pseudo-values of the block [64 channels, 16], as bfloat16 terms; 0 past ``count``."""
    u = p.s.path_u.at[:, p.rows]
    u = plgpu.layout_cast(load(u.T, plgpu.Layout.WGMMA_TRANSPOSED), WG)
    row = plgpu.broadcasted_iota(jnp.int32, TILE, 1, layout=WG)
    return split_bf16(jnp.where(row < count, u, 0.0), 3)


def _add(p: Program, terms: tuple[jax.Array, ...], decay: jax.Array | None) -> None:
    """Decay this warpgroup's rows of the state, if asked to, and add what the block writes."""

    def add_chunk(chunk, carry):
        slot = p.s.state.at[p.rows, p.columns(chunk)]
        tile = load(slot, WG)
        slot[...] = (tile if decay is None else tile * decay) + _written(p, terms, chunk)
        return carry

    lax.fori_loop(0, p.sizes.chunks, add_chunk, 0)


def _written(p: Program, terms: tuple[jax.Array, ...], chunk) -> jax.Array:
    """What the block's rows write into a chunk of the state [64, 32]."""
    pairs = [pair for pair in PAIRS["ieee"] if pair[1] < p.sizes.path_terms]
    keys = p.s.path_k.at[:, :, p.columns(chunk)]
    factors = [(terms[i], keys.at[j]) for i, j in pairs]
    return accumulate(p, (HALF, p.sizes.chunk), factors)
