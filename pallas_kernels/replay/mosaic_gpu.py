"""Replay for Hopper: ``publish`` with the native update, row by row."""

import jax

from pallas_kernels import publish
from pallas_kernels.update import advance, operand_problem


def unsupported(R: jax.Array, k: jax.Array, v: jax.Array, nodes: jax.Array) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    return publish.unsupported(k, v, 2, nodes) or operand_problem(R, (k, v))


def replay(
    R: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    nodes: jax.Array,
    length: jax.Array,
    *,
    chosen: str,
) -> jax.Array:
    """The new pool; ``chosen`` is "mosaic_gpu" or "interpret"."""
    return publish.publish(NATIVE, R, k, v, (alpha, beta), nodes, length, chosen=chosen)


def _step(R: jax.Array, t: jax.Array, rows: publish.Rows) -> jax.Array:
    return advance(R, rows.key(t), rows.value(t), rows.gate(0, t), rows.gate(1, t))


NATIVE = publish.Update("replay", _step, lambda R, length, rows: R)
