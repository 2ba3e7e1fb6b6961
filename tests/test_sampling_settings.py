"""Settings: what is data and what is static, neutral values, and one line for every mistake."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treejax.history import begin
from treejax.sampling import Sampling, per_sequence, process, sample


def test_settings_are_data_and_stages_are_static():
    logits, key = jnp.zeros((2, 21)), jax.random.key(0)
    traces = []

    @jax.jit
    def step(sampling, position):
        traces.append(sampling)
        return sample(logits, sampling=sampling, key=key, position=position)

    for temperature, top_k, top_p in [(0.5, 3, 0.9), (1.0, 7, 0.2), (2, 21, 0.99)]:
        settings = Sampling(temperature, top_k=top_k, top_p=top_p).prepared()
        inside = step(settings, 4)
        outside = sample(logits, sampling=settings, key=key, position=4)
        np.testing.assert_array_equal(inside, outside)
    assert len(traces) == 1
    step(Sampling(1.0, top_k=3).prepared(), 4)
    assert len(traces) == 2


def test_prepared_drops_neutral_numbers_and_is_idempotent():
    neutral = Sampling(0.7, top_p=1.0, min_p=0, repetition_penalty=1.0, presence_penalty=0)
    once = neutral.prepared()
    assert once.top_p is None and once.min_p is None and once.temperature == np.float32(0.7)
    assert once.prepared() == once and not once.needs_history
    assert Sampling(0, top_k=3, top_p=0.5).prepared() == Sampling(temperature=None)
    kept = Sampling([0.0, 0.0], top_p=np.ones(2)).prepared()
    assert kept.temperature.shape == (2,) and kept.top_p.dtype == np.float32


def test_bans_become_one_bias_and_greedy_rows_keep_what_moves_an_argmax():
    given = Sampling(
        0.0,
        top_k=3,
        logit_bias={1: 2.5, 2: 1, 4: -np.inf},
        allowed_tokens=(1, 2, 3, 4),
        banned_tokens={3},
        min_tokens=2,
        end_tokens=np.array([1]),
        presence_penalty=0.5,
    )
    once = given.prepared(5)
    assert once.temperature is None and once.top_k is None and once.needs_history
    assert once.allowed_tokens is None and once.banned_tokens is None
    np.testing.assert_array_equal(once.logit_bias, [-np.inf, 2.5, 1.0, -np.inf, -np.inf])
    np.testing.assert_array_equal(once.end_tokens, [False, True, False, False, False])
    for twice in (once.prepared(), once.prepared(5)):
        assert jax.tree.structure(twice) == jax.tree.structure(once)
        jax.tree.map(np.testing.assert_array_equal, twice, once)
    nothing = Sampling(min_tokens=0, end_tokens=[9], logit_bias={}, banned_tokens=[])
    assert nothing.prepared() == Sampling(temperature=None)
    # A list of ids needs the size of the vocabulary, unless a bias over it is there.
    with pytest.raises(ValueError, match="pass its size"):
        Sampling(banned_tokens=[1]).prepared()
    both = Sampling(logit_bias=np.zeros(4), banned_tokens=[1]).prepared()
    np.testing.assert_array_equal(both.logit_bias, [0, -np.inf, 0, 0])
    with pytest.raises(ValueError, match="logit_bias has shape"):
        once.prepared(6)


def test_every_setting_may_be_one_a_sequence():
    """[B] numbers and [B, V] arrays: each row as it would be alone, through vmap and jit."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((3, 6)), jnp.float32)
    history = begin(jnp.asarray([[0], [1], [2]]), jnp.ones(3, jnp.int32), 6)
    settings = Sampling(
        np.array([0.0, 1.0, 0.5]),
        repetition_penalty=np.array([1.5, 1.0, 2.0]),
        presence_penalty=np.array([0.0, 0.25, 1.0]),
        frequency_penalty=0.5,
        logit_bias=np.where(rng.random((3, 6)) < 0.3, -np.inf, 1.0),
        allowed_tokens=rng.random((3, 6)) < 0.9,
        min_tokens=np.array([0, 3, 1]),
        end_tokens=[2],
    )
    batched, keys, positions = per_sequence(3, settings, jax.random.key(0), 4, 6)
    assert keys is not None and positions is not None
    assert {x.shape[0] for x in jax.tree.leaves(batched)} == {3}
    assert batched.logit_bias.shape == batched.end_tokens.shape == (3, 6)
    weights = jax.jit(jax.vmap(process))(logits, batched, history)
    tokens = jax.jit(
        lambda s, h: sample(logits, sampling=s, key=keys, position=positions, history=h)
    )(batched, history)
    for row in range(3):
        one, past = (jax.tree.map(lambda x, r=row: x[r], tree) for tree in (batched, history))
        alone = process(logits[row], one.prepared(6), past)
        np.testing.assert_array_equal(jnp.isfinite(alone), jnp.isfinite(weights[row]))
        kept = np.isfinite(alone)
        np.testing.assert_allclose(alone[kept], weights[row][kept], rtol=1e-6)
        assert kept[int(tokens[row])]
    greedy = per_sequence(3, settings.replace(temperature=0), None, None, 6)
    assert greedy[0].temperature is None and greedy[1:] == (None, None)
    assert {x.shape[0] for x in jax.tree.leaves(greedy[0])} == {3}


def test_lists_must_be_prepared_before_jit():
    def step(settings):
        return sample(jnp.zeros((1, 5)), sampling=settings)

    for settings in (Sampling(logit_bias={1: 2.0}), Sampling(banned_tokens=[1])):
        with pytest.raises(ValueError, match="is traced by jit"):
            jax.jit(step)(settings)
        assert jax.jit(step)(settings.prepared(5)).shape == (1,)
    traced = jax.jit(lambda bias: step(Sampling(logit_bias=bias, banned_tokens=[0])))
    assert traced(jnp.asarray([3.0, 2.0, 1.0, 0.0, 0.0]))[0] == 1


def test_histories_of_other_axes_are_refused_and_needless_ones_ignored():
    history = begin(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32), 5)
    assert sample(jnp.zeros((3, 5)), history=history).shape == (3,)
    with pytest.raises(ValueError, match=r"history counts have shape \(2, 5\), expected \(3, 5\)"):
        sample(jnp.zeros((3, 5)), sampling=Sampling(presence_penalty=1.0), history=history)
    with pytest.raises(ValueError, match="need the history"):
        process(jnp.zeros(5), Sampling(presence_penalty=1.0).prepared())


NOT_A_BOOL: Any = 1
MISTAKES = [
    (Sampling(-0.1), "temperature is -0.1, expected a finite number >= 0 (0 is greedy)"),
    (Sampling(float("nan")), "temperature is nan"),
    (Sampling(float("inf")), "temperature is inf"),
    (Sampling(np.array([0.5, -2.0])), "temperature is -2.0"),
    (Sampling("hot"), "temperature is of type <U3"),
    (Sampling(0, top_p=0.0), "top_p is 0.0, expected a number in (0, 1]"),
    (Sampling(1.0, top_p=1.5), "top_p is 1.5"),
    (Sampling(1.0, min_p=-0.1), "min_p is -0.1, expected a number in [0, 1]"),
    (Sampling(1.0, min_p=1.1), "min_p is 1.1"),
    (Sampling(1.0, top_k=0), "top_k is 0, expected an integer >= 1"),
    (Sampling(1.0, top_k=2.5), "top_k is of type float64, expected an integer >= 1"),
    (Sampling(1.0, top_k=True), "top_k is of type bool"),
    (Sampling(1.0, top_k=np.ones((2, 2), int)), "top_k has shape (2, 2)"),
    (Sampling(1.0, top_p=np.full(3, 0.5)), "top_p has shape (3,), expected one value or (2,)"),
    (
        Sampling(0.0, repetition_penalty=0.0),
        "repetition_penalty is 0.0, expected a number in [1e-6",
    ),
    (Sampling(1.0, repetition_penalty=float("nan")), "repetition_penalty is nan"),
    (Sampling(1.0, presence_penalty=float("inf")), "presence_penalty is inf, expected a number in"),
    (Sampling(1.0, frequency_penalty=[0.0, -1e7]), "frequency_penalty is -10000000.0"),
    (Sampling(1.0, frequency_penalty=np.zeros(3)), "frequency_penalty has shape (3,)"),
    (Sampling(min_tokens=-1), "min_tokens is -1, expected an integer >= 0"),
    (Sampling(min_tokens=1.5), "min_tokens is of type float64"),
    (Sampling(min_tokens=2), "min_tokens has no end_tokens to hold back"),
    (Sampling(min_tokens=2, end_tokens=()), "min_tokens has no end_tokens to hold back"),
    (
        Sampling(min_tokens=2, end_tokens=[5]),
        "end_tokens holds token 5, expected token ids in 0..4",
    ),
    (Sampling(end_tokens=[1]), "end_tokens have no min_tokens to act on: give it, or"),
    (Sampling(exact_top_k=True), "exact_top_k has no top_k to act on"),
    (Sampling(1.0, top_k=2, exact_top_k=NOT_A_BOOL), "exact_top_k is 1, expected True or False"),
    (Sampling(logit_bias={5: 1.0}), "logit_bias holds token 5, expected token ids in 0..4"),
    (Sampling(logit_bias={-1: 1.0}), "logit_bias holds token -1, expected token ids in 0..4"),
    (Sampling(logit_bias={"a": 1.0}), "logit_bias holds 'a', expected token ids"),
    (Sampling(logit_bias={2: float("nan")}), "logit_bias of token 2 is nan"),
    (Sampling(logit_bias={2: float("inf")}), "or -inf to ban the token"),
    (Sampling(logit_bias={2: "x"}), "logit_bias of token 2 is 'x', expected a number"),
    (Sampling(logit_bias={2: True}), "logit_bias of token 2 is True, expected a number"),
    (Sampling(logit_bias=np.array([0, 0, 0, np.nan, 0])), "logit_bias of token 3 is nan"),
    (
        Sampling(logit_bias=np.zeros(4)),
        "logit_bias has shape (4,), expected one value a token: (5,",
    ),
    (
        Sampling(logit_bias=np.zeros((3, 5))),
        "logit_bias has shape (3, 5), expected one value or (2",
    ),
    (Sampling(logit_bias=np.zeros((1, 2, 5))), "logit_bias has shape (1, 2, 5)"),
    (Sampling(logit_bias=1.0), "logit_bias has shape (), expected (V,) or (B, V)"),
    (Sampling(logit_bias=[True] * 5), "logit_bias is of type bool, expected numbers"),
    (Sampling(banned_tokens=[7]), "banned_tokens holds token 7, expected token ids in 0..4"),
    (Sampling(banned_tokens=[1.0]), "banned_tokens holds 1.0, expected token ids"),
    (Sampling(allowed_tokens="01"), "allowed_tokens is '01', expected a sequence of token ids"),
    (Sampling(allowed_tokens=3), "allowed_tokens is 3, expected a sequence of token ids"),
    (Sampling(allowed_tokens=np.ones(4, bool)), "allowed_tokens has shape (4,)"),
    (Sampling(allowed_tokens=[]), "leave no token to draw"),
    (Sampling(allowed_tokens=[1], banned_tokens=[1]), "leave no token to draw"),
    (Sampling(logit_bias=np.full((2, 5), -np.inf)), "leave no token to draw"),
    (Sampling(allowed_tokens=[1], min_tokens=1, end_tokens=[1]), "min_tokens bans the end tokens"),
    (Sampling(1.0, repetition_penalty=1.1), "penalties and min_tokens need the history"),
    (Sampling(min_tokens=1, end_tokens=[1]), "penalties and min_tokens need the history"),
]


@pytest.mark.parametrize("sampling, message", MISTAKES, ids=[m[1][:30] for m in MISTAKES])
def test_mistakes_in_settings_are_one_line_naming_the_option(sampling, message):
    with pytest.raises(ValueError) as error:
        sample(jnp.zeros((2, 5)), sampling=sampling, key=jax.random.key(0), position=1)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"key": None}, "sampling needs a key"),
        ({"position": None}, "sampling needs a position"),
        ({"key": jax.random.PRNGKey(0)}, "key is of type uint32, expected a typed key"),
        ({"key": 7}, "key is of type int, expected a typed key"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, "key has shape (3,)"),
        ({"position": 1.5}, "position is of type float32"),
        ({"position": np.arange(3)}, "position has shape (3,)"),
        ({"logits": jnp.zeros(5)}, "logits have shape (5,)"),
        ({"logits": jnp.zeros((2, 5), jnp.int32)}, "type int32, expected floats"),
    ],
)
def test_mistakes_in_arguments_are_one_line(arguments, message):
    given_arguments = {"key": jax.random.key(0), "position": 1, "logits": jnp.zeros((2, 5))}
    given_arguments |= arguments
    with pytest.raises(ValueError) as error:
        sample(given_arguments.pop("logits"), sampling=Sampling(1.0), **given_arguments)
    assert message in str(error.value) and "\n" not in str(error.value)
