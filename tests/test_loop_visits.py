"""Steps a visit: any number of them gives one step's stream, figures and state."""

import dataclasses
import functools

import byte_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compilations

from treejax import agreement, loop
from treejax.drafters import MTP, MTPSuffix, Scripted, Suffix
from treejax.engine import complete, stream
from treejax.loop import run
from treejax.model import prompt_blocks
from treejax.policies import make_policy
from treejax.requests import Request
from treejax.sampling import Sampling
from treejax.state import with_policy
from treejax.steps.many import MOST_STEPS
from treejax.steps.prompt import PROMPT_POLICY, Intake, first_token
from treejax.steps.rules import REGISTRY as RULES
from treejax.steps.together import Carry, step
from treejax.text import TextStream

PROMPTS = tuple(tuple(text.encode()) for text in ("print(1)", "xyxyxyxy", "if a:"))
BUDGETS = 34, 9, 25
MANY = 2, 5, 16
WARM = Sampling(temperature=0.9, top_k=30)
PENALISED = Sampling(0.9, presence_penalty=0.5, min_tokens=8, end_tokens=(5, 6))


@functools.cache
def plain():
    """The greedy continuations, as long as the largest budget."""
    how = {"max_tokens": BUDGETS[0], "policy": "wy", "drafter": None}
    return [made.tokens for made in complete(byte_model.model(), list(PROMPTS), **how)]


def scripted():
    schedule = ((3, 3), (4, 2), (0, 0), (4, 4), (2, 0))
    return Scripted(tree="chain4", truth=tuple(plain()), schedule=schedule)


def requests_for(ends=(set(), {7}, set()), stops=()):
    """Three of unequal budgets."""
    return [
        Request(list(prompt), budget, mine, TextStream(byte_model.tokenizer(), stops))
        for prompt, budget, mine in zip(PROMPTS, BUDGETS, ends, strict=True)
    ]


def serve(requests, drafter, count, sampling=None, policy="wy"):
    how = (policy, drafter, None, sampling, [3, 4, 5], True)
    return agreement.drain(run(byte_model.model(), requests, *how, steps_per_visit=count))


def ends_for(drafter, sampling, policy):
    """End tokens of which the third text has one in its middle, and not before."""
    requests = requests_for()
    serve(requests, drafter, 7, sampling, policy)
    text = requests[2].tokens
    found = next(token for at, token in enumerate(text) if at > 10 and token not in text[:at])
    return set(), {7}, {found, 300}


def figures(stats):
    """All counts that do not hang on the clock or on visits."""
    apart = "prefill_s decode_s compile_s wait_s idle_s visits steps_per_visit".split()
    return {k: v for k, v in dataclasses.asdict(stats).items() if k not in apart}


def assert_same_state(state, other):
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@pytest.mark.parametrize(
    ("drafter", "sampling", "policy"),
    [
        (lambda: None, None, "wy"),
        (lambda: MTP("2,1,1"), WARM, "ring"),
        (lambda: Suffix("chain4"), None, "wy"),
        (lambda: MTPSuffix("hydra8"), PENALISED, "wy"),
        (scripted, None, "wy"),
    ],
    ids=["plain", "mtp", "suffix", "mtp+suffix", "scripted"],
)
def test_any_number_of_steps_gives_one_steps_stream_figures_and_state(drafter, sampling, policy):
    """Unequal budgets, an end token in the middle of a visit; all is the same to the last bit."""
    ends = ends_for(drafter(), sampling, policy)
    one = requests_for(ends)
    state = serve(one, drafter(), 1, sampling, policy)
    assert [len(r.tokens) for r in one[:2]] == list(BUDGETS[:2])
    assert one[2].stats.finish_reason == "stop" and 11 < len(one[2].tokens) < BUDGETS[2]
    assert one[0].stats.visits == one[0].stats.steps and one[0].stats.steps_per_visit == 1
    with compilations() as compiled:
        for count in MANY:
            many = requests_for(ends)
            after = serve(many, drafter(), count, sampling, policy)
            assert [r.tokens for r in many] == [r.tokens for r in one]
            assert [r.text for r in many] == [r.text for r in one]
            assert [r.logprobs for r in many] == [r.logprobs for r in one]
            assert [figures(r.stats) for r in many] == [figures(r.stats) for r in one]
            assert_same_state(after, state)
            longest = many[0].stats
            assert longest.visits == -(-longest.steps // count)
            assert longest.steps_per_visit == min(count, longest.steps)
    assert not compiled


def by_hand(requests, drafter, sampling, policy):
    """One step at a time by the program of one step, limits from the host: the state."""
    model = byte_model.model()
    sampling = loop.settle(model, requests, sampling)
    keys = loop._keys([3, 4, 5], 3)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    tokens = np.zeros((3, lengths.max()), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    rows = loop.state_rows(model, max(lengths) + max(BUDGETS))
    draft = drafter.init(model, 3, rows)
    state = loop.init_state(model.config, 3, rows, model.dtype, PROMPT_POLICY)
    intake = Intake(model.config, model.params, drafter, draft.weights)
    begun = state, draft.memory, jnp.zeros((3, model.config.vocab_size))
    state, memory, logits = intake(begun, prompt_blocks(tokens, lengths))
    history = loop._histories(tokens, lengths, model.config.vocab_size, sampling)
    want = np.bool_(True)
    pending, logp = first_token(logits, sampling, keys, state.length, history, want)
    for request, token, value in zip(requests, pending.tolist(), logp.tolist(), strict=True):
        request.take([token], [value])
    carry = Carry(with_policy(state, make_policy(policy, "xla")), memory, pending, history)
    while not all(request.finished for request in requests):
        limits = np.array([request.depth_limit for request in requests], np.int32)
        carry, emission = step(
            *(model.config, drafter, RULES["match"], model.params, draft.weights, carry, limits),
            *(keys, sampling, want),
        )
        for row, request in enumerate(requests):
            if not request.finished:
                many = jax.tree.map(lambda rows: np.asarray(rows)[None], emission)
                request.follow(many, 0, row)
    return carry.state


@pytest.mark.parametrize("sampling", [None, WARM], ids=["greedy", "sampled"])
def test_the_device_counts_as_the_host_would(sampling):
    """Budgets and end tokens kept on the device against limits that the host sets at every step:
    what is emitted, and what the state holds, is the same."""
    drafter, policy = (scripted(), "wy") if sampling is None else (MTP("2,1,1"), "ring")
    ends = ends_for(drafter, sampling, policy)
    made, expected = requests_for(ends), requests_for(ends)
    state = serve(made, drafter, 5, sampling, policy)
    wanted = by_hand(expected, drafter, sampling, policy)
    assert [r.tokens for r in made] == [r.tokens for r in expected]
    assert [r.stats.steps for r in made] == [r.stats.steps for r in expected]
    for row in range(3):
        distances = agreement.compare_states(state, wanted, row, row)  # and equal lengths
        assert max(distances.values()) < 1e-6
    for mine, theirs in zip(made, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-5)


def stop_string(text, least):
    """Three characters of a text that it does not have before, past ``least`` characters."""
    return next(
        text[at : at + 3]
        for at in range(least, len(text))
        if text.find(text[at : at + 3]) == at and text[at : at + 3].isascii()
    )


@pytest.mark.parametrize("count", [1, *MANY])
def test_a_stop_string_ends_a_text_at_plains_place_whatever_the_visits(count):
    """What came after it is dropped; what it cost is counted, and the state is still a true one."""
    model, prompt, budget = byte_model.model(), list(PROMPTS[0]), 60
    whole = complete(model, prompt, max_tokens=budget, drafter=None, policy="wy")
    stop = stop_string(whole.text, 14)
    request = Request(prompt, budget, set(), TextStream(byte_model.tokenizer(), (stop,)))
    served = run(model, [request], "wy", None, None, None, 0, steps_per_visit=count)
    pieces, state = [], None
    while state is None:
        try:
            pieces.extend(next(served))
        except StopIteration as over:
            state = over.value
    assert request.text == whole.text[: whole.text.index(stop)]
    assert tuple(request.tokens) == whole.tokens[: len(request.tokens)]
    assert tuple(t for piece in pieces for t in piece.tokens) == tuple(request.tokens)
    assert "".join(piece.text for piece in pieces) == request.text
    assert all(piece.tokens for piece in pieces)
    stats = request.stats
    assert stats.finish_reason == "stop" and stats.steps == len(request.tokens) - 1
    made = min((-(-stats.steps // count) + 1) * count, budget - 1)  # that visit and one more
    assert stats.wasted_steps == made - stats.steps
    assert int(state.length[0]) == len(prompt) + made
    (longer,) = agreement.record(model, [prompt], made + 1, policy="wy")
    assert not any(agreement.compare_states(state, longer.state).values())


def test_a_stop_string_in_a_batch_leaves_the_others_alone():
    one = requests_for()
    state = serve(one, None, 1)
    stop = stop_string(one[0].text, 8)
    assert stop not in one[1].text + one[2].text
    made = requests_for(stops=(stop,))
    after = serve(made, None, 5)
    assert made[0].stats.finish_reason == "stop" and made[0].stats.wasted_steps > 0
    assert [r.tokens for r in made[1:]] == [r.tokens for r in one[1:]]
    assert [r.stats.wasted_steps for r in made[1:]] == [0, 0]
    held = int(after.length[0])
    assert held == len(PROMPTS[0]) + made[0].stats.steps + made[0].stats.wasted_steps
    for row in (1, 2):
        assert not any(agreement.compare_states(after, state, row, row).values())


def test_nothing_compiles_after_a_warm_up_with_other_numbers_of_steps():
    """Steps a visit, budgets and end tokens are data; so is a warm-up, which changes nothing."""
    model = byte_model.model()
    how = {"drafter": None, "policy": "wy", "logprobs": True}
    complete(model, list(PROMPTS[0]), max_tokens=2, **how)
    with compilations() as compiled:
        for count, tokens, stop in ((1, 30, ()), (7, 40, (9,)), (MOST_STEPS, 33, (1, 2, 3))):
            more = {"max_tokens": tokens, "stop": stop, "steps_per_visit": count}
            complete(model, list(PROMPTS[0]), **how, **more)
        request = Request(list(PROMPTS[0]), 30, set(), TextStream(None))
        ways = ("wy", None, None, None, 0)
        warmed = agreement.drain(run(model, [request], *ways, warm_up=True, steps_per_visit=3))
    assert not compiled
    (cold,) = agreement.record(model, [PROMPTS[0]], 30, policy="wy")
    assert cold.tokens == tuple(request.tokens)
    assert not any(agreement.compare_states(warmed, cold.state).values())  # to the last bit


def test_a_stream_comes_a_step_at_a_time_whatever_the_visits():
    how = {"max_tokens": 34, "drafter": None, "policy": "wy", "steps_per_visit": 16}
    pieces = list(stream(byte_model.model(), list(PROMPTS[0]), **how))
    assert [piece.tokens for piece in pieces] == [(token,) for token in plain()[0]]
