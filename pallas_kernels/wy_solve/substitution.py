"""Forward substitution and the outputs behind it, one value channel a thread.

Nothing crosses threads: a row of (I + L) is a line of SMEM that all threads read at once, and a
block of eight unknowns of a channel is one row of a register tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import Ref, along_columns, along_rows, load
from pallas_kernels.wy_solve.program import Program, pick
from pallas_kernels.wy_solve.sizes import BLOCK, CHANNELS, SEGMENT

CHANNEL_TILE = plgpu.Layout.TCGEN05_TMEM_NATIVE(4)
PER_CHANNEL = CHANNEL_TILE.reduce(1)
PER_ROW = CHANNEL_TILE.reduce(0)
TILE = (CHANNELS, BLOCK)


def run_pass(p: Program, start: jax.Array) -> None:
    """Pseudo-values by group 0, and outputs by group 1 as soon as a block is solved.

    Pseudo-values go to SMEM for the outputs and to GMEM for the commit. All groups take in earlier
    blocks by the same code: stating it once halves the time to compile. In a wide program group 3
    reads every second block, and group 2 takes in for group 0 all blocks but the last one before.
    """
    blocks, wide = _blocks(p, start), p.sizes.wide
    reads = p.half == 1
    first, step, turns, behind = 0, 1, blocks, 0
    if wide:
        first, step = jnp.where(reads, p.group // 2, 0), jnp.where(reads, 2, 1)
        turns = jnp.where(reads, (blocks - first + 1) // 2, blocks)
        behind = jnp.where(p.group == 2, 1, 0)

    def run_block(n, carry):
        block = first + step * n
        if wide:
            _wait_in_turn(p, block)
        if p.sizes.span > 1:
            _wait_for_couplings(p, block)
        X = load(_columns(p, block), CHANNEL_TILE)
        done = jnp.where(p.group == 0, jnp.maximum(block - 1, 0), 0) if wide else 0
        X = lax.fori_loop(done, block - behind, functools.partial(_add_block, p, block), X)
        pl.when(p.group == 0)(lambda: _solve_block(p, start, block, X))
        pl.when(reads)(lambda: _read_block(p, start, block, X))
        if wide:
            pl.when((p.group == 2) & (block > 1))(lambda: _hand_over(p, block, X))
        return carry

    lax.fori_loop(0, turns, run_block, 0)


def _wait_in_turn(p: Program, block: jax.Array) -> None:
    """Wait for what a warpgroup of a wide program takes in, and nobody twice for the same."""
    solved = p.s.solved
    ready = p.s.helped.at[block]
    pl.when((p.group == 0) & (block > 1))(lambda: plgpu.barrier_wait(ready))
    before = solved.at[jnp.maximum(block - 1, 0)]
    pl.when((p.half == 1) & (block > 0))(lambda: plgpu.barrier_wait(before))
    second = solved.at[jnp.maximum(block - 2, 0)]
    pl.when((p.group == 2) & (block > 1))(lambda: plgpu.barrier_wait(second))


def _wait_for_couplings(p: Program, block: jax.Array) -> None:
    """Wait once, before the first block of the second segment that this warpgroup takes in."""
    second = SEGMENT // BLOCK
    first = jnp.where(p.group == 3, second + 1, second)
    pl.when(block == first)(lambda: plgpu.barrier_wait(p.s.coupled))


def _hand_over(p: Program, block: jax.Array, X: jax.Array) -> None:
    _columns(p, block)[...] = X
    plgpu.barrier_arrive(p.s.helped.at[block])


def _solve_block(p: Program, start: jax.Array, block: jax.Array, X: jax.Array) -> None:
    rows = [BLOCK * block + column for column in range(BLOCK)]
    # All loads come before the first store, which they would have to wait for.
    values = [load(p.s.v.at[i], PER_CHANNEL).astype(jnp.float32) for i in rows]
    segment = block // (SEGMENT // BLOCK) if p.sizes.span > 1 else 0
    betas = [p.s.lines[0, segment, 1, i - SEGMENT * segment] for i in rows]
    written = [minus_beta * v for minus_beta, v in zip(betas, values, strict=True)]
    lines = [_line(p, i, block) for i in rows]
    solved = []
    for column, i in enumerate(rows):
        u = pick(X, column, CHANNEL_TILE) - written[column]
        # An inactive row may hold anything; zero times NaN would reach the active ones.
        u = _if_active(p, start + i, u)
        X = X + _outer(u, lines[column])
        solved.append(u)
    for i, u in zip(rows, solved, strict=True):
        p.s.u.at[i][...] = u
    plgpu.barrier_arrive(p.s.solved.at[block])
    rows = _rows(p, p.u, start, block)
    for column, u in enumerate(solved):
        rows.at[column][...] = u


def _read_block(p: Program, start: jax.Array, block: jax.Array, X: jax.Array) -> None:
    plgpu.barrier_wait(p.s.solved.at[block])
    X = _add_block(p, block, block, X)
    rows = _rows(p, p.out, start, block)
    for column in range(BLOCK):
        i = start + BLOCK * block + column
        rows.at[column][...] = _if_active(p, i, pick(X, column, CHANNEL_TILE))


def _rows(p: Program, to: Ref, start: jax.Array, block: jax.Array) -> Ref:
    """The rows of a block in GMEM: eight rows at fixed distances need one address."""
    return to.at[p.b, pl.ds(start + BLOCK * block, BLOCK), p.h, p.channels]


def _if_active(p: Program, row: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(lax.broadcast(row < p.count, x.shape), x, jnp.zeros_like(x))


def add_earlier_segment(p: Program, start: jax.Array, segment: jax.Array) -> None:
    """What rows of an earlier segment contribute to the active blocks of the one at ``start``.

    The pseudo-values are read back from GMEM, where this program wrote them.
    """

    def update_block(block, carry):
        def add(c, X):
            for column in range(BLOCK):
                i = BLOCK * c + column
                row = p.u.at[p.b, SEGMENT * segment + i, p.h, p.channels]
                X = X + _outer(load(row, PER_CHANNEL), _line(p, i, block))
            return X

        X = load(_columns(p, block), CHANNEL_TILE)
        _columns(p, block)[...] = lax.fori_loop(0, SEGMENT // BLOCK, add, X)
        return carry

    lax.fori_loop(0, _blocks(p, start), update_block, 0)


def clear_rows(p: Program) -> None:
    """Outputs of blocks without active rows are 0."""
    zeros = plgpu.layout_cast(jnp.zeros((CHANNELS,), jnp.float32), PER_CHANNEL)

    def clear(i, carry):
        p.out.at[p.b, i, p.h, p.channels][...] = zeros
        return carry

    lax.fori_loop((p.count + BLOCK - 1) // BLOCK * BLOCK, p.sizes.rows, clear, 0)


def _blocks(p: Program, start: jax.Array) -> jax.Array:
    """Blocks of this segment that hold active rows."""
    active = jnp.minimum(p.count - start, p.sizes.pass_rows)
    return (active + BLOCK - 1) // BLOCK


def _columns(p: Program, block: jax.Array) -> Ref:
    """Eight columns of this group's half of ``products``: right sides, or outputs of R0 alone."""
    return p.s.products.at[:, _place(p, block)]


def _line(p: Program, row: jax.Array, block: jax.Array) -> jax.Array:
    """How row ``row``'s pseudo-value enters the eight columns of a block."""
    return load(p.s.coupling.at[row, _place(p, block)], PER_ROW)


def _place(p: Program, block: jax.Array) -> Any:
    """The columns of a block among equations and outputs: 32 and 32 for each segment of a pass."""
    if p.sizes.span > 1:
        within = SEGMENT // BLOCK
        block = block + block // within * within
    return pl.ds(SEGMENT * p.half + BLOCK * block, BLOCK)


def _outer(u: jax.Array, line: jax.Array) -> jax.Array:
    return along_rows(u, TILE) * along_columns(line, TILE)


def _add_block(p: Program, target: jax.Array, block: jax.Array, X: jax.Array) -> jax.Array:
    """X, the columns of block ``target``, with what a solved block contributes to them."""
    for column in range(BLOCK):
        i = BLOCK * block + column
        X = X + _outer(load(p.s.u.at[i], PER_CHANNEL), _line(p, i, target))
    return X
