"""Field cases FC-07 to FC-09: gates, chunk edges, extreme gates and degenerate keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from stepping import choose, decode, relative

from treejax import layers, parameters
from treejax.config import LINEAR
from treejax.delta_rule import Operands, chunked, update
from treejax.model import Model, prefill
from treejax.policies import REGISTRY
from treejax.state import init_state
from treejax.steps.publish import publish
from treejax.steps.verify import verify
from treejax.tree import Tree

A_LOG, DT_BIAS, WRITE = 2.7, -5.01, -0.5  # none of the first two is a bfloat16 number


@functools.cache
def gated_model():
    """A bfloat16 model of one recurrent layer whose gate inputs are exact: b = -0.5 and a = 0.

    All embeddings are ones, hence so is the normalised input, and projections are column sums of
    sixteenths, exact in bfloat16. The last convolution tap alone is 1, so nothing is mixed.
    """
    config = dataclasses.replace(tiny.CONFIG, layer_types=(LINEAR,), mtp_num_hidden_layers=0)
    params = parameters.init(config, jax.random.key(0), jnp.bfloat16)
    rng = np.random.default_rng(7)
    mixer = params["layers"][0]["mixer"]
    hidden, channels = mixer["qkv"].shape
    params["embed"] = jnp.ones_like(params["embed"])
    mixer["qkv"] = jnp.asarray(rng.integers(-4, 5, (hidden, channels)) / 16, jnp.bfloat16)
    mixer["conv"] = jnp.zeros_like(mixer["conv"]).at[-1].set(1)
    mixer["b"] = jnp.full_like(mixer["b"], WRITE / hidden)
    mixer["a"] = jnp.zeros_like(mixer["a"])
    mixer["A_log"] = jnp.full_like(mixer["A_log"], A_LOG)
    mixer["dt_bias"] = jnp.full_like(mixer["dt_bias"], DT_BIAS)
    return Model(params, config)


def expected_states(count):
    """R after ``count`` tokens in float64, from the exact column sums and the rounded silu."""
    model = gated_model()
    config, mixer = model.config, model.params["layers"][0]["mixer"]
    sums = np.asarray(mixer["qkv"], np.float64).sum(0)
    mixed = oracle.silu(sums).astype(jnp.bfloat16).astype(np.float64)
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    width = config.linear_key_head_dim
    k = oracle.unit(mixed[keys * width : 2 * keys * width].reshape(1, keys, width))
    v = mixed[2 * keys * width :].reshape(1, heads, -1)
    g = np.full((count, heads), -np.exp(A_LOG) * np.log1p(np.exp(DT_BIAS)))
    beta = np.full((count, heads), oracle.sigmoid(WRITE))
    k, v = np.repeat(k, count, 0), np.repeat(v, count, 0)
    return oracle.delta_rule(np.zeros((heads, v.shape[-1], width)), k, k, v, g, beta)[1]


def test_fc07_gate_numbers():
    """FC-07: sigmoid(-0.5) = 0.3775407 and exp(2.7) = 14.87973 from bfloat16 gate inputs."""
    model = gated_model()
    config, mixer = model.config, model.params["layers"][0]["mixer"]
    assert mixer["A_log"].dtype == mixer["dt_bias"].dtype == jnp.float32
    heads = config.linear_num_value_heads
    softplus_is_one = {**mixer, "dt_bias": jnp.full(heads, np.log(np.e - 1), jnp.float32)}
    operands = layers.delta_operands(
        config,
        softplus_is_one,
        jnp.ones((1, config.conv_channels), jnp.bfloat16),
        jnp.zeros((1, heads), jnp.bfloat16),
        jnp.full((1, heads), WRITE, jnp.bfloat16),
    )
    for leaf in jax.tree.leaves(operands):
        assert leaf.dtype == jnp.float32
    # float32 resolves 6e-8 and 1e-6 there; a bfloat16 round trip gives 0.3769531 and 14.9263.
    np.testing.assert_allclose(operands.beta, 0.3775407, rtol=0, atol=1e-7)
    np.testing.assert_allclose(operands.g, -14.87973, rtol=0, atol=1e-5)


def test_fc07_sums_of_g_and_products_of_alpha_stay_together():
    """FC-07: after 10,000 tokens of slow heads both forms of the decay say the same.

    Half a unit of a float32 near 1 is 3e-8: with g as it is, the two would differ by up to 3e-4.
    """
    slow = np.geomspace(1e-5, 1e-3, 16, dtype=np.float32)
    alpha, g = (np.asarray(x, np.float64) for x in layers.decays(-jnp.asarray(slow)))
    np.testing.assert_allclose(1e4 * g, 1e4 * np.log(alpha), rtol=2e-7)
    assert np.abs(1e4 * (np.log(alpha) + slow)).max() > 1e-4  # which is what the rule is for


@pytest.mark.parametrize("policy", REGISTRY)
def test_fc07_one_precision_on_every_path(policy):
    """FC-07: two tokens by prompt, single steps, windows of one, and one window of two."""
    model = gated_model()
    empty = init_state(model.config, 1, 8, jnp.bfloat16, policy)
    prompt = functools.partial(prefill, model, empty, np.array([[1, 2]], np.int32))

    by_steps = decode(model, decode(model, empty, [1])[1], [2])[1]
    window_of_one = prompt(np.array([1]))[1]
    tree = Tree.from_parents([2], [-1], capacity=3, max_depth=2)
    _, scratch = verify(model, window_of_one, tree)
    window_of_one = publish(model, window_of_one, tree, scratch, choose([[0]], 2))
    tree = Tree.from_parents([1, 2], [-1, 0], capacity=3, max_depth=2)
    _, scratch = verify(model, empty, tree)
    window_of_two = publish(model, empty, tree, scratch, choose([[0, 1]], 2))

    expected = expected_states(2)
    for state in (prompt(np.array([2]))[1], by_steps, window_of_one, window_of_two):
        assert state.length[0] == 2
        assert state.recurrent_of(0).dtype == jnp.float32
        # Gates rounded to bfloat16 anywhere move R by 1e-3 relative; float32 stays below 3e-7.
        assert relative(state.recurrent_of(0)[0], expected) < 1e-6


def random_operands(rng, rows, key_heads=1, value_heads=2, dk=24, dv=40):
    """Overlapping unit keys, log-decays in [-1.5, -0.01], and a non-zero initial state."""
    shared = rng.normal(size=(1, key_heads, dk))
    g = rng.uniform(-1.5, -0.01, (rows, value_heads))
    made = dict(
        q=oracle.unit(rng.normal(size=(rows, key_heads, dk))) * dk**-0.5,
        k=oracle.unit(shared + 0.5 * rng.normal(size=(rows, key_heads, dk))),
        v=rng.normal(size=(rows, value_heads, dv)),
        g=g,
        beta=rng.uniform(0.1, 1.0, (rows, value_heads)),
    )
    return made, rng.normal(size=(value_heads, dv, dk))


def run_chunked(made, R):
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in made.items()}
    operands = Operands(**arrays, alpha=jnp.exp(arrays["g"]))
    return jax.jit(chunked)(jnp.asarray(R, jnp.float32), operands)


def check_chunked(made, R, atol):
    out, final = run_chunked(made, R)
    expected, state = oracle.delta_rule(R, **made)
    np.testing.assert_allclose(out, expected, rtol=0, atol=atol)
    np.testing.assert_allclose(final, state, rtol=0, atol=atol)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 200])
def test_fc08_chunks_equal_one_token_at_a_time(rows):
    """FC-08: outputs and final state at chunk edges; key width 24, value width 40."""
    made, R = random_operands(np.random.default_rng(rows), rows)
    check_chunked(made, R, atol=1e-4)  # the case's own bound; the usual slips give 1e-2 and more


def test_fc08_order_of_one_update():
    """FC-08: S = 1, decay .5, write .5, k = 1, v = 3 gives 1.75; 1.5 is the wrong order."""
    one, half = jnp.ones((1, 1)), jnp.full(1, 0.5)
    assert update(jnp.ones((1, 1, 1)), one, 3 * one, half, half).item() == 1.75
    made = dict(
        q=np.ones((1, 1, 1)),
        k=np.ones((1, 1, 1)),
        v=np.full((1, 1, 1), 3.0),
        g=np.full((1, 1), np.log(0.5)),
        beta=np.full((1, 1), 0.5),
    )
    _, final = run_chunked(made, np.ones((1, 1, 1)))
    np.testing.assert_allclose(final, 1.75, rtol=1e-6)  # exp of a rounded log 0.5


@pytest.mark.parametrize("rows, filler", [(1, 63), (40, 60), (70, 30)])
def test_fc08_filler_rows_change_nothing(rows, filler):
    """FC-08: rows with beta = 0 and g = 0, whatever else they hold."""
    rng = np.random.default_rng(rows)
    made, R = random_operands(rng, rows)
    junk, _ = random_operands(rng, filler)
    junk["beta"][:], junk["g"][:] = 0, 0
    filled = {name: np.concatenate([made[name], junk[name]]) for name in made}
    (out, final), (longer, same) = run_chunked(made, R), run_chunked(filled, R)
    np.testing.assert_allclose(longer[:rows], out, rtol=0, atol=1e-6)  # another summation order
    np.testing.assert_allclose(same, final, rtol=0, atol=1e-6)


def test_fc09_a_strong_decay_inside_a_chunk():
    """FC-09 (a): log-decay -30 a token over 130 tokens, -1920 inside a chunk."""
    made, R = random_operands(np.random.default_rng(1), 130)
    made["g"][:] = -30.0
    check_chunked(made, R, atol=1e-5)  # also fails on nan; each token all but forgets the past


def test_fc09_b_a_zero_key_only_decays():
    """FC-09 (b): a zero key normalises to zero, and the state is the decayed one."""
    np.testing.assert_array_equal(layers.l2_normalise(jnp.zeros((2, 24))), 0.0)
    made, R = random_operands(np.random.default_rng(2), 3)
    made["k"][:] = 0.0
    check_chunked(made, R, atol=1e-6)
    decayed = np.exp(made["g"].sum(0))[:, None, None] * R
    np.testing.assert_allclose(run_chunked(made, R)[1], decayed, rtol=0, atol=1e-6)
    alpha = jnp.asarray(np.exp(made["g"][0]), jnp.float32)
    R32 = jnp.asarray(R, jnp.float32)
    one = update(R32, jnp.zeros((2, 24)), jnp.ones((2, 40)), alpha, jnp.ones(2))
    np.testing.assert_array_equal(one, alpha[:, None, None] * R32)


def test_fc09_c_the_epsilon_is_inside_the_root():
    """FC-09 (c): the key [3e-5] gives 0.029987, that is x / sqrt(sum x^2 + 1e-6)."""
    np.testing.assert_allclose(layers.l2_normalise(jnp.array([3e-5])), 0.029987, atol=5e-7)


def test_fc09_d_equal_keys_written_in_full():
    """FC-09 (d): 64 identical unit keys, write 1, log-decay -1e-4."""
    made, R = random_operands(np.random.default_rng(4), 64)
    made["k"][:] = made["k"][:1]
    made["beta"][:], made["g"][:] = 1.0, -1e-4
    check_chunked(made, R, atol=2e-5)  # 64 rank-one corrections of values around 1
