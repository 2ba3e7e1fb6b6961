"""How the WY solve is launched: the sizes of a call, its padded operands, the path's factors."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from pallas_kernels.padding import pad_axis, round_up
from pallas_kernels.tiles import interpreter, split_bf16
from pallas_kernels.wy_solve import mosaic_gpu
from pallas_kernels.wy_solve.sizes import (
    BLOCK,
    CHANNELS,
    CHUNK,
    HALF,
    MULTIPROCESSORS,
    PATH_BLOCK,
    SEGMENT,
    SMEM_LIMIT,
    WINDOW,
    Sizes,
    smem_bytes,
)


class PathFactors(struct.PyTreeNode):
    """Factors of accepted rows, in the order of their path, a pool with all layers.

    Attributes:
      k: [L, B, P, Hk, dk] keys, finite also past the length: they are multiplied by 0.
      u: [L, B, P, Hv, dv] float32 pseudo-values. g: [L, B, P, Hv] log decays.
      length: [B] int32 rows that count; 0 commits nothing.

    The kernel reads the pool where it lies if P is a multiple of 16, dv of 128, Hv of 8, and the
    keys are bfloat16 of a width that needs no padding; it copies the layer's part otherwise.
    """

    k: jax.Array
    u: jax.Array
    g: jax.Array
    length: jax.Array


def sizes_of(
    operands: tuple[jax.Array, ...], previous: PathFactors | None, precision: str
) -> Sizes:
    """The first form of program that fits in SMEM, best first; the smallest if none does."""
    _, k, v = operands[:3]
    batch, rows, heads, value_dim = v.shape
    programs = batch * heads * -(-value_dim // CHANNELS)
    wide = programs <= MULTIPROCESSORS and rows <= 2 * SEGMENT
    sizes = Sizes(
        batch=batch,
        rows=round_up(rows, BLOCK),
        key_heads=k.shape[2],
        value_heads=heads,
        key_dim=round_up(k.shape[3], 16 if k.shape[3] <= 16 else CHUNK),
        value_dim=round_up(value_dim, HALF),
        dtype=k.dtype,
        precision=precision,
        window=1,
        path=0 if previous is None else round_up(previous.k.shape[2], PATH_BLOCK),
    )
    windows = [n for n in range(WINDOW, 0, -1) if sizes.chunks % n == 0]
    if sizes.path:
        windows = [sizes.chunks]  # the path is committed into the whole state first
    for more, window in itertools.product((True, False) if wide else (False,), windows):
        if more and sizes.segments > 1 and window < sizes.chunks:
            continue  # two warpgroups read each window, and do not wait for each other
        sizes = dataclasses.replace(sizes, wide=more, window=window)
        if smem_bytes(sizes) <= SMEM_LIMIT:
            break
    return sizes


def solve_padded(
    sizes: Sizes,
    R: jax.Array,
    layer: jax.Array,
    previous: PathFactors | None,
    operands: tuple[jax.Array, ...],
    U: jax.Array | None,
    write: jax.Array | None,
    chosen: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs, pseudo-values (or U with them) and the pool, of padded rows; ``chosen`` is
    "mosaic_gpu" or "interpret". U may be given where nothing is padded."""
    q, k, v, g, beta, ancestors, size = operands
    value_dim, key_dim = R.shape[3:]
    channels = round_up(value_dim, CHANNELS)
    heads = round_up(sizes.value_heads, BLOCK)
    pool, index = R, layer
    if (sizes.value_dim, sizes.key_dim) != (value_dim, key_dim):
        pool, index = jnp.take(R, layer, axis=0)[None], jnp.int32(0)
        pool = pad_axis(pad_axis(pool, 3, sizes.value_dim), 4, sizes.key_dim)
    arrays = {
        "layer": index.astype(jnp.int32).reshape(1),
        "count": size,
        "seen": _seen_bits(sizes, ancestors),
        "q": pad_axis(pad_axis(q, 3, sizes.key_dim), 1, sizes.rows),
        "k": pad_axis(pad_axis(k, 3, sizes.key_dim), 1, sizes.rows),
        "v": pad_axis(pad_axis(v, 3, channels), 1, sizes.rows),
        "g": pad_axis(pad_axis(g, 2, heads), 1, sizes.rows),
        "beta": pad_axis(pad_axis(beta, 2, heads), 1, sizes.rows),
    }
    if previous is not None:
        arrays |= {
            "path_k": _path_terms(sizes, previous, layer),
            "path_u": _path_rows(previous.u, layer, (sizes.path, sizes.value_heads, channels)),
            "path_g": _path_rows(previous.g, layer, (sizes.path, heads)),
            "path_length": previous.length,
            "path_write": jnp.ones_like(size) if write is None else write.astype(jnp.int32),
        }
    out, u, pool = _call(sizes, arrays, pool, U, chosen)
    if pool.shape == R.shape:
        R = pool
    elif previous is not None:
        R = R.at[layer].set(pool[0, ..., :value_dim, :key_dim])
    return out[..., :value_dim], u[..., :value_dim], R


@functools.partial(jax.jit, static_argnames=("sizes", "chosen"))
def _call(
    sizes: Sizes, arrays: dict[str, jax.Array], pool: jax.Array, U: jax.Array | None, chosen: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One launch; jitted by itself so that many layers of a model compile it once."""
    state: Any = jax.new_ref(pool) if sizes.path else pool
    kept = None if U is None else jax.new_ref(U)
    out, u = mosaic_gpu.solve(sizes, arrays, state, kept, interpreter(chosen))
    if kept is not None:
        u = jax.freeze(kept)
    return out, u, jax.freeze(state) if sizes.path else pool


def _path_rows(x: jax.Array, layer: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The pool x [L, B, P, ...] if its rows have the padded shape, else the layer's padded rows
    [1, B, ...]."""
    if x.shape[2:] == shape:
        return x
    x = jnp.take(x, layer, axis=0)[None]
    for axis, size in enumerate(shape, 2):
        x = pad_axis(x, axis, size)
    return x


def _path_terms(sizes: Sizes, previous: PathFactors, layer: jax.Array) -> jax.Array:
    """Keys of the path as exact sums of bfloat16 terms: [L or 1, B, terms, P, Hk, dk]."""
    shape = sizes.path, sizes.key_heads, sizes.key_dim
    if sizes.path_terms == 1:
        return _path_rows(previous.k, layer, shape)[:, :, None]
    k = _path_rows(jnp.take(previous.k, layer, axis=0)[None], jnp.int32(0), shape)
    past = lax.broadcasted_iota(jnp.int32, k.shape, 2) >= previous.length[None, :, None, None, None]
    return jnp.stack(split_bf16(jnp.where(past, 0.0, k), sizes.path_terms), axis=2)


def _seen_bits(sizes: Sizes, ancestors: jax.Array) -> jax.Array:
    """``seen`` of ``mosaic_gpu.solve``."""
    count, side = sizes.segments, sizes.segments * SEGMENT
    sees = pad_axis(pad_axis(ancestors, 1, side), 2, side)
    sees = sees.reshape(sizes.batch, count, SEGMENT, count, SEGMENT)
    bit = jnp.left_shift(jnp.uint32(1), lax.broadcasted_iota(jnp.uint32, sees.shape, 4))
    bits = jnp.where(sees, bit, 0).sum(axis=4, dtype=jnp.uint32)
    bits = jnp.moveaxis(lax.bitcast_convert_type(bits, jnp.int32), 3, 2)
    return jnp.concatenate([bits, bits], axis=3)
