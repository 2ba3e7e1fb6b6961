"""How rows of a tree enter each other's equations: decays, couplings, and segments before.

A row's line of ``coupling`` says how its pseudo-value enters 32 equations (-L) and 32 outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import COLS, ROWS, WG, Ref, along_columns, along_rows, load, store
from pallas_kernels.wy_solve import substitution
from pallas_kernels.wy_solve.program import Program, accumulate, pick, together
from pallas_kernels.wy_solve.sizes import BLOCK, SEGMENT
from pallas_kernels.wy_solve.tensor_cores import convert

KEYS = SEGMENT // 2  # whose couplings a warpgroup forms
COUPLING = (2 * SEGMENT, KEYS)

Seen = tuple[tuple[jax.Array, ...], ...]
"""For each segment of a pass, and for it and each one before it: [64] bits of the rows it sees."""


def sum_decays(p: Program, segment: jax.Array, seen: Seen) -> None:
    """Write this warpgroup's ``lines``: log decays G, -beta (of the first 32 rows), exp G and g."""
    for part in range(p.sizes.span):
        _sum_decays(p, segment, part, seen[part])


def _sum_decays(p: Program, segment: jax.Array, part: int, seen: tuple[jax.Array, ...]) -> None:
    s, head = p.s, p.h % BLOCK
    line = s.lines.at[p.half, part]
    rows = pl.ds(SEGMENT * part, 2 * SEGMENT)
    g, beta = (pick(load(s.gates.at[which, rows], WG), head, WG) for which in (0, 1))
    line.at[1][...] = -beta
    line.at[3][...] = g
    plgpu.commit_smem()
    G = _decay_from(seen[part], line.at[3])
    for earlier in range(part):
        G = G + _decay_from(seen[earlier], s.lines.at[p.half, earlier, 3])
    if p.sizes.passes > 1:
        past = s.past.at[p.half]
        past.at[0, segment][...] = g

        def add(source, G):
            bits = load(p.inputs.seen.at[p.b, segment, source], ROWS)
            return G + _decay_from(bits, past.at[0, source])

        G = lax.fori_loop(0, segment, add, G)
        past.at[1, segment][...] = G
    line.at[0][...] = G
    line.at[2][...] = jnp.exp(G)
    plgpu.commit_smem()


def _decay_from(seen: jax.Array, g: Ref) -> jax.Array:
    """[64]: the log decays that rows take from those of the 32 that they see."""
    shape = (2 * SEGMENT, SEGMENT)
    decays = along_columns(load(g.at[pl.ds(0, SEGMENT)], COLS), shape)
    return jnp.sum(jnp.where(_sees(seen, shape, 0), decays, 0.0), axis=1)


def _sees(seen: jax.Array, shape: tuple[int, int], first: Any) -> jax.Array:
    """Bits of ``seen`` [64] from the first on, as bool [64, n]."""
    bit = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WG) + first
    return lax.shift_right_logical(along_rows(seen, shape), bit) & 1 != 0


def couple(p: Program, part: int, source: int, seen: jax.Array) -> None:
    """Write how pseudo-values of segment ``source`` of a pass enter the rows of segment ``part``.

    Each pseudo-value has a line of SMEM. Each warpgroup takes half of the keys; all must have
    arrived before a line is read.
    """
    enters = _sees(seen, COUPLING, KEYS * p.half)
    if part == source:
        # L is strictly lower; an output reads its own row's pseudo-value too.
        row = plgpu.broadcasted_iota(jnp.int32, COUPLING, 0, layout=WG)
        key = plgpu.broadcasted_iota(jnp.int32, COUPLING, 1, layout=WG) + KEYS * p.half
        enters = enters & (key != row)
    keys = p.s.kq.at[:, p.keys_and_queries(source)]
    _write_couplings(p, part, source, keys, enters, p.s.lines.at[p.half, source, 0])


def _write_couplings(
    p: Program, part: int, source: int, keys: Ref, enters: jax.Array, G_keys: Ref
) -> None:
    mine = pl.ds(KEYS * p.half, KEYS)
    tile = couplings(p, part, keys, enters, load(G_keys.at[mine], COLS))
    lines = pl.ds(SEGMENT * source + KEYS * p.half, KEYS)
    to = p.s.coupling.at[lines, p.keys_and_queries(part)]
    store(to.T, plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED))


def couplings(p: Program, part: int, keys: Ref, seen: jax.Array, G_keys: jax.Array) -> jax.Array:
    """[64, 16]: how the pseudo-values of this warpgroup's keys (columns) enter a segment's rows.

    The first 32 rows are -L, the others the weights in the outputs.

    Args:
      part: the segment, among those of the pass.
      keys: [terms, 64, dk] whose first 32 rows are keys, of this segment or of an earlier one.
      seen: [64, 16] bool, which row takes which pseudo-value.
      G_keys: [16] cumulative log decays of the keys.
    """
    mine = pl.ds(KEYS * p.half, KEYS)
    rows = p.s.kq.at[:, p.keys_and_queries(part)]
    parts = [
        [(rows.at[i, :, columns], keys.at[j, mine, columns].T) for i, j in p.sizes.key_pairs]
        for columns in map(p.columns, range(p.sizes.chunks))
    ]
    gram = accumulate(p, COUPLING, *parts)
    G, minus_beta = (load(p.s.lines.at[p.half, part, line], ROWS) for line in (0, 1))
    # The difference is masked before exp: exp of a positive difference overflows.
    difference = along_rows(G, COUPLING) - along_columns(G_keys, COUPLING)
    decay = jnp.exp(jnp.where(seen, difference, 0.0))
    solves = plgpu.broadcasted_iota(jnp.int32, COUPLING, 0, layout=WG) < SEGMENT
    scale = jnp.where(solves, along_rows(minus_beta, COUPLING), 1.0)
    return jnp.where(seen, gram * decay * scale, 0.0)


def add_earlier_segments(p: Program, segment: jax.Array) -> None:
    """Take the contributions of the rows of earlier segments into this segment's products."""

    def add(source, carry):
        @pl.when(p.group == 1)
        def _():
            rows = pl.ds(SEGMENT * source, SEGMENT)
            keys = p.s.raw if p.sizes.staged else p.s.earlier.at[0]
            fetch = p.inputs.k.at[p.b, rows, p.key_head], keys.at[pl.ds(0, SEGMENT)]
            plgpu.copy_gmem_to_smem(*fetch, p.s.fetched)
            plgpu.barrier_wait(p.s.fetched)

        together(p)
        if p.sizes.staged:
            convert(p, p.s.earlier)
            together(p)
        seen = load(p.inputs.seen.at[p.b, segment, source], ROWS)
        enters, G = _sees(seen, COUPLING, KEYS * p.half), p.s.past.at[p.half, 1, source]
        _write_couplings(p, 0, 0, p.s.earlier, enters, G)
        together(p)
        substitution.add_earlier_segment(p, SEGMENT * segment, source)
        together(p)
        return carry

    lax.fori_loop(0, segment, add, 0)
