"""Plain decoding as audits record it, and the prefixes that they start from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stepping
import tiny
from compiling import compilations

import treejax
from treejax.audit.intake import take_in
from treejax.audit.prefixes import MODULES, digest, prefixes
from treejax.audit.reference import decode
from treejax.drafters import MTP, Plain
from treejax.model import Model, prefill
from treejax.sampling import Sampling
from treejax.state import init_state

MODEL = Model(tiny.random_params(tiny.CONFIG), tiny.CONFIG)  # nothing is compiled for it
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2]]
COUNT, ROWS = 6, 32
KEYS = jax.vmap(jax.random.key)(jnp.arange(2))


@pytest.fixture(scope="module")
def plain():
    return decode(
        *(MODEL, PROMPTS, COUNT),
        sampling=Sampling(),
        keys=KEYS,
        max_length=ROWS,
        drafter=MTP("chain3"),
    )


def test_every_position_is_bitwise_that_of_decoding_by_hand(plain):
    model, lengths = MODEL, [len(prompt) for prompt in PROMPTS]
    tokens = np.zeros((2, max(lengths)), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    state = init_state(model.config, 2, ROWS, policy="replay")
    out, state = prefill(model, state, tokens, lengths)
    logits = out.logits
    assert plain.start.tolist() == lengths
    for i in range(COUNT + 1):
        assert np.array_equal(plain.logits[i], logits)
        assert np.array_equal(plain.R[i], state.recurrent)
        assert np.array_equal(plain.conv[i], state.conv)
        best = np.argsort(-np.asarray(logits), axis=1)
        assert np.array_equal(plain.tokens[:, i], best[:, 0])
        assert np.array_equal(plain.second[i], best[:, 1])
        margin = np.take_along_axis(np.asarray(logits), best[:, :2], axis=1)
        assert np.allclose(plain.margin[i], margin[:, 0] - margin[:, 1], atol=1e-5)
        if i < COUNT:
            logits, state = stepping.decode(model, state, plain.tokens[:, i])
    for b, end in enumerate(np.asarray(state.length)):
        assert np.array_equal(plain.keys[:, b, :end], state.keys[:, b, :end])
        assert np.array_equal(plain.values[:, b, :end], state.values[:, b, :end])


def test_the_drafter_knows_every_position(plain):
    memory = plain.memory
    for i in range(COUNT + 1):
        assert (memory.rows[i] + memory.count[i]).tolist() == (plain.start + i).tolist()


def test_a_sampled_stream_is_that_of_the_loop():
    model, sampling = MODEL, Sampling(temperature=1.5, presence_penalty=0.5)
    made = decode(model, PROMPTS, COUNT, sampling=sampling, keys=KEYS, max_length=ROWS)
    texts = treejax.complete(
        *(model, PROMPTS),
        max_tokens=COUNT + 1,
        policy="replay",
        drafter=None,
        sampling=sampling,
        seed=[0, 1],
    )
    assert made.tokens.tolist() == [list(text.tokens) for text in texts]
    assert (made.margin > 0).all()


def test_the_models_part_of_a_prompt_is_one_program_for_all_drafters():
    model = MODEL
    rooms = [take_in(model, PROMPTS, Plain(), max_length=48)]
    with compilations() as seen:
        rooms += [take_in(model, PROMPTS, MTP(tree), max_length=48) for tree in ("chain2", "2,1")]
    assert "jit(prefill_block)" not in seen and seen["jit(_prime)"] == 2
    a, b, c = (np.asarray(start.logits) for start in rooms)
    assert np.array_equal(a, b) and np.array_equal(b, c)


def test_prefixes_of_the_splits_are_disjoint_and_come_again():
    assert not set(MODULES["calibration"]) & set(MODULES["held-out"])
    for model in (treejax.load_model(), MODEL):
        held, other = (prefixes(model, split, 4, 40, 3) for split in ("held-out", "calibration"))
        assert [len(text) for text in held + other] == [40] * 8
        assert len({tuple(text) for text in held + other}) == 8
        assert held == prefixes(model, "held-out", 4, 40, 3)
        assert held != prefixes(model, "held-out", 4, 40, 4)
        assert digest(held) != digest(other)


def test_prefixes_that_cannot_be_had_are_refused():
    model = treejax.load_model()
    with pytest.raises(ValueError, match="split is 'test', expected one of"):
        prefixes(model, "test", 1, 10, 0)
    with pytest.raises(ValueError, match="ask for shorter ones"):
        prefixes(model, "held-out", 1, 10**6, 0)
    with pytest.raises(ValueError, match="expected both to be 1 or more"):
        prefixes(model, "held-out", 0, 10, 0)
