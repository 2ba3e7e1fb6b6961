"""Committing the previous step's path into the state that a solve is about to read."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import COLS, ROWS, load
from pallas_kernels.wy_commit.tile import commit
from pallas_kernels.wy_solve.program import Program
from pallas_kernels.wy_solve.sizes import BLOCK, HALF


def stage_path(p: Program) -> None:
    """Start copying the previous path's factors into SMEM."""
    b, bar = p.b, p.s.path_loaded
    eight = pl.ds((p.h // BLOCK) * BLOCK, BLOCK)
    plgpu.copy_gmem_to_smem(p.inputs.path_k.at[b, :, p.key_head], p.s.path_k, bar)
    plgpu.copy_gmem_to_smem(p.inputs.path_u.at[b, :, p.h, p.channels], p.s.path_u, bar)
    plgpu.copy_gmem_to_smem(p.inputs.path_g.at[b, :, eight], p.s.path_g, bar)


def commit_chunk(p: Program, tile: jax.Array, columns: Any) -> jax.Array:
    """Commit the previous path into 64 rows and some columns of the state, and write them back."""
    length, head = p.inputs.path_length[p.b], p.h % BLOCK
    rows = pl.ds(p.group * HALF, HALF)
    tile = commit(
        tile,
        length,
        log_decay=lambda t: p.s.path_g[t, head],
        u=lambda t: load(p.s.path_u.at[t, rows], ROWS),
        k=lambda t: load(p.s.path_k.at[t, columns], COLS).astype(jnp.float32),
    )

    @pl.when((length > 0) & p.owns_state)
    def _():
        p.state.at[:, columns][...] = tile

    return tile
