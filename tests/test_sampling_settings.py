"""Settings: what is data and what is static, neutral values, and one line for every mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treejax.sampling import Sampling, sample


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
    assert once.prepared() == once
    assert Sampling(0, top_k=3, top_p=0.5).prepared() == Sampling(temperature=None)
    kept = Sampling([0.0, 0.0], top_p=np.ones(2)).prepared()
    assert kept.temperature.shape == (2,) and kept.top_p.dtype == np.float32


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
    (Sampling(0.0, repetition_penalty=1.1), "repetition_penalty is not supported yet"),
    (Sampling(1.0, presence_penalty=0.5), "presence_penalty is not supported yet"),
    (Sampling(1.0, frequency_penalty=np.zeros(2)), "frequency_penalty is not supported yet"),
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
