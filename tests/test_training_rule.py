"""The training rule and loss against the recurrence token by token, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treejax import parameters
from treejax.config import ModelConfig
from treejax.delta_rule import Operands, chunked
from treejax.layers import l2_normalise, look_up
from treejax.training import loss, rule

TINY = ModelConfig(
    family="qwen3_5",
    vocab_size=300,
    hidden_size=32,
    layer_types=("linear_attention", "full_attention"),
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    rotary_dim=4,
    rope_theta=1e4,
    tie_word_embeddings=True,
    mtp_num_hidden_layers=1,
    eos_token_ids=(0,),
)


def random_operands(rows: int, dk: int = 16, dv: int = 24) -> Operands:
    """Two windows, two key heads, four value heads; strong writes, weak and strong decay."""
    keys = jax.random.split(jax.random.key(3), 6)
    q = jax.random.normal(keys[0], (2, rows, 2, dk))
    # A common part makes keys correlated, which is where a bad inverse shows.
    k = jax.random.normal(keys[1], (2, rows, 2, dk)) + jax.random.normal(keys[5], (2, 1, 2, dk))
    g = -jnp.exp(jax.random.uniform(keys[3], (2, rows, 4), minval=-7.0, maxval=1.0))
    return Operands(
        q=l2_normalise(q) * dk**-0.5,
        k=l2_normalise(k),
        v=jax.random.normal(keys[2], (2, rows, 4, dv)),
        g=g,
        alpha=jnp.exp(g),
        beta=jax.nn.sigmoid(2.0 * jax.random.normal(keys[4], (2, rows, 4))),
    )


def token_by_token(x: Operands) -> jax.Array:
    """Section 4.4 of the model's arithmetic, one token at a time, S [dk, dv]; from g, not alpha."""
    q, k = (jnp.repeat(a, x.v.shape[2] // a.shape[2], axis=2) for a in (x.q, x.k))

    def step(S, now):
        q, k, v, g, beta = now
        S = jnp.exp(g)[..., None, None] * S
        error = v - jnp.einsum("bhkv,bhk->bhv", S, k)
        S = S + jnp.einsum("bhk,bhv->bhkv", k, beta[..., None] * error)
        return S, jnp.einsum("bhkv,bhk->bhv", S, q)

    start = jnp.zeros((*x.v.shape[:1], x.v.shape[2], k.shape[-1], x.v.shape[-1]))
    rows = [jnp.moveaxis(a, 1, 0) for a in (q, k, x.v, x.g, x.beta)]
    return jnp.moveaxis(jax.lax.scan(step, start, tuple(rows))[1], 0, 1)


def relative(a, b) -> float:
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def test_rule_equals_recurrence_with_gradients():
    operands = random_operands(192)
    weights = jax.random.normal(jax.random.key(9), operands.v.shape)

    def outputs_and_gradients(function):
        def total(x):
            out = function(x)
            return jnp.sum(weights * jnp.sin(3.0 * out)), out

        return jax.jit(jax.value_and_grad(total, has_aux=True))(operands)

    (_, out), grads = outputs_and_gradients(lambda x: rule.delta_windows(x, jnp.float32))
    (_, expected), wanted = outputs_and_gradients(token_by_token)
    # Both are float32 with different orders of summation over 192 rows; 5e-7 was measured.
    assert relative(out, expected) < 5e-6
    for name in ("q", "k", "v", "g", "beta"):
        assert relative(getattr(grads, name), getattr(wanted, name)) < 2e-5, name


def test_rule_in_bfloat16_stays_near():
    operands = random_operands(128)
    out = rule.delta_windows(operands, jnp.bfloat16)
    # Operands carry 8 bits: 2^-9 each, amplified by the inverse of correlated keys.
    assert relative(out, token_by_token(operands)) < 0.02


def test_rule_equals_the_prompt_rule():
    operands = random_operands(128, dk=16, dv=16)
    heads = operands.v.shape[2]
    R = jnp.zeros((2, heads, 16, 16))
    expected = jax.vmap(chunked)(R, operands)[0]
    assert relative(rule.delta_windows(operands, jnp.float32), expected) < 5e-6


def test_inverse_of_correlated_system_is_accurate():
    """All keys equal and beta = 1: the system is all ones below the diagonal, its inverse known."""
    size = 64
    L = jnp.tril(jnp.ones((size, size)), -1)
    T = rule.invert_unit_lower(L, jax.lax.Precision.HIGHEST)
    expected = np.eye(size) - np.eye(size, k=-1)
    np.testing.assert_allclose(T, expected, atol=1e-6)  # integers: exact but for rounding


def test_inverse_gradient():
    L = jnp.tril(jax.random.normal(jax.random.key(0), (16, 16)), -1) * 0.3
    weights = jax.random.normal(jax.random.key(1), (16, 16))

    def ours(L):
        return jnp.sum(weights * rule.invert_unit_lower(L, jax.lax.Precision.HIGHEST))

    def library(L):
        return jnp.sum(weights * jnp.linalg.inv(jnp.eye(16) + jnp.tril(L, -1)))

    # Float32 inverses of a 16 x 16 matrix of condition about 10.
    np.testing.assert_allclose(jax.grad(ours)(L), jax.grad(library)(L), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_embedding_gradient_equals_indexing(dtype):
    table = jax.random.normal(jax.random.key(0), (11, 6)).astype(dtype)
    tokens = jnp.array([[1, 1, 5], [10, 0, 1]])
    weights = jax.random.normal(jax.random.key(1), (2, 3, 6)).astype(dtype)
    ours = jax.grad(lambda t: jnp.sum((look_up(t, tokens) * weights).astype(jnp.float32)))(table)
    wanted = jax.grad(lambda t: jnp.sum((t[tokens] * weights).astype(jnp.float32)))(table)
    # Token 1 sums three rows: one rounding against two of the scatter.
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        ours.astype(jnp.float32), wanted.astype(jnp.float32), rtol=tolerance, atol=tolerance
    )


def test_loss_terms_equal_the_model_s_own_scores():
    import treejax
    from treejax.model import Model
    from treejax.mtp import mtp_forward

    params = parameters.init(TINY, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 64 + loss.AHEAD), 0, TINY.vocab_size)
    total, losses = loss.window_loss(TINY, params, tokens, (0.3, 0.15), jnp.float32, "xla")
    expected = -treejax.score(Model(params, TINY), tokens[:, :65], np.array([65, 65])).mean()
    # Float32 through two layers, summed in another order.
    np.testing.assert_allclose(losses.main, expected, rtol=2e-5)

    hidden = loss.window_hidden(TINY, params, tokens[:, :64], "xla")
    first, _ = mtp_forward(TINY, params, hidden, tokens[:, 1:65])
    second, _ = mtp_forward(TINY, params, first, tokens[:, 2:66])
    for rows, ahead, measured in ((first, 2, losses.mtp), (second, 3, losses.chained)):
        logp = jax.nn.log_softmax(rows @ params["embed"].T)
        picked = jnp.take_along_axis(logp, tokens[:, ahead : ahead + 64, None], axis=-1)
        np.testing.assert_allclose(measured, -picked.mean(), rtol=2e-5)
    expected = losses.main + 0.3 * losses.mtp + 0.15 * losses.chained
    np.testing.assert_allclose(total, expected, rtol=1e-6)
