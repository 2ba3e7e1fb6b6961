"""The gated delta rule: the single-token update and the chunked form for prompts.

``update`` is *the* native update. Decoding, replay and the path scan all call it, and it stands
between optimisation barriers: whatever surrounds it, the compiler sees the same arithmetic, which
is what makes a replayed state equal a decoded one bit for bit.
"""

import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.shapes import Array, Float32, typed

HIGHEST = lax.Precision.HIGHEST
CHUNK = 64


class Operands(struct.PyTreeNode):
    """What the rule reads at each row, all float32; recorded once and replayed as recorded.

    Attributes:
      q: [T, Hk, dk] L2-normalised, then scaled by dk ** -0.5.
      k: [T, Hk, dk] L2-normalised.
      v: [T, Hv, dv].
      g: [T, Hv] log decay, <= 0, that of the rounded alpha.
      alpha: [T, Hv] exp(g).
      beta: [T, Hv] write strength.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    alpha: Array
    beta: Array


def value_heads(keys: Array, values: int, axis: int = -2) -> Array:
    """Repeat each key head for its value heads: value head h belongs to key head h // ratio."""
    ratio = values // keys.shape[axis]
    return keys if ratio == 1 else jnp.repeat(keys, ratio, axis=axis)


@typed
def update(
    R: Float32[Array, "Hv dv dk"],
    k: Float32[Array, "Hv dk"],
    v: Float32[Array, "Hv dv"],
    alpha: Float32[Array, " Hv"],
    beta: Float32[Array, " Hv"],
) -> Float32[Array, "Hv dv dk"]:
    """One token: decay, prediction error, write (design section 3)."""
    R, k, v, alpha, beta = lax.optimization_barrier((R, k, v, alpha, beta))
    decayed = alpha[:, None, None] * R
    predicted = jnp.sum(decayed * k[:, None, :], axis=-1)
    u = beta[:, None] * (v - predicted)
    return lax.optimization_barrier(decayed + u[:, :, None] * k[:, None, :])


@typed
def read(R: Float32[Array, "Hv dv dk"], q: Float32[Array, "Hv dk"]) -> Float32[Array, "Hv dv"]:
    """The output of a state: R q, after the write."""
    return jnp.sum(R * q[:, None, :], axis=-1)


@typed
def chunked(
    R: Float32[Array, "Hv dv dk"], operands: Operands
) -> tuple[Float32[Array, "T Hv dv"], Float32[Array, "Hv dv dk"]]:
    """A whole block of tokens by chunks of 64: outputs and the state after the last row.

    Rows with beta = 0 and g = 0 leave the state unchanged, so padding is masked that way.
    Inside a chunk the strictly lower system is solved at once; differences of cumulative decays
    are masked before exp, because their upper half would overflow.
    """
    rows = operands.v.shape[0]
    heads = operands.v.shape[1]
    pad = -rows % CHUNK
    count = (rows + pad) // CHUNK

    def split(x: Array) -> Array:  # [T, Hv, ...] -> [n, Hv, C, ...]
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(count, CHUNK, *x.shape[1:]), 1, 2)

    q = split(value_heads(operands.q, heads))
    k = split(value_heads(operands.k, heads))
    v, g, beta = split(operands.v), split(operands.g), split(operands.beta)

    G = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    decay = jnp.exp(jnp.where(lower, G[..., :, None] - G[..., None, :], -jnp.inf))
    kk = jnp.einsum("nhik,nhjk->nhij", k, k, precision=HIGHEST)
    system = jnp.where(jnp.tril(lower, -1), beta[..., None] * kk * decay, 0.0)
    right = beta[..., None] * jnp.concatenate([v, jnp.exp(G)[..., None] * k], axis=-1)
    solved = lax.linalg.triangular_solve(
        system, right, left_side=True, lower=True, unit_diagonal=True
    )
    U, W = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    inner = jnp.einsum("nhik,nhjk->nhij", q, k, precision=HIGHEST) * decay
    outer_q = jnp.exp(G)[..., None] * q
    outer_k = jnp.exp(G[..., -1:] - G)[..., None] * k

    def step(R: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        U, W, inner, outer_q, outer_k, last = xs
        new = U - jnp.einsum("hik,hvk->hiv", W, R, precision=HIGHEST)
        out = jnp.einsum("hik,hvk->hiv", outer_q, R, precision=HIGHEST)
        out = out + jnp.einsum("hij,hjv->hiv", inner, new, precision=HIGHEST)
        R = jnp.exp(last)[:, None, None] * R
        return R + jnp.einsum("hiv,hik->hvk", new, outer_k, precision=HIGHEST), out

    R, out = lax.scan(step, R, (U, W, inner, outer_q, outer_k, G[..., -1]))
    return jnp.moveaxis(out, 2, 1).reshape(count * CHUNK, heads, -1)[:rows], R
