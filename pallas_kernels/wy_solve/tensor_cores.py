"""The matrix products of the WY solve: keys with keys and queries, and the state with both.

Tensor cores multiply bfloat16 (or tf32). A float32 factor goes as a sum of bfloat16 terms whose
products are exact in the float32 accumulator, so "ieee" loses nothing but what lies below 2**-24.
Tiles are in the ``WG`` layout.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import COLS, WG, Ref, along_columns, along_rows, load, split_bf16
from pallas_kernels.wy_solve.path import commit_chunk
from pallas_kernels.wy_solve.program import Program
from pallas_kernels.wy_solve.sizes import EARLY, HALF, SEGMENT

WIDE = (2 * SEGMENT, SEGMENT)
SQUARE = (HALF, 2 * SEGMENT)


def convert(p: Program, to: Ref) -> None:
    """Write the raw keys and queries [64, dk] to ``to`` [terms, 64, dk] as wgmma needs them."""
    raw = load(p.s.raw, WG)
    if p.sizes.tf32:
        to.at[0][...] = raw.astype(jnp.float32)
    else:
        for i, term in enumerate(split_bf16(raw, p.sizes.terms)):
            to.at[i][...] = term


def couplings(p: Program, keys: Ref, seen: jax.Array, G_keys: jax.Array) -> jax.Array:
    """[64, 32]: how the pseudo-values of keys (rows 0..31) enter this segment's rows (columns).

    For group 0 that is -L, for group 1 the weights in the outputs.

    Args:
      keys: [terms, 64, dk] whose first 32 rows are keys, of this segment or of an earlier one.
      seen: [64, 32] bool, whose pseudo-value enters which row.
      G_keys: [64] cumulative log decays of the keys.
    """
    pairs = p.sizes.key_pairs or ((0, 0),)
    rows = pl.ds(SEGMENT * p.group, SEGMENT)  # keys of this segment for L, queries for outputs
    if p.interpreted:
        gram = sum(_dot(keys[i], p.s.kq[j, rows]) for i, j in pairs)
    else:

        def scoped(acc):
            for i, j in pairs:
                plgpu.wgmma(acc, keys.at[i], p.s.kq.at[j, rows].T)
            return acc[...]

        gram = lax.optimization_barrier(pl.run_scoped(scoped, accumulator(WIDE)))
    own = pl.ds(0, SEGMENT)
    G, beta = (load(p.s.lines.at[p.group, line, own], COLS) for line in (0, 1))
    # The difference is masked before exp: exp of a positive difference overflows.
    difference = along_columns(G, WIDE) - along_rows(G_keys, WIDE)
    decay = jnp.exp(jnp.where(seen, difference, 0.0))
    solves = jnp.where(p.group == 0, 1.0, 0.0)
    scale = 1.0 - solves - solves * beta  # -beta or 1, exactly: vectors cannot select by a scalar
    return jnp.where(seen, gram * decay * along_columns(scale, WIDE), 0.0)


def early_chunks(p: Program) -> list[jax.Array]:
    """The first columns of the state, on their way while other operands are prepared."""
    return [load(p.state.at[:, pl.ds(*chunk)], WG) for chunk in p.sizes.chunks[:EARLY]]


def products(p: Program, early: list[jax.Array], commits: bool) -> jax.Array:
    """[64, 64]: R0 k_i times -beta_i exp(G_i), then R0 q_i times exp(G_i).

    R0 is read once; with ``commits`` the previous path is first committed into it.
    """
    sizes = p.sizes

    def chunk(c: int) -> jax.Array:
        columns = pl.ds(*sizes.chunks[c])
        tile = early[c] if c < len(early) else load(p.state.at[:, columns], WG)
        return commit_chunk(p, tile, columns) if commits else tile

    if p.interpreted:
        total = jnp.zeros(SQUARE, jnp.float32)
        for c, (start, width) in enumerate(sizes.chunks):
            terms = [chunk(c)] if sizes.tf32 else split_bf16(chunk(c), 3)
            for i, j in sizes.state_pairs or ((0, 0),):
                total += _dot(terms[i], p.s.kq[j, :, start : start + width])
    else:

        def scoped(acc):
            for c, (start, width) in enumerate(sizes.chunks):
                columns = pl.ds(start, width)
                if sizes.tf32:
                    mine = p.s.state.at[p.group, :, columns]
                    mine[...] = chunk(c)
                    plgpu.commit_smem()
                    plgpu.wgmma(acc, mine, p.s.kq.at[0, :, columns].T)
                else:
                    terms = split_bf16(chunk(c), 3)
                    for i, j in sizes.state_pairs:
                        plgpu.wgmma(acc, terms[i], p.s.kq.at[j, :, columns].T)
                plgpu.wgmma_wait(0)
            return acc[...]

        total = lax.optimization_barrier(pl.run_scoped(scoped, accumulator(SQUARE)))
    G, beta = (load(p.s.lines.at[p.group, line], COLS) for line in (0, 1))
    is_key = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=WG) < SEGMENT
    factor = along_columns(jnp.exp(G), SQUARE)
    return total * jnp.where(is_key, -along_columns(beta, SQUARE) * factor, factor)


def accumulator(shape: tuple[int, int]) -> plgpu.WGMMAAccumulatorRef:
    return plgpu.WGMMAAccumulatorRef(shape, jnp.float32)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y^T in float32: what a wgmma of these terms accumulates."""
    return jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32).T, precision="highest")
