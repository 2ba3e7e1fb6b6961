"""The committed text of every sequence as token ids on the device: what lookups read."""

import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.shapes import Array, Int32, typed


class Committed(struct.PyTreeNode):
    """Committed tokens: tokens [B, S + 1], the last one a spare, and length [B]."""

    tokens: Array
    length: Array


def no_text(batch: int, max_length: int) -> Committed:
    tokens = jnp.full((batch, max_length + 1), -1, jnp.int32)
    return Committed(tokens=tokens, length=jnp.zeros(batch, jnp.int32))


def append(text: Committed, tokens: Array, counts: Array) -> Committed:
    """Append the first ``counts`` [B] of ``tokens`` [B, T] to each sequence."""
    spare = text.tokens.shape[1] - 1
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    rows = jnp.where(steps < counts[:, None], text.length[:, None] + steps, spare)
    batch = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    written = text.tokens.at[batch, rows].set(tokens.astype(jnp.int32))
    return Committed(tokens=written, length=text.length + counts.astype(jnp.int32))


@typed
def extend(
    tokens: Int32[Array, " W"], length: Int32[Array, ""], extra: Int32[Array, " E"]
) -> Int32[Array, " W+E"]:
    """The context ``tokens[:length]`` followed by ``extra``; what lies beyond is unspecified."""
    room = jnp.concatenate([tokens, jnp.full_like(extra, -1)])
    return lax.dynamic_update_slice(room, extra, (length,))
