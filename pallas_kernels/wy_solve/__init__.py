"""Verify a whole tree at once: the gated delta rule as an ancestor-masked triangular solve.

    (I + L) U = diag(beta) (V - diag(exp G) K R0^T)
    L_ij = beta_i exp(G_i - G_j) (k_i . k_j)   for j a strict ancestor of i
    o_i = exp(G_i) R0 q_i + sum over ancestors-or-self j of exp(G_i - G_j) (k_j . q_i) u_j

G sums the log decays from the root (TreeWY; design section 3). One launch a layer, which reads R0
once. ``wy_commit_solve`` also commits the previous step's path into the state that it reads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from pallas_kernels.implementation import resolve
from pallas_kernels.padding import pad_axis, round_up
from pallas_kernels.tiles import interpreter, split_bf16
from pallas_kernels.update import MAX_DIM, operand_problem
from pallas_kernels.wy_commit.reference import commit
from pallas_kernels.wy_solve import mosaic_gpu, reference
from pallas_kernels.wy_solve.sizes import (
    BLOCK,
    CHANNELS,
    CHUNK,
    HALF,
    MULTIPROCESSORS,
    PATH_BLOCK,
    PRECISIONS,
    SEGMENT,
    SMEM_LIMIT,
    Sizes,
    smem_bytes,
)


class PathFactors(struct.PyTreeNode):
    """Factors of an accepted path, in its order.

    Attributes:
      k: [B, P, Hk, dk] keys, finite also past the length: they are multiplied by 0.
      u: [B, P, Hv, dv] float32 pseudo-values. g: [B, P, Hv] log decays.
      length: [B] int32 rows that count; 0 commits nothing.

    P is padded to a multiple of 16, which costs copies where it is none.
    """

    k: jax.Array
    u: jax.Array
    g: jax.Array
    length: jax.Array


def wy_solve(
    R: jax.Array,
    layer: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    ancestors: jax.Array,
    size: jax.Array,
    *,
    precision: str = "ieee",
    order: jax.Array | None = None,
    U: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Outputs and pseudo-values of every row, both [B, N, Hv, dv] float32.

    Args:
      R: [L, B, Hv, dv, dk] float32, the pool of states; ``layer`` (int32 scalar) is read.
      q, k: [B, N, Hk, dk] normalised, q scaled too; v: [B, N, Hv, dv]; all three float32 or all
        three bfloat16. Value head h uses key head h // (Hv / Hk).
      g, beta: [B, N, Hv] float32 log decay and write strength.
      ancestors: [B, N, N] bool, row i marks i and its ancestors.
      size: [B] int32 active rows. Outputs of inactive rows are 0, whatever they hold; their
        pseudo-values are unspecified.
      precision: of the matrix products. "ieee" keeps the error of the sequential recurrence,
        "bf16x3" about 1e-5, "tf32" about 1e-3. The substitution is float32 in all of them.
      order: [B, N] int32 rows in a topological order; None if parents come before children.
      U: [L, B, N, Hv, dv] float32, pseudo-values of all layers, as ``wy_commit`` takes them. If
        given, it is returned with those of ``layer`` written into it: in place if donated, N is a
        multiple of 8 (of 32 above 32), dv of 128 and ``order`` None; through a copy otherwise.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".

    Raises:
      ValueError: unknown precision, or the kernel was asked for where it cannot run.
    """
    operands = (q, k, v, g, beta, ancestors, size)
    out, u, _ = _solve(R, layer, None, operands, order, U, precision, implementation)
    return out, u


def wy_commit_solve(
    R: jax.Array,
    layer: jax.Array,
    previous: PathFactors,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    ancestors: jax.Array,
    size: jax.Array,
    *,
    precision: str = "ieee",
    order: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Commit ``previous`` into the layer's states, then ``wy_solve`` from there: (out, U, R).

    The state is read once and written once, in place if R is donated. A previous path of length 0
    leaves its state's bytes as they are.
    """
    operands = (q, k, v, g, beta, ancestors, size)
    return _solve(R, layer, previous, operands, order, None, precision, implementation)


def _solve(
    R: jax.Array,
    layer: jax.Array,
    previous: PathFactors | None,
    operands: tuple[jax.Array, ...],
    order: jax.Array | None,
    U: jax.Array | None,
    precision: str,
    implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ValueError(f"precision {precision!r} is unknown, expected one of: {known}")
    rows = operands[0].shape[1]
    if order is not None:
        operands = _reordered(operands, order)
    sizes = _sizes(R, operands, previous, precision)
    chosen = resolve(implementation, _unsupported(sizes, R, operands, previous))
    if chosen == "xla":
        out, u, R = _reference(R, layer, previous, operands, precision)
    elif U is not None and order is None and _fits(sizes, U):
        return _kernel(sizes, R, layer, previous, operands, U, chosen)
    else:
        out, u, R = _kernel(sizes, R, layer, previous, operands, None, chosen)
    out, u = out[:, :rows], u[:, :rows]
    if order is not None:
        back = jnp.argsort(order, axis=1)
        out, u = _take(out, back), _take(u, back)
    return out, u if U is None else U.at[layer].set(u), R


def _fits(sizes: Sizes, U: jax.Array) -> bool:
    """Whether the kernel can write into U, because it pads nothing."""
    return U.shape[2] == sizes.rows and U.shape[4] % CHANNELS == 0


def _take(x: jax.Array, order: jax.Array) -> jax.Array:
    return jax.vmap(lambda rows, i: rows[i])(x, order)


def _reordered(operands: tuple[jax.Array, ...], order: jax.Array) -> tuple[jax.Array, ...]:
    *rows, ancestors, size = operands
    ancestors = jax.vmap(lambda seen, i: seen[i][:, i])(ancestors, order)
    return (*(_take(x, order) for x in rows), ancestors, size)


def _reference(
    R: jax.Array,
    layer: jax.Array,
    previous: PathFactors | None,
    operands: tuple[jax.Array, ...],
    precision: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    R0 = jnp.take(R, layer, axis=0)
    if previous is not None:
        R0 = jax.vmap(commit)(R0, previous.k, previous.u, previous.g, previous.length)
        R = R.at[layer].set(R0)
    solve = jax.vmap(lambda R0, *operands: reference.solve(R0, *operands, precision=precision))
    out, u = solve(R0, *operands)
    return out, u, R


def _sizes(
    R: jax.Array, operands: tuple[jax.Array, ...], previous: PathFactors | None, precision: str
) -> Sizes:
    _, k, v = operands[:3]
    batch, rows, heads, value_dim = v.shape
    programs = batch * heads * -(-value_dim // CHANNELS)
    return Sizes(
        batch=batch,
        rows=round_up(rows, BLOCK if rows <= SEGMENT else SEGMENT),
        key_heads=k.shape[2],
        value_heads=heads,
        key_dim=round_up(k.shape[3], 16 if k.shape[3] <= 16 else CHUNK),
        value_dim=round_up(value_dim, HALF),
        dtype=k.dtype,
        precision=precision,
        wide=programs <= MULTIPROCESSORS and rows <= SEGMENT,
        path=0 if previous is None else round_up(previous.k.shape[1], PATH_BLOCK),
    )


def _unsupported(
    sizes: Sizes, R: jax.Array, operands: tuple[jax.Array, ...], previous: PathFactors | None
) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    q, k, v = operands[:3]
    if sizes.value_heads % sizes.key_heads:
        return f"{sizes.value_heads} value heads do not divide among {sizes.key_heads} key heads"
    if max(R.shape[3:]) > MAX_DIM:
        return f"the kernel takes head widths to {MAX_DIM}, got {R.shape[4]} x {R.shape[3]}"
    problem = operand_problem(R, (q, k, v) if previous is None else (q, k, v, previous.k))
    if problem is not None:
        return problem
    needed = smem_bytes(sizes)
    if needed > SMEM_LIMIT:
        return (
            f"a tree of {sizes.rows} rows with {sizes.dtype} keys of width {sizes.key_dim} needs "
            f"{needed} bytes of shared memory, a program has {SMEM_LIMIT}"
        )
    return None


def _kernel(
    sizes: Sizes,
    R: jax.Array,
    layer: jax.Array,
    previous: PathFactors | None,
    operands: tuple[jax.Array, ...],
    U: jax.Array | None,
    chosen: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
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
            "path_k": _path_terms(sizes, previous),
            "path_u": pad_axis(pad_axis(previous.u, 3, channels), 1, sizes.path),
            "path_g": pad_axis(pad_axis(previous.g, 2, heads), 1, sizes.path),
            "path_length": previous.length,
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


def _path_terms(sizes: Sizes, previous: PathFactors) -> jax.Array:
    """Keys of the path as exact sums of bfloat16 terms: [B, terms, P, Hk, dk]."""
    k = pad_axis(pad_axis(previous.k, 3, sizes.key_dim), 1, sizes.path)
    if sizes.path_terms == 1:
        return k[:, None]
    past = lax.broadcasted_iota(jnp.int32, k.shape, 1) >= previous.length[:, None, None, None]
    return jnp.stack(split_bf16(jnp.where(past, 0.0, k), sizes.path_terms), axis=1)


def _seen_bits(sizes: Sizes, ancestors: jax.Array) -> jax.Array:
    """``seen`` of ``mosaic_gpu.solve``."""
    count, side = sizes.segments, sizes.segments * SEGMENT
    sees = pad_axis(pad_axis(ancestors, 1, side), 2, side)
    sees = sees.reshape(sizes.batch, count, SEGMENT, count, SEGMENT)
    bit = jnp.left_shift(jnp.uint32(1), lax.broadcasted_iota(jnp.uint32, sees.shape, 4))
    bits = jnp.where(sees, bit, 0).sum(axis=4, dtype=jnp.uint32)
    bits = jnp.moveaxis(lax.bitcast_convert_type(bits, jnp.int32), 3, 2)
    return jnp.concatenate([bits, bits], axis=3)
