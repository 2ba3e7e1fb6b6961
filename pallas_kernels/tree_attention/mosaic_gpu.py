"""The launches of tree attention on Hopper: the splits, then their merge; and what they take."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.padding import pad_axis
from pallas_kernels.tiles import interpreter
from pallas_kernels.tree_attention.kernel import attend_splits
from pallas_kernels.tree_attention.merge import merge_parts
from pallas_kernels.tree_attention.sizes import TILE, WORD, Sizes, sizes_of


def tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    length: jax.Array,
    *,
    chosen: str,
) -> jax.Array:
    """Outputs [B, N, Hq, D]; ``chosen`` is "mosaic_gpu" or "interpret"."""
    nodes = q.shape[1]
    sizes = sizes_of(q, keys)
    q, k, v = (pad_axis(x, 1, sizes.nodes) for x in (q, k, v))
    mask = pad_axis(pad_axis(mask, 1, sizes.nodes), 2, sizes.nodes)
    flat = (sizes.cache_rows, sizes.key_heads, sizes.width)
    arrays = {
        "layer": layer.reshape(1),
        "length": length,
        "takes_part": mask.any(axis=(1, 2)).astype(jnp.int32),
        "seen": _seen_bits(sizes, mask),
        "q": _by_key_head(sizes, q),
        "k": k,
        "v": v,
        "keys": keys.reshape(flat),
        "values": values.reshape(flat),
    }
    how = interpreter(chosen)
    outputs, sums = attend_splits(sizes, arrays, how)
    merged = merge_parts(sizes, arrays, outputs, sums, how)
    return merged.reshape(q.shape)[:, :nodes]


def _by_key_head(sizes: Sizes, q: jax.Array) -> jax.Array:
    """[B, Hkv, rows, D]: the queries of a key head, node by node, padded to whole blocks."""
    rows = q.reshape(sizes.batch, sizes.nodes, sizes.key_heads, sizes.group, sizes.width)
    rows = jnp.moveaxis(rows, 2, 1)
    rows = rows.reshape(sizes.batch, sizes.key_heads, -1, sizes.width)
    return pad_axis(rows, 2, sizes.rows)


def _seen_bits(sizes: Sizes, mask: jax.Array) -> jax.Array:
    """[B, words, rows] int32: ``seen`` of ``attend_splits``."""
    wide = pad_axis(mask, 2, sizes.block_tiles * TILE)
    wide = wide.reshape(sizes.batch, sizes.nodes, sizes.words, WORD)
    bit = jnp.left_shift(jnp.uint32(1), lax.broadcasted_iota(jnp.uint32, wide.shape, 3))
    words = jnp.where(wide, bit, jnp.uint32(0)).sum(axis=3, dtype=jnp.uint32)
    words = jnp.repeat(lax.bitcast_convert_type(words, jnp.int32), sizes.group, axis=1)
    return pad_axis(jnp.moveaxis(words, 2, 1), 2, sizes.rows)
