"""The gated delta rule over whole windows, fast forwards and backwards on a GPU.

The mathematics is ``treejax.delta_rule.chunked`` from an empty state (hybrid-model arithmetic:
chunks of 64, decay differences masked before exp). What differs is how it is computed, for speed
under differentiation:

* the unit lower triangular system is inverted by recursive blocks, ten small products, with a
  backward of its own (dL = -T^t dT T^t), instead of a solve;
* chunk n's whole effect on the state is one affine map S -> A S + B, so that the sequential scan
  is one product a chunk and everything else runs for all chunks at once;
* products take operands in the compute dtype and accumulate in float32; their cotangents are
  rounded to the compute dtype, or a float32 cotangent would drag each backward product to float32.

Invariant: with float32 operands it agrees with the token-by-token recurrence, gradients included,
to float32 rounding; decays, the inverse and the state are float32 whatever the operands are.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treejax.delta_rule import CHUNK, Operands
from treejax.layers import precision_of, trailing
from treejax.shapes import Array

_UNROLL = 8  # chunk steps a loop iteration: a GPU launches them without a host round trip


def contract(spec: str, x: Array, y: Array) -> Array:
    """``einsum`` accumulated in and returned as float32, whose cotangent takes x's dtype."""
    return _contract(spec, x, y)  # type: ignore[return-value]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(spec: str, x: Array, y: Array) -> Array:
    precision = precision_of(x.dtype)
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)


def _contract_forward(spec: str, x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return contract(spec, x, y), (x, y)


def _contract_backward(
    spec: str, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, y = saved
    plain = functools.partial(jnp.einsum, spec, precision=precision_of(x.dtype))
    return jax.vjp(plain, x, y)[1](cotangent.astype(x.dtype))


_contract.defvjp(_contract_forward, _contract_backward)


def _new_block(size: int, width: int) -> Array:
    """Mask of the lower left quarter of each diagonal block of 2 * width."""
    row, column = np.arange(size)[:, None], np.arange(size)[None]
    same = row // (2 * width) == column // (2 * width)
    return jnp.asarray(same & (row // width > column // width), jnp.float32)


def invert_unit_lower(L: Array, precision: lax.Precision) -> Array:
    """(I + L)^-1 for strictly lower triangular L [..., C, C], C a power of two.

    [[P, 0], [X, Q]]^-1 = [[P^-1, 0], [-Q^-1 X P^-1, Q^-1]], from blocks of one upwards: the
    error stays that of substitution (a Neumann product would lose everything beyond depth 8).
    """
    return _invert(L, precision)  # type: ignore[return-value]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _invert(L: Array, precision: lax.Precision) -> Array:
    size = L.shape[-1]
    T = trailing(jnp.eye(size, dtype=L.dtype), L) - L * trailing(_new_block(size, 1), L)
    width = 2
    while width < size:
        X = L * trailing(_new_block(size, width), L)
        T = T - jnp.matmul(T, jnp.matmul(X, T, precision=precision), precision=precision)
        width *= 2
    return T


def _invert_forward(L: Array, precision: lax.Precision) -> tuple[Array, Array]:
    T = invert_unit_lower(L, precision)
    return T, T


def _invert_backward(precision: lax.Precision, T: Array, cotangent: Array) -> tuple[Array]:
    turned = jnp.swapaxes(T, -1, -2)
    product = jnp.matmul(cotangent, turned, precision=precision)
    product = jnp.matmul(turned, product, precision=precision)
    return (-jnp.tril(product, -1),)


_invert.defvjp(_invert_forward, _invert_backward)


def delta_windows(operands: Operands, dtype: jnp.dtype) -> Array:
    """Outputs [B, T, Hv, dv] float32 of the rule from empty states, for all windows at once.

    Args:
      operands: [B, T, ...] float32, T a multiple of ``CHUNK``; ``alpha`` is not read.
      dtype: of the products' operands: bfloat16 for speed, float32 to check.
    """
    batch, rows, heads_k, dk = operands.k.shape
    heads_v, dv = operands.v.shape[2:]
    ratio, count = heads_v // heads_k, rows // CHUNK
    precision = precision_of(dtype)

    def key_heads(x: Array) -> Array:  # [B, T, Hk, dk] -> [B, n, Hk, C, dk]
        return x.reshape(batch, count, CHUNK, heads_k, dk).swapaxes(2, 3)

    def value_heads(x: Array) -> Array:  # [B, T, Hv, ...] -> [B, n, Hk, ratio, C, ...]
        x = x.reshape(batch, count, CHUNK, heads_k, ratio, *x.shape[3:])
        return jnp.moveaxis(x, 2, 4)

    q, k = key_heads(operands.q).astype(dtype), key_heads(operands.k).astype(dtype)
    v, beta = value_heads(operands.v), value_heads(operands.beta)[..., None]
    G = jnp.cumsum(value_heads(operands.g), axis=-1)
    into = jnp.exp(G)[..., None]  # decay from the chunk's start to each row
    difference = G[..., :, None] - G[..., None, :]
    lower = trailing(jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), difference)
    decay = jnp.exp(jnp.where(lower, difference, -jnp.inf))

    kk = contract("bnhik,bnhjk->bnhij", k, k)[:, :, :, None]
    qk = contract("bnhik,bnhjk->bnhij", q, k)[:, :, :, None]
    L = jnp.tril(beta * kk * decay, -1)
    T = invert_unit_lower(L, precision).astype(dtype)
    k32, q32 = k[:, :, :, None].astype(jnp.float32), q[:, :, :, None].astype(jnp.float32)
    U = contract("bnhrij,bnhrjv->bnhriv", T, (beta * v).astype(dtype)).astype(dtype)
    W = contract("bnhrij,bnhrjk->bnhrik", T, (beta * into * k32).astype(dtype)).astype(dtype)

    kept = (jnp.exp(G[..., -1:] - G)[..., None] * k32).astype(dtype)
    A = -contract("bnhrck,bnhrcl->bnhrkl", kept, W)
    A = A + jnp.exp(G[..., -1:])[..., None] * trailing(jnp.eye(dk, dtype=jnp.float32), A)
    B = contract("bnhrck,bnhrcv->bnhrkv", kept, U)

    def step(S: Array, maps: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.matmul(maps[0], S, precision=precision) + maps[1], S

    start = jnp.zeros((batch, heads_k, ratio, dk, dv), jnp.float32)
    maps = jnp.moveaxis(A, 1, 0), jnp.moveaxis(B, 1, 0)
    S = lax.scan(step, start, maps, unroll=min(count, _UNROLL))[1]
    S = jnp.moveaxis(S, 0, 1).astype(dtype)  # at each chunk's start: [B, n, Hk, ratio, dk, dv]

    new = (U.astype(jnp.float32) - contract("bnhrik,bnhrkv->bnhriv", W, S)).astype(dtype)
    out = contract("bnhrik,bnhrkv->bnhriv", (into * q32).astype(dtype), S)
    out = out + contract("bnhrij,bnhrjv->bnhriv", (qk * decay).astype(dtype), new)
    # The copy to token order moves the compute dtype: half the bytes of float32.
    out = jnp.moveaxis(out.astype(dtype), 4, 2)
    return out.reshape(batch, rows, heads_v, dv).astype(jnp.float32)
