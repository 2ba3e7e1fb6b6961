"""``tree_attention``: the rows of a tree attend to the cached prefix and to their ancestors.

The context is split over the GPU and read once for all rows and query heads of a key head; scores
stay on the chip, and the parts are merged by their maxima and sums (flash decoding). Only the
tree's own block takes a mask. A plain token is a tree of one row, a draft a chain.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import resolve
from pallas_kernels.tree_attention import mosaic_gpu, reference
from pallas_kernels.tree_attention.sizes import ALIGNMENT, MOST_NODES, TILE

__all__ = ["attention_problem", "tree_attention"]

WIDTHS = (64, 128, 256)
MOST_GROUP = 8


def tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array | int,
    length: jax.Array,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """Outputs [B, N, Hq, D] in the dtype of q.

    Row i of sequence b attends to cached rows 0 .. length[b] - 1 of ``keys[layer, b]`` and to the
    rows j of its own block with mask[b, i, j], all in one softmax of q . k / sqrt(D). Query head h
    uses key head h // (Hq / Hkv). Softmax, sums and accumulation are float32; weights are rounded
    to the dtype of q before they meet the values.

    A row whose line of ``mask`` is all False takes no part: its output is 0, or, in a sequence
    where other rows take part and length is not 0, an unspecified finite value. A sequence without
    rows that take part costs nothing. Cached tiles past ``length`` cost nothing.

    Args:
      q: [B, N, Hq, D]. k, v: [B, N, Hkv, D], finite in every row: hidden ones are multiplied by 0.
      mask: [B, N, N] bool; for a tree, row i marks itself and its ancestors.
      keys, values: [La, B, S, Hkv, D] caches of every attention layer in the order of the text,
        whole: the kernel reads ``layer`` where it lies. Rows past the length may hold anything
        finite, other layers and sequences anything.
      layer: which of the La layers; may be traced. length: [B] int32, at most S.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".

    The kernel takes bfloat16 only: its products have no float32 form on a Hopper GPU but tf32.

    Raises:
      ValueError: shapes that do not fit together, or a kernel that cannot run was asked for.
    """
    _check(q, k, v, mask, keys, values, length)
    chosen = resolve(implementation, attention_problem(q, keys))
    layer = jnp.asarray(layer, jnp.int32)
    return _run(q, k, v, mask, keys, values, layer, length, chosen=chosen)


@functools.partial(jax.jit, static_argnames="chosen")
def _run(*arrays: jax.Array, chosen: str) -> jax.Array:
    """Jitted, so that the layers of a model share one trace and one lowering."""
    if chosen == "xla":
        return reference.tree_attention(*arrays)
    return mosaic_gpu.tree_attention(*arrays, chosen=chosen)


def attention_problem(q: Any, keys: Any) -> str | None:
    """Why the kernel cannot take queries and caches of these shapes and dtypes, or None."""
    _, nodes, heads, width = q.shape
    layers, batch, rows, key_heads, _ = keys.shape
    if q.dtype != jnp.bfloat16:
        return f"tree attention takes bfloat16, got {q.dtype.name}"
    if width not in WIDTHS:
        return f"tree attention takes heads of width 64, 128 or 256, got {width}"
    if heads > MOST_GROUP * key_heads:
        return (
            f"tree attention takes at most {MOST_GROUP} query heads a key head, "
            f"got {heads // key_heads}"
        )
    if nodes > MOST_NODES:
        return f"tree attention takes at most {MOST_NODES} rows, got {nodes}"
    if layers * batch * rows % ALIGNMENT or layers * batch * rows < TILE:
        return (
            f"tree attention takes caches whose layers x batch x rows are a multiple of "
            f"{ALIGNMENT} and at least {TILE}, got {layers} x {batch} x {rows}"
        )
    return None


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
) -> None:
    batch, nodes, heads, width = q.shape
    key_heads = k.shape[2]
    if heads % key_heads:
        raise ValueError(f"{heads} query heads do not divide among {key_heads} key heads")
    cache = (*keys.shape[:1], batch, *keys.shape[2:3], key_heads, width)
    expected: dict[str, tuple[jax.Array, tuple[int, ...]]] = {
        "k": (k, (batch, nodes, key_heads, width)),
        "v": (v, (batch, nodes, key_heads, width)),
        "mask": (mask, (batch, nodes, nodes)),
        "keys": (keys, cache),
        "values": (values, cache),
        "length": (length, (batch,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    for name, array in (("k", k), ("v", v), ("keys", keys), ("values", values)):
        if array.dtype != q.dtype:
            raise ValueError(f"{name} is {array.dtype} and q is {q.dtype}, expected one")
