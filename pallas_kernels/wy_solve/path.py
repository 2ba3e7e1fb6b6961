"""Committing the previous step's path into the state that a solve is about to read."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import COLS, ROWS, WG, along_columns, along_rows, load
from pallas_kernels.wy_solve.program import Program
from pallas_kernels.wy_solve.sizes import BLOCK, HALF


def stage_path(p: Program) -> None:
    """Start copying the previous path's factors into SMEM."""
    b, bar = p.b, p.s.path_loaded
    eight = pl.ds((p.h // BLOCK) * BLOCK, BLOCK)
    plgpu.copy_gmem_to_smem(p.inputs.path_k.at[b, :, p.key_head], p.s.path_k, bar)
    plgpu.copy_gmem_to_smem(p.inputs.path_u.at[b, :, p.h, p.channels], p.s.path_u, bar)
    plgpu.copy_gmem_to_smem(p.inputs.path_g.at[b, :, eight], p.s.path_g, bar)


def commit_path(p: Program) -> None:
    """Commit the previous path into this warpgroup's rows of the state, in SMEM and in GMEM.

    The arithmetic is that of ``wy_commit.tile.commit``.
    """
    plgpu.barrier_wait(p.s.path_loaded)
    decay = _weigh(p)

    def commit_chunk(chunk, carry):
        slot, columns = p.slot(chunk), p.columns(chunk)
        plgpu.barrier_wait(p.arrived(chunk))
        tile = load(slot, WG) * decay

        def add(back, tile):
            t = p.length - 1 - back
            u = load(p.s.path_u.at[t, _mine(p)], ROWS)
            k = load(p.s.path_k.at[t, columns], COLS).astype(jnp.float32)
            return tile + along_rows(u, tile.shape) * along_columns(k, tile.shape)

        slot[...] = lax.fori_loop(0, p.length, add, tile)
        plgpu.commit_smem()

        @pl.when((p.length > 0) & p.owns_state)
        def _():
            plgpu.copy_smem_to_gmem(slot, p.state(chunk))

        return carry

    lax.fori_loop(0, p.sizes.chunks, commit_chunk, 0)


def _weigh(p: Program) -> jax.Array:
    """Weigh this warpgroup's pseudo-values by the decays after them; the decay of the state."""
    head = p.h % BLOCK

    def weigh(back, after):
        t = p.length - 1 - back
        u = p.s.path_u.at[t, _mine(p)]
        u[...] = load(u, ROWS) * jnp.exp(after)
        return after + p.s.path_g[t, head]

    after = lax.fori_loop(0, p.length, weigh, jnp.float32(0))
    plgpu.commit_smem()
    return jnp.exp(after)


def _mine(p: Program) -> Any:
    return pl.ds(p.group * HALF, HALF)
