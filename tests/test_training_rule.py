"""The training rule and loss against the recurrence token by token, gradients included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import treejax
from treejax.delta_rule import Operands, chunked
from treejax.layers import look_up
from treejax.model import Model
from treejax.mtp import mtp_forward
from treejax.state import init_state
from treejax.training import loss, rule

TINY = dataclasses.replace(tiny.CONFIG, vocab_size=300, tie_word_embeddings=True)


@functools.cache
def random_operands() -> Operands:
    """Two windows of three chunks, two key heads, four value heads; weak and strong decay."""
    rows, dk, dv = 192, 16, 24
    random = np.random.default_rng(3)
    q = random.standard_normal((2, rows, 2, dk))
    # A common part makes keys correlated, which is where a bad inverse shows.
    k = random.standard_normal((2, rows, 2, dk)) + random.standard_normal((2, 1, 2, dk))
    g = -np.exp(random.uniform(-7.0, 1.0, (2, rows, 4)))
    values = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True) * dk**-0.5,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": random.standard_normal((2, rows, 4, dv)),
        "g": g,
        "alpha": np.exp(g),
        "beta": 1 / (1 + np.exp(-2.0 * random.standard_normal((2, rows, 4)))),  # strong writes
    }
    return Operands(**{name: jnp.asarray(value, jnp.float32) for name, value in values.items()})


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


def outputs_and_gradients(function):
    """Outputs, and the gradients of a nonlinear sum of them."""
    operands = random_operands()
    weights = np.random.default_rng(9).standard_normal(operands.v.shape).astype(np.float32)

    def total(x):
        out = function(x)
        return jnp.sum(weights * jnp.sin(3.0 * out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(operands)
    return out, grads


@functools.cache
def recurrence():
    return outputs_and_gradients(token_by_token)


def test_rule_equals_recurrence_with_gradients():
    out, grads = outputs_and_gradients(lambda x: rule.delta_windows(x, jnp.float32))
    expected, wanted = recurrence()
    # Both are float32 with different orders of summation over 192 rows; 5e-7 was measured.
    assert relative(out, expected) < 5e-6
    for name in ("q", "k", "v", "g", "beta"):
        assert relative(getattr(grads, name), getattr(wanted, name)) < 2e-5, name


def test_rule_in_bfloat16_stays_near():
    out = jax.jit(rule.delta_windows, static_argnums=1)(random_operands(), jnp.bfloat16)
    # Operands carry 8 bits: 2^-9 each, amplified by the inverse of correlated keys.
    assert relative(out, recurrence()[0]) < 0.02


def test_prompt_rule_equals_the_recurrence_too():
    operands = random_operands()
    R = jnp.zeros((2, operands.v.shape[2], operands.v.shape[-1], operands.k.shape[-1]))
    out = jax.jit(jax.vmap(chunked))(R, operands)[0]
    assert relative(out, recurrence()[0]) < 5e-6


def test_inverse_of_correlated_system_is_accurate():
    """All keys equal and beta = 1: the system is all ones below the diagonal, its inverse known."""
    size = 64
    L = jnp.tril(jnp.ones((size, size)), -1)
    T = rule.invert_unit_lower(L, jax.lax.Precision.HIGHEST)
    expected = np.eye(size) - np.eye(size, k=-1)
    np.testing.assert_allclose(T, expected, atol=1e-6)  # integers: exact but for rounding


def test_inverse_gradient():
    random = np.random.default_rng(0)
    L = np.tril(0.3 * random.standard_normal((16, 16)), -1).astype(np.float32)
    weights = random.standard_normal((16, 16)).astype(np.float32)

    def ours(L):
        return jnp.sum(weights * rule.invert_unit_lower(L, jax.lax.Precision.HIGHEST))

    def library(L):
        return jnp.sum(weights * jnp.linalg.inv(jnp.eye(16) + jnp.tril(L, -1)))

    # Float32 inverses of a 16 x 16 matrix of condition about 10.
    got, wanted = (jax.jit(jax.grad(f))(L) for f in (ours, library))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_embedding_gradient_equals_indexing(dtype):
    random = np.random.default_rng(0)
    table = jnp.asarray(random.standard_normal((11, 6)), dtype)
    tokens = jnp.array([[1, 1, 5], [10, 0, 1]])
    weights = jnp.asarray(random.standard_normal((2, 3, 6)), dtype)
    ours = jax.grad(lambda t: jnp.sum((look_up(t, tokens) * weights).astype(jnp.float32)))(table)
    wanted = jax.grad(lambda t: jnp.sum((t[tokens] * weights).astype(jnp.float32)))(table)
    # Token 1 sums three rows: one rounding against two of the scatter.
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        ours.astype(jnp.float32), wanted.astype(jnp.float32), rtol=tolerance, atol=tolerance
    )


def test_loss_terms_equal_the_model_s_own_scores():
    params = tiny.random_params(TINY)
    random = np.random.default_rng(1)
    tokens = random.integers(TINY.vocab_size, size=(2, 64 + loss.AHEAD), dtype=np.int32)
    measure = jax.jit(loss.window_loss, static_argnums=(0, 3, 4, 5))
    total, losses = measure(TINY, params, tokens, (0.3, 0.15), jnp.float32, "xla")
    model, decoded, lengths = Model(params, TINY), tokens[:, :65], np.array([65, 65], np.int32)
    expected = -treejax.score(model, decoded, lengths).mean()
    # Float32 through two layers, summed in another order.
    np.testing.assert_allclose(losses.main, expected, rtol=2e-5)

    @jax.jit
    def head_losses(params, hidden, tokens):
        """Mean negative log-likelihoods of the head's two passes, from decoding's own head."""
        means = []
        for ahead in (2, 3):
            hidden, _ = mtp_forward(TINY, params, hidden, tokens[:, ahead - 1 : ahead + 63])
            logp = jax.nn.log_softmax(hidden @ params["embed"].T)
            picked = jnp.take_along_axis(logp, tokens[:, ahead : ahead + 64, None], axis=-1)
            means.append(-picked.mean())
        return means

    state = init_state(TINY, 2, 65, jnp.float32)
    hidden = treejax.prefill(model, state, decoded, lengths, hidden="all")[0].hidden
    first, second = head_losses(params, hidden[:, :64], tokens)
    np.testing.assert_allclose([losses.mtp, losses.chained], [first, second], rtol=2e-5)
    expected = losses.main + 0.3 * losses.mtp + 0.15 * losses.chained
    np.testing.assert_allclose(total, expected, rtol=1e-6)
