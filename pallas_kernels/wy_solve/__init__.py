"""Verify a whole tree at once: the gated delta rule as an ancestor-masked triangular solve.

    (I + L) U = diag(beta) (V - diag(exp G) K R0^T)
    L_ij = beta_i exp(G_i - G_j) (k_i . k_j)   for j a strict ancestor of i
    o_i = exp(G_i) R0 q_i + sum over ancestors-or-self j of exp(G_i - G_j) (k_j . q_i) u_j

G sums the log decays from the root (TreeWY; design section 3). One launch a layer, which reads R0
once. ``wy_commit_solve`` also commits the previous step's path into the state that it reads.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import resolve
from pallas_kernels.update import MAX_DIM, operand_problem
from pallas_kernels.wy_commit.reference import commit
from pallas_kernels.wy_solve import reference
from pallas_kernels.wy_solve.launch import PathFactors, sizes_of, solve_padded
from pallas_kernels.wy_solve.sizes import (
    CHANNELS,
    COPY_LIMIT,
    PRECISIONS,
    SMEM_LIMIT,
    Sizes,
    smem_bytes,
)

__all__ = ["PathFactors", "commit_solve_problem", "wy_commit_solve", "wy_solve"]


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
        multiple of 8, dk 16 or a multiple of 32, dv of 128 and ``order`` None;
        through a copy otherwise.
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
    write: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Commit ``previous`` into the layer's states, then ``wy_solve`` from there: (out, U, R).

    The state is read once and written once, in place if R is donated; where ``write`` [B] bool is
    False it is committed on the chip only and R stays as it is, so that the next step must be given
    the same factors again. A previous path of length 0 leaves its state's bytes as they are.
    """
    operands = (q, k, v, g, beta, ancestors, size)
    return _solve(R, layer, previous, operands, order, None, precision, implementation, write)


def commit_solve_problem(
    R: jax.Array, previous: PathFactors, operands: tuple[jax.Array, ...], precision: str
) -> str | None:
    """Why one kernel cannot both commit and solve, or None if it can; two kernels may.

    operands: q, k, v and what follows them in ``wy_commit_solve``; shapes and dtypes are read.
    """
    return _unsupported(sizes_of(operands, previous, precision), R, operands, previous)


def _solve(
    R: jax.Array,
    layer: jax.Array,
    previous: PathFactors | None,
    operands: tuple[jax.Array, ...],
    order: jax.Array | None,
    U: jax.Array | None,
    precision: str,
    implementation: str,
    write: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ValueError(f"precision {precision!r} is unknown, expected one of: {known}")
    rows = operands[0].shape[1]
    if order is not None:
        operands = _reordered(operands, order)
    sizes = sizes_of(operands, previous, precision)
    chosen = resolve(implementation, _unsupported(sizes, R, operands, previous))
    if chosen == "xla":
        out, u, R = _reference(R, layer, previous, operands, write, precision)
    elif U is not None and order is None and _fits(sizes, R, U):
        return solve_padded(sizes, R, layer, previous, operands, U, None, chosen)
    else:
        out, u, R = solve_padded(sizes, R, layer, previous, operands, None, write, chosen)
    out, u = out[:, :rows], u[:, :rows]
    if order is not None:
        back = jnp.argsort(order, axis=1)
        out, u = _take(out, back), _take(u, back)
    return out, u if U is None else U.at[layer].set(u), R


def _fits(sizes: Sizes, R: jax.Array, U: jax.Array) -> bool:
    """Whether the kernel can write into U, because nothing is padded."""
    padded = U.shape[2], *R.shape[3:]
    return padded == (sizes.rows, sizes.value_dim, sizes.key_dim) and U.shape[4] % CHANNELS == 0


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
    write: jax.Array | None,
    precision: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    R0 = kept = jnp.take(R, layer, axis=0)
    if previous is not None:
        k, u, g = (jnp.take(x, layer, axis=0) for x in (previous.k, previous.u, previous.g))
        R0 = jax.vmap(commit)(R0, k, u, g, previous.length)
        written = R0 if write is None else jnp.where(write[:, None, None, None], R0, kept)
        R = R.at[layer].set(written)
    solve = jax.vmap(lambda R0, *operands: reference.solve(R0, *operands, precision=precision))
    out, u = solve(R0, *operands)
    return out, u, R


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
    if sizes.path > COPY_LIMIT:
        return f"the kernel commits paths of at most {COPY_LIMIT} rows, not {sizes.path}"
    needed = smem_bytes(sizes)
    if needed > SMEM_LIMIT:
        return (
            f"a tree of {sizes.rows} rows after a path of {sizes.path} with {sizes.dtype} keys of "
            f"width {sizes.key_dim} needs {needed} bytes of shared memory, {SMEM_LIMIT} are there"
        )
    return None
