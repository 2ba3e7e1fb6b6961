"""What a policy keeps between steps, altered in one layer and head.

Most policies keep the states R themselves; the deferred ones keep a checkpoint and the factors
since. Keys belong to key heads: where factors change, all value heads of one key head do.
"""

from typing import Any

import jax
import jax.numpy as jnp

from treejax.audit.faults.base import Hit, struck
from treejax.policies.ring import Checkpoint
from treejax.shapes import Array

DEFERRED = ("ring", "fused")
"""Policies whose carry is a ``Checkpoint``."""


def graft(right: Any, wrong: Any, hit: Hit) -> Any:
    """``right`` with the struck layer and head of ``wrong``; counts stay right.

    Raises:
      ValueError: a carry that is neither R nor a ``Checkpoint``.
    """
    if isinstance(right, Checkpoint):
        keys, values = right.ring.k.shape[3], right.R.shape[2]
        of_keys = struck(hit, right.R.shape[0], keys)
        of_values = jnp.repeat(of_keys, values // keys, axis=2)
        ring, other = right.ring, wrong.ring
        return right.replace(
            R=jnp.where(of_values[..., None, None], wrong.R, right.R),
            ring=ring.replace(
                u=jnp.where(of_values[:, :, None, :, None], other.u, ring.u),
                k=jnp.where(of_keys[:, :, None, :, None], other.k, ring.k),
                g=jnp.where(of_values[:, :, None, :], other.g, ring.g),
            ),
        )
    R = matrices(right)
    return jnp.where(struck(hit, *R.shape[::2][:2])[..., None, None], wrong, R)


def matrices(carry: Any) -> Array:
    """The matrices [Lg, B, Hv, dv, dk] that a carry holds: R, or the checkpoint."""
    if isinstance(carry, Checkpoint):
        return carry.R
    if isinstance(carry, jax.Array) and carry.ndim == 5:
        return carry
    raise ValueError(
        f"faults of the recurrent state know carries R and Checkpoint, not {type(carry).__name__}"
    )


def with_matrices(carry: Any, R: Array) -> Any:
    """The carry with other matrices."""
    return carry.replace(R=R) if isinstance(carry, Checkpoint) else R


def decayed(carry: Any, log_decay: Array) -> Any:
    """The carry of states exp(log_decay) R; log_decay [Lg, B, Hv], 0 where nothing changes.

    A decay after the ring's newest row is one of that row's, and of what it wrote.
    """
    factor = jnp.exp(log_decay)
    if not isinstance(carry, Checkpoint):
        return matrices(carry) * factor[..., None, None]
    count, slots = carry.count[0], jnp.arange(carry.ring.g.shape[2])
    newest = (slots[None, :] == count[:, None] - 1)[None, :, :, None]  # [1, B, W, 1]
    added = jnp.where(newest, log_decay[:, :, None, :], 0.0)
    empty = (count == 0)[None, :, None, None, None]
    return carry.replace(
        R=jnp.where(empty, carry.R * factor[..., None, None], carry.R),
        ring=carry.ring.replace(u=carry.ring.u * jnp.exp(added)[..., None], g=carry.ring.g + added),
    )
