"""The tree WY solve in plain JAX: the specification, and what runs where the kernel cannot.

Design section 3: (I + L) U = diag(beta) (V - diag(exp G) K R0^T), outputs from R0 and U. Rows are
in topological order, so L is strictly lower triangular and forward substitution is exact.
"""

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST
PRODUCTS: dict[str, lax.Precision | lax.DotAlgorithmPreset] = {
    "ieee": HIGHEST,
    "bf16x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
}


def solve(
    R0: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    ancestors: jax.Array,
    size: jax.Array,
    precision: str,
) -> tuple[jax.Array, jax.Array]:
    """One sequence: outputs and U, both [N, Hv, dv], from R0 [Hv, dv, dk] and its operands.

    Rows at or past ``size`` may hold anything: both results are 0 there.
    """
    products = PRODUCTS[precision]
    active = jnp.arange(len(v)) < size

    def only_active(x: jax.Array) -> jax.Array:
        mask = active.reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.where(mask, x, jnp.zeros_like(x)).astype(jnp.float32)

    q, k, v, g, beta = (only_active(x) for x in (q, k, v, g, beta))
    q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    G = jnp.einsum("ij,jh->hi", ancestors.astype(jnp.float32), g, precision=HIGHEST)
    # The difference is masked before exp: exp of a positive difference overflows.
    difference = jnp.where(ancestors[None], G[:, :, None] - G[:, None, :], -jnp.inf)
    decay = jnp.exp(difference)  # [Hv, N, N]
    strict = ~jnp.eye(len(v), dtype=bool)[None]
    kk = jnp.einsum("ihk,jhk->hij", k, k, precision=products)
    L = jnp.where(strict, beta.T[:, :, None] * kk * decay, 0.0)
    grown = jnp.exp(G)[:, :, None]
    predicted = grown * jnp.einsum("ihk,hvk->hiv", k, R0, precision=products)
    right = beta.T[:, :, None] * (jnp.moveaxis(v, 0, 1) - predicted)
    u = lax.linalg.triangular_solve(L, right, left_side=True, lower=True, unit_diagonal=True)
    inner = decay * jnp.einsum("ihk,jhk->hij", q, k, precision=products)
    out = grown * jnp.einsum("ihk,hvk->hiv", q, R0, precision=products)
    out = out + jnp.einsum("hij,hjv->hiv", inner, u, precision=products)
    return only_active(jnp.moveaxis(out, 0, 1)), jnp.moveaxis(u, 0, 1)
