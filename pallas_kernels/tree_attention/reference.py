"""What ``tree_attention`` computes, and what runs where the kernels do not.

The cache is read in place, and its scores are held as a whole.
"""

import jax
import jax.numpy as jnp
from jax import lax


def tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    length: jax.Array,
) -> jax.Array:
    """Outputs [B, N, Hq, D]; the arguments are those of the public function."""
    keys, values = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (keys, values))
    batch, nodes, heads, width = q.shape
    grouped = q.reshape(batch, nodes, k.shape[2], heads // k.shape[2], width)
    # A GPU would multiply float32 as tf32.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT

    def scores(against: jax.Array, allowed: jax.Array) -> jax.Array:
        product = jnp.einsum(
            "bngrd,bsgd->bgrns",
            grouped,
            against,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return jnp.where(allowed[:, None, None], product * width**-0.5, -jnp.inf)

    def weigh(weights: jax.Array, against: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bgrns,bsgd->bngrd",
            weights.astype(q.dtype),
            against,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    takes_part = mask.any(axis=2)  # [B, N]
    cached = jnp.arange(keys.shape[1], dtype=jnp.int32)[None] < length[:, None]
    past = scores(keys, cached[:, None] & takes_part[:, :, None])
    block = scores(k, mask)
    top = jnp.maximum(past.max(axis=-1), block.max(axis=-1))[..., None]
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    past, block = jnp.exp(past - top), jnp.exp(block - top)
    total = jnp.moveaxis(past.sum(axis=-1) + block.sum(axis=-1), -1, 1)[..., None]
    out = weigh(past, values) + weigh(block, v)
    out = jnp.where(total > 0, out / jnp.where(total > 0, total, 1.0), 0.0)
    return out.reshape(q.shape).astype(q.dtype)
