"""Committing the previous step's path into the state that a solve is about to read."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import COLS, ROWS, along_columns, along_rows, load
from pallas_kernels.wy_solve.program import Program
from pallas_kernels.wy_solve.sizes import BLOCK, HALF


def stage_path(p: Program) -> None:
    """Start copying the previous path's factors into SMEM."""
    b, bar = p.b, p.s.path_loaded
    eight = pl.ds((p.h // BLOCK) * BLOCK, BLOCK)
    plgpu.copy_gmem_to_smem(p.inputs.path_k.at[b, :, p.key_head], p.s.path_k, bar)
    plgpu.copy_gmem_to_smem(p.inputs.path_u.at[b, :, p.h, p.channels], p.s.path_u, bar)
    plgpu.copy_gmem_to_smem(p.inputs.path_g.at[b, :, eight], p.s.path_g, bar)


def weigh_path(p: Program) -> jax.Array:
    """Weigh this warpgroup's pseudo-values by the decays after them; the decay of the state.

    Once for all chunks, so that every chunk commits as ``wy_commit.tile.commit`` does.
    """
    plgpu.barrier_wait(p.s.path_loaded)
    length, head = p.inputs.path_length[p.b], p.h % BLOCK

    def weigh(back, after):
        t = length - 1 - back
        u = p.s.path_u.at[t, _mine(p)]
        u[...] = load(u, ROWS) * jnp.exp(after)
        return after + p.s.path_g[t, head]

    return jnp.exp(lax.fori_loop(0, length, weigh, jnp.float32(0)))


def commit_chunk(p: Program, tile: jax.Array, chunk: Any, decay: jax.Array) -> jax.Array:
    """Commit the previous path into 64 rows and some columns of the state, and write them back."""
    length, columns = p.inputs.path_length[p.b], p.columns(chunk)

    def write(back, tile):
        t = length - 1 - back
        u = load(p.s.path_u.at[t, _mine(p)], ROWS)
        k = load(p.s.path_k.at[t, columns], COLS).astype(jnp.float32)
        return tile + along_rows(u, tile.shape) * along_columns(k, tile.shape)

    tile = lax.fori_loop(0, length, write, tile * decay)

    @pl.when((length > 0) & p.owns_state)
    def _():
        p.state(chunk)[...] = tile

    return tile


def _mine(p: Program) -> Any:
    return pl.ds(p.group * HALF, HALF)
