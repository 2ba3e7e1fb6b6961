"""What "the same as plain" means, and that a difference is caught; FC-22."""

import dataclasses
import functools

import byte_model
import numpy as np
import pytest

from treejax import agreement
from treejax.agreement import Agreement, Recording, compare, compare_states, plain_scores, record
from treejax.model import prefill
from treejax.policies import WY
from treejax.sampling import Sampling
from treejax.state import init_state
from treejax.stats import Stats

PROMPT = [112, 114, 105, 110, 116]
SAMPLED = Sampling(temperature=1.3, top_p=0.99)
TWIN = 129  # the vocabulary of 258 is two halves with the same logits


@functools.cache
def twins():
    """A model in which token t and token t + 129 tie exactly, at every position."""
    model = byte_model.model()
    head = model.params["lm_head"]
    doubled = head.at[TWIN:].set(head[:TWIN])
    return dataclasses.replace(model, params=model.params | {"lm_head": doubled})


@functools.cache
def plain():
    """60 greedy tokens of the model of twins."""
    return record(twins(), [PROMPT], 60, policy="wy")[0]


def test_fc22_ties_go_to_the_lowest_id_on_every_path():
    """FC-22: exact ties at every position; prompt, plain and drafted steps all take the lower."""
    (drafted,) = record(twins(), [PROMPT], 60, policy="wy", drafter="mtp", tree="2,2")
    assert drafted.tokens == plain().tokens
    assert max(plain().tokens) < TWIN
    agreed = compare(twins(), PROMPT, drafted, plain())
    assert agreed.ok and agreed.pair is None and agreed.surfaces, agreed
    assert str(agreed).startswith("equal 60/60")


def other(index, token):
    """The plain recording with one token exchanged: what a drafted run might have emitted."""
    tokens = list(plain().tokens)
    tokens[index] = token
    return plain()._replace(tokens=tuple(tokens))


def test_fc22_a_near_tie_is_reported_and_does_not_fail():
    """FC-22: two tokens within 1e-5 under plain: reported with place and margin."""
    agreed = compare(twins(), PROMPT, other(7, plain().tokens[7] + TWIN), plain())
    assert agreed.ok and agreed.near_tie
    assert (agreed.equal, agreed.compared, agreed.margin) == (7, 60, 0.0)
    assert "near tie at token 7 of 60" in str(agreed)
    assert agreed.surfaces == {}  # what follows a near tie is another text


def test_fc22_the_margin_is_that_of_a_users_own_policy():
    """FC-22: of the object that decoded, not of the policy that its name may be another's of."""
    used = []

    class Mine(WY):
        def commit(self, carry, scratch, path):
            used.append(type(self))
            return super().commit(carry, scratch, path)

    (own,) = record(twins(), [PROMPT], 4, policy=Mine())
    assert own.stats.policy == "wy (Mine)" and own.tokens == plain().tokens[:4]
    used.clear()
    drafted = other(2, plain().tokens[2] + TWIN)
    agreed = compare(twins(), PROMPT, drafted._replace(tokens=drafted.tokens[:4]), own)
    assert agreed.near_tie and agreed.equal == 2 and used


def test_fc22_a_wrong_token_fails_with_its_margin():
    """FC-22: the margin is the difference of the two logits under plain decoding."""
    wrong = (plain().tokens[7] + 1) % TWIN
    agreed = compare(twins(), PROMPT, other(7, wrong), plain())
    assert not agreed.ok and not agreed.near_tie
    assert "DIFFERS at token 7 of 60" in str(agreed)
    text = np.array([[*PROMPT, *plain().tokens[:7]]])
    out, _ = prefill(twins(), init_state(twins().config, 1, 256, policy="wy"), text, [12])
    logits = np.asarray(out.logits[0])
    # Prefilled at once, decoded token by token: logits near 10, rounding near 1e-5.
    assert abs(agreed.margin - (logits[plain().tokens[7]] - logits[wrong])) < 1e-3


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_fc22_scores_are_those_that_plain_decoding_took_the_largest_of(sampling):
    """FC-22: noise and filters included: the argmax is the token that plain decoding emitted."""
    (made,) = record(twins(), [PROMPT], 60, policy="wy", sampling=sampling, seed=5)
    for index in (0, 1, 17):
        scores = plain_scores(twins(), PROMPT, made.tokens[:index], "wy", sampling, 5)
        assert int(np.argmax(scores)) == made.tokens[index]
    if sampling is not None:
        assert made.tokens != plain().tokens


def outcome(dtype, margin):
    allowed = agreement.NEAR_TIE[dtype]
    return Agreement(60, 7, (1, 2), margin, allowed, {}, agreement.STATE_TOLERANCE[dtype])


def test_fc22_bfloat16_allows_rounding_and_not_nats():
    """FC-22: in bfloat16 a first difference within the stated margin is allowed, nats are not."""
    assert outcome("bfloat16", 0.01).ok and not outcome("bfloat16", 2.0).ok
    assert not outcome("float32", 0.01).ok
    assert outcome("float32", float("inf")).as_dict()["margin"] is None  # JSON has no infinity


def test_fc22_state_differences_are_caught_in_every_surface():
    """FC-22: indices and lengths exactly, surfaces within the envelope, junk past the end not."""
    state = plain().state
    assert state is not None
    assert compare_states(state, state) == {"R": 0.0, "C": 0.0, "K": 0.0}
    last = int(state.length[0]) - 1
    faults = {
        "R": state.replace(recurrent=state.recurrent * 1.0001),
        "C": state.replace(conv=state.conv.at[0, 0, 0].add(0.01)),
        "K": state.replace(values=state.values.at[0, 0, last].add(0.01)),
    }
    for name, wrong in faults.items():
        distances = compare_states(wrong, state)
        assert [n for n, d in distances.items() if d > 3e-5] == [name], distances
        agreed = compare(twins(), PROMPT, plain()._replace(state=wrong), plain())
        assert not agreed.ok and "NOT within 3e-05" in str(agreed)
    junk = state.replace(keys=state.keys.at[:, :, last + 1 :].set(9.0))
    assert not any(compare_states(junk, state).values())
    with pytest.raises(ValueError, match="hold 63 and 64 tokens"):
        compare_states(state.replace(length=state.length - 1), state)


def test_a_comparison_needs_as_many_plain_tokens():
    """A plain run that is too short cannot vouch for the rest."""
    short = Recording(plain().tokens[:5], Stats(), None)
    with pytest.raises(ValueError, match="5 plain tokens for 60"):
        compare(twins(), PROMPT, plain(), short)
    agreed = compare(twins(), PROMPT, short, plain())
    assert agreed.ok and "no state to compare" in str(agreed)
