"""Filters and draws against the float64 law of ``sampling_oracle``, and the noise against its own.

Significance: every chi-square uses fixed seeds and asks for p > 0.001, so it is deterministic; the
same tests reject wrong laws far below 1e-6 (shown where it matters).
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_oracle import law
from scipy import stats

from treejax.history import begin
from treejax.sampling import (
    COIN,
    DRAFT,
    FINAL,
    GREEDY,
    SCRIPT,
    TARGET,
    Sampling,
    draw,
    noise,
    process,
    sample,
)

DRAWS = 20_000


def probabilities(logits, **settings):
    z = process(jnp.asarray(logits, jnp.float32), Sampling(**settings).prepared())
    return np.asarray(jax.nn.softmax(z), np.float64)


def chi_square(counts, expected):
    """p-value of counts against probabilities; outcomes of probability zero must not occur."""
    counts, expected = np.ravel(counts), np.ravel(expected)
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0] * counts.sum()
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


def pool(counts, expected):
    """Pool the cells below five expected counts, which chi-square needs a cell."""
    rare = expected * counts.sum() < 5
    return (np.array([*values[~rare], values[rare].sum()]) for values in (counts, expected))


@jax.jit
def _process_all(logits, temperature, min_p, top_k, top_p):
    return process(logits, Sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p))


@st.composite
def rows(draw_value):
    """Rows with and without ties, of a few lengths so that few programs are compiled."""
    size = draw_value(st.sampled_from([3, 33]))
    rng = np.random.default_rng(draw_value(st.integers(0, 2**32 - 1)))
    if draw_value(st.booleans()):
        return rng.integers(-3, 4, size).astype(np.float32)
    return (rng.standard_normal(size) * 3).astype(np.float32)


settings_strategy = {
    "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    "top_k": st.integers(1, 40),
    "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
}


@given(rows(), st.fixed_dictionaries(settings_strategy))
def test_process_agrees_with_float64(logits, settings):
    settings = {k: float(np.float32(v)) if k != "top_k" else v for k, v in settings.items()}
    expected, margin = law(logits, **settings)
    assume(margin > 1e-5)  # nearer to a cut, float32 (1e-7 a term, 33 terms) may fall either side
    data = Sampling(**{k: np.asarray(v) for k, v in settings.items()}).prepared()
    z = _process_all(logits, data.temperature, data.min_p, data.top_k, data.top_p)
    p = np.asarray(jax.nn.softmax(z))
    np.testing.assert_array_equal(p > 0, expected > 1e-40)
    np.testing.assert_allclose(p, expected, rtol=1e-5, atol=1e-30)  # exp: z/T up to 60, 2^-24 each
    assert z.max() == 0


@given(rows(), st.fixed_dictionaries(settings_strategy), st.randoms())
def test_process_ignores_the_order_of_tokens(logits, settings, random):
    order = random.sample(range(len(logits)), len(logits))
    # A sum in another order may differ in its last bits; at temperature 0 ties do go by id.
    assume(law(logits, **settings)[1] > 1e-5 and settings["temperature"] > 0)
    data = {name: jnp.asarray(value) for name, value in settings.items()}  # in any order
    z = _process_all(jnp.asarray(logits), **data)
    permuted = _process_all(jnp.asarray(logits[order]), **data)
    np.testing.assert_array_equal(z[jnp.asarray(order)], permuted)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 2},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": 3, "top_p": 0.8},
        {"min_p": 0.1, "top_p": 0.8},
        {"temperature": 0.7, "min_p": 0.05, "top_k": 4, "top_p": 0.9},
    ],
)
def test_each_stage_alone_and_together(settings):
    logits = np.array([1.5, -0.5, 2.0, 0.25, 2.0, -3.0, 0.5], np.float32)
    settings = {"temperature": 1.0} | settings
    expected, _ = law(logits, **settings)
    np.testing.assert_allclose(probabilities(logits, **settings), expected, rtol=1e-6, atol=1e-30)


def test_the_order_is_temperature_min_p_top_k_top_p():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Renormalised to (4/7, 3/7) the first token alone reaches 0.5; of the full row it holds 0.4.
    after_top_k = probabilities(logits, temperature=1.0, top_k=2, top_p=0.5)
    np.testing.assert_array_equal(after_top_k, [1, 0, 0, 0])
    # At temperature 2 the ratio of the first two is sqrt(0.75) = 0.866; before it, 0.75.
    after_temperature = probabilities(logits, temperature=2.0, min_p=0.8)
    np.testing.assert_array_equal(after_temperature > 0, [True, True, False, False])
    # min-p leaves (4/7, 3/7) too.
    after_min_p = probabilities(logits, temperature=1.0, min_p=0.7, top_p=0.5)
    np.testing.assert_array_equal(after_min_p, [1, 0, 0, 0])


def test_ties_are_kept_by_value():
    logits = np.array([1.0, 3.0, 1.0, 2.0, 1.0, 0.0], np.float32)
    kept = probabilities(logits, temperature=1.0, top_k=3) > 0
    np.testing.assert_array_equal(kept, [True, True, True, True, True, False])
    kept = probabilities(np.zeros(4), temperature=1.0, top_p=0.3) > 0
    np.testing.assert_array_equal(kept, [True] * 4)
    # -0.0 equals 0.0, and bfloat16 rows tie often.
    kept = probabilities(np.array([0.0, -0.0, -1.0]), temperature=1.0, top_k=1) > 0
    np.testing.assert_array_equal(kept, [True, True, False])
    rounded = jnp.asarray([1.0, 1.001, 0.5], jnp.bfloat16)
    z = process(rounded, Sampling(1.0, top_k=1).prepared())
    np.testing.assert_array_equal(z, [0.0, 0.0, -jnp.inf])


def test_masked_tokens_stay_masked_and_small_weights_survive_top_p_1():
    masked = np.array([-np.inf, 1.0, -np.inf, 0.0], np.float32)
    p = probabilities(masked, temperature=1.0, top_k=4, top_p=0.9999, min_p=0.01)
    np.testing.assert_allclose(p, law([-1e9, 1.0, -1e9, 0.0])[0], rtol=1e-6)
    # Weights of 1e-9 vanish from a float32 sum; top_p = 1 given as data must keep them.
    light = jnp.asarray([21.0, 0.0, 0.0])
    z = process(light, Sampling(np.ones(()), top_p=np.ones(())).prepared())
    assert np.isfinite(z).all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    logits = jnp.asarray([300.0, -200.0, 299.0, 1e-3])
    p = probabilities(logits, temperature=temperature)
    expected = law(logits, temperature=temperature)[0]
    np.testing.assert_allclose(p, expected, atol=1e-6)  # four equal probabilities in float32


def test_extreme_settings_stay_finite():
    """A token forced by the largest bias, over the smallest and the largest penalties."""
    logits, history = jnp.asarray([3.0, -2.0, 0.5]), begin(jnp.asarray([[0, 1]]), jnp.full(1, 2), 3)
    history = jax.tree.map(lambda x: x[0], history)
    for r, bias in itertools.product((1e-6, 1e6), (1e30, -1e30)):
        settings = {"temperature": 0.5, "repetition_penalty": r, "logit_bias": {0: bias}}
        z = process(logits, Sampling(**settings, top_k=3).prepared(3), history)
        expected = law(logits, [0, 1], **settings)[0]
        np.testing.assert_allclose(jax.nn.softmax(z), expected, rtol=1e-6)
    often = history.replace(output=jnp.full(3, 10**6, jnp.int32))
    penalised = Sampling(1.0, frequency_penalty=np.float32(-1e6), presence_penalty=1e6).prepared()
    np.testing.assert_array_equal(process(logits, penalised, often), jnp.zeros(3))  # 1e12 + 3


def test_greedy_takes_the_lowest_id_and_rows_of_temperature_0_are_greedy():
    logits = jnp.asarray([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.25]])
    np.testing.assert_array_equal(sample(logits), [1, 0, 3])
    assert sample(logits).dtype == jnp.int32
    mixed = Sampling(np.array([0.0, 1.0, 0.0]), top_p=0.9)
    drawn = np.array(
        [sample(logits, sampling=mixed, key=jax.random.key(s), position=1) for s in range(40)]
    )
    assert set(drawn[:, 0]) == {1} and set(drawn[:, 2]) == {3} and len(set(drawn[:, 1])) > 1
    np.testing.assert_array_equal(process(logits[0], GREEDY.prepared()), jnp.log(jnp.eye(4)[1]))


def test_greedy_draws_no_noise_and_nothing_sorts():
    logits, key, at = jnp.zeros((2, 7)), jax.random.key(0), jnp.int32(1)

    def program(sampling):
        return str(
            jax.make_jaxpr(lambda x: sample(x, sampling=sampling, key=key, position=at))(logits)
        )

    greedy = program(Sampling(0.0, top_k=3, top_p=0.5))
    assert "random" not in greedy and "while" not in greedy and "scan" not in greedy
    assert greedy == program(Sampling(logit_bias={}, min_tokens=0, presence_penalty=0.0))
    assert " add" not in greedy and " sub" not in greedy and " mul" not in greedy
    sampled = program(Sampling(1.0, top_k=3, top_p=0.5))
    assert "random_bits" in sampled and " sort" not in sampled and "top_k[" not in sampled


SETTINGS = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "min_p": 0.02, "top_k": 6, "top_p": 0.9},
]


@jax.jit
def _draw_everywhere(logits, settings, keys, positions):
    over_positions = jax.vmap(lambda key, at: draw(logits, settings, key, at), in_axes=(None, 0))
    return jax.vmap(over_positions, in_axes=(0, None))(keys, positions)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_law_at_positions_1_to_4(settings):
    logits = jnp.asarray(np.random.default_rng(5).standard_normal(9) * 1.5, jnp.float32)
    data = {"min_p": 0.0, "top_k": 9, "top_p": 1.0} | settings
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in data.items()}
    sampling = Sampling(**arrays).prepared()  # as arrays: one program for all
    keys = jax.random.split(jax.random.key(1), DRAWS)
    tokens = np.asarray(_draw_everywhere(logits, sampling, keys, jnp.arange(1, 5)))
    p, _ = law(logits, **settings)
    for column in tokens.T:
        assert chi_square(np.bincount(column, minlength=9), p) > 0.001
    # Positions are independent: a key used twice would put every pair on the diagonal.
    for i, j in itertools.combinations(range(4), 2):
        pairs = np.bincount(tokens[:, i] * 9 + tokens[:, j], minlength=81)
        assert chi_square(*pool(pairs, np.outer(p, p).ravel())) > 0.001
    # The same counts refuse a temperature that is 15 % off.
    wrong, _ = law(logits, **settings | {"temperature": 1.15 * settings["temperature"]})
    if (wrong[p > 0] > 0).all():
        assert chi_square(np.bincount(tokens[:, 0], minlength=9), wrong) < 1e-6


def test_noise_depends_on_key_position_purpose_and_slot_alone():
    key, other = jax.random.key(3), jax.random.key(4)
    base = noise(key, jnp.int32(7), 16)
    variants = [
        noise(other, jnp.int32(7), 16),
        noise(key, jnp.int32(8), 16),
        noise(key, jnp.int32(7), 16, purpose=1),
        noise(key, jnp.int32(7), 16, slot=1),
        noise(key, jnp.int32(1), 16, purpose=7),
    ]
    for a, b in itertools.combinations([base, *variants], 2):
        assert not np.isin(a, b).any()
    np.testing.assert_array_equal(base, noise(key, jnp.int32(7), 16))
    assert (TARGET, SCRIPT, DRAFT, COIN, FINAL) == (0, 1, 2, 3, 4)  # streams of old stay the same
    traced = noise(key, jnp.int32(7), 16, DRAFT, jnp.int32(3))
    np.testing.assert_array_equal(traced, noise(key, jnp.int32(7), 16, purpose=2, slot=3))
    batched = jax.jit(jax.vmap(lambda k, t: noise(k, t, 16)))
    both = batched(jnp.stack([other, key]), jnp.asarray([7, 7]))
    np.testing.assert_allclose(both[1], base, rtol=1e-6)  # log may round apart in another program


def test_noise_reaches_tokens_of_probability_1e_8():
    """A tail of 2 % over 248,320 tokens: each wins only with noise above 16, where "low" ends.

    Of 500 rows 124 million numbers, exp(-16.5) each = 8.5 are expected above 16.5. The count is
    Poisson: [1, 22] holds all but 2.5e-4. In mode="low" the largest possible value is 15.95.
    """
    vocabulary, count = 248_320, 500
    extremes = jax.jit(
        lambda keys: jax.lax.map(
            lambda key: (noise(key, jnp.int32(1), vocabulary) > 16.5).sum(dtype=jnp.int32), keys
        )
    )
    hits = int(extremes(jax.random.split(jax.random.key(0), count)).sum())
    assert 1 <= hits <= 22


def test_fc16_streams_depend_on_seed_and_position_alone():
    """FC-16: the same draws again, in a batch, in any order and whatever the neighbours are."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((6, 50)), jnp.float32)
    keys = jax.vmap(jax.random.key)(jnp.arange(6))
    positions = jnp.asarray([3, 900, 41, 8, 15, 16])
    sampling = Sampling(np.linspace(0.5, 1.5, 6), top_p=np.linspace(0.5, 1.0, 6))
    together = sample(logits, sampling=sampling, key=keys, position=positions)
    again = sample(logits, sampling=sampling, key=keys, position=positions)
    np.testing.assert_array_equal(again, together)
    order = np.array([4, 0, 5, 2, 1, 3])
    moved = jax.tree.map(lambda x: x[order], sampling)
    shuffled = sample(logits[order], sampling=moved, key=keys[order], position=positions[order])
    np.testing.assert_array_equal(shuffled, together[order])
    for row in range(6):
        alone = jax.tree.map(lambda x, row=row: x[row], sampling)
        token = sample(logits[row : row + 1], sampling=alone, key=keys[row : row + 1],
                       position=positions[row])  # fmt: skip
        assert token[0] == together[row]
    flat = jnp.zeros((1, 50))
    drawn = [int(sample(flat, sampling=Sampling(1.0), key=jax.random.key(s)[None], position=1)[0])
             for s in range(20)]  # fmt: skip
    assert len(set(drawn)) > 10  # 20 of 50 equally likely tokens: 16.6 expected


def test_one_key_for_a_batch_is_folded_with_the_row():
    logits, key = jnp.zeros((5, 40)), jax.random.key(9)
    folded = jnp.stack([jax.random.fold_in(key, row) for row in range(5)])
    one = sample(logits, sampling=Sampling(1.0), key=key, position=2)
    each = sample(logits, sampling=Sampling(1.0), key=folded, position=jnp.full(5, 2))
    np.testing.assert_array_equal(one, each)
    assert len(set(np.asarray(one).tolist())) > 2
