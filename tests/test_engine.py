"""The loop: seeds, stops, budgets, compilation; FC-16, FC-17, FC-18, FC-20, FC-23, FC-26."""

import functools

import byte_model
import jax
import numpy as np
import pytest
from compiling import compilations
from stepping import Surfaces, assert_consistent, choose

from treejax import agreement
from treejax.drafters import Scripted
from treejax.engine import complete, run, stream
from treejax.model import PREFILL_BUCKETS, prefill, prompt_blocks
from treejax.policies import REGISTRY
from treejax.requests import Request, make_requests
from treejax.sampling import Sampling
from treejax.state import init_state
from treejax.steps.publish import publish
from treejax.steps.verify import verify
from treejax.text import TextStream
from treejax.tree import Tree

pytestmark = pytest.mark.compiles_fast

PROMPT = "print(1)"  # its first 19 greedy tokens differ from one another
EVERY_STEP = ((4, 4), (4, 4), (4, 0), (0, 0), (4, 1), (1, 1), (3, 0), (2, 2), (4, 2), (1, 0),
              (3, 3), (0, 0), (2, 0), (4, 3), (3, 1), (2, 1), (3, 2))  # fmt: skip


@functools.cache
def plain(prompt, max_tokens, **settings):
    return complete(
        byte_model.model(), prompt, max_tokens=max_tokens, drafter=None, policy="replay", **settings
    )


@functools.cache
def answer():
    """210 greedy tokens after PROMPT."""
    return plain(PROMPT, 210).tokens


def right(tree, schedule):
    """A drafter that proposes the answer, ``schedule`` of (levels, right ones) at a time."""
    return Scripted(tree=tree, truth=(answer(),), schedule=schedule)


def deep():
    return right("chain8", ((8, 8),))


def varied():
    return right("chain4", EVERY_STEP)


def test_a_drafted_stream_is_plain_and_its_figures_add_up():
    """Every count follows from the schedule: (levels proposed, right ones) of each step."""
    made = complete(byte_model.model(), PROMPT, max_tokens=60, drafter=varied(), policy="wy")
    assert made.tokens == answer()[:60]
    stats, emitted, steps, proposed, accepted = made.stats, 1, 0, 0, 0
    by_depth = [0] * 4
    while emitted < 60:
        levels, good = EVERY_STEP[steps % len(EVERY_STEP)]
        room = 60 - emitted - 1
        levels, good = min(levels, room), min(good, room)
        steps, proposed, accepted = steps + 1, proposed + levels, accepted + good
        for depth in range(good):
            by_depth[depth] += 1
        emitted += good + 1
    assert (stats.tokens, stats.steps) == (60, steps)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (proposed, accepted)
    assert stats.accepted_per_pos == by_depth
    assert stats.finish_reason == made.finish_reason == "length"
    assert stats.policy == "wy" and stats.drafter == "scripted" and stats.tree == "chain4"
    assert made.text == byte_model.tokenizer().decode(list(made.tokens))


def test_stream_yields_what_complete_returns():
    """Pieces add up to the Generation that the stream returns; drafted marks candidates."""
    steps, pieces = stream(byte_model.model(), PROMPT, max_tokens=60, drafter=varied()), []
    while True:
        try:
            pieces.append(next(steps))
        except StopIteration as stop:
            whole = stop.value
            break
    assert whole.tokens == answer()[:60]
    assert tuple(t for piece in pieces for t in piece.tokens) == whole.tokens
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[0].drafted == (False,)
    assert sum(sum(piece.drafted) for piece in pieces) == whole.stats.num_accepted_tokens
    assert all(not piece.drafted[-1] for piece in pieces)
    assert all(len(p.texts) == len(p.tokens) == len(p.drafted) for p in pieces)


def served_by(compiled):
    """The programs among them that run the model."""
    programs = "absorb", "prime", "adopt", "steps"
    return {name for name in compiled if name in {f"jit({program})" for program in programs}}


# FC-16


@functools.cache
def sampled(prompt, seed, drafter="mtp"):
    tree = None if drafter is None else "chain4"
    return complete(
        byte_model.model(),
        prompt,
        max_tokens=40,
        drafter=drafter,
        tree=tree,
        sampling=Sampling(temperature=1.0, top_p=0.95),
        seed=seed,
        logprobs=True,
    )


def test_fc16_a_seeded_stream_is_the_same_alone_in_a_batch_and_later():
    """FC-16: the stream depends on prompt, settings and seed alone; a new seed, a new stream."""
    alone = sampled(PROMPT, 7)
    assert alone.tokens == sampled(PROMPT, 7, None).tokens
    for other in range(3):
        assert sampled("x = 1", other).tokens != alone.tokens
    sampled.cache_clear()
    assert sampled(PROMPT, 7).tokens == alone.tokens  # after other requests
    assert sampled(PROMPT, 8).tokens != alone.tokens

    prompts = ["def", PROMPT, "import os, sys"]
    settings = {"max_tokens": 40, "drafter": "mtp", "tree": "chain4", "logprobs": True}
    sampling = Sampling(temperature=1.0, top_p=0.95)
    batch = complete(byte_model.model(), prompts, sampling=sampling, seed=7, **settings)
    assert batch[1].tokens == alone.tokens
    # Rows of a batch are rounded differently, and differ from solo rows by no more than that.
    np.testing.assert_allclose(batch[1].logprobs, alone.logprobs, atol=1e-3)
    mixed = complete(byte_model.model(), prompts, sampling=sampling, seed=[1, 7, 8], **settings)
    assert mixed[1].tokens == alone.tokens
    assert mixed[0].tokens != batch[0].tokens


@pytest.mark.parametrize("seed", [-1, 2**32, [1, 2]])
def test_fc16_a_seed_that_cannot_be_kept_apart_is_refused(seed):
    """FC-16: no silent truncation of a seed to 32 bits, and one a prompt or one for all."""
    with pytest.raises(ValueError, match="seed"):
        complete(byte_model.model(), "x", seed=seed)


# FC-17


def request(budget, stop_ids=(), stops=()):
    return Request([1], budget, set(stop_ids), TextStream(byte_model.tokenizer(), stops))


def test_fc17_a_stop_before_the_cap_wins():
    """FC-17: a step commits [10, 11, STOP, 20, 21, 22] with cap 5: three tokens, reason stop."""
    served = request(5, stop_ids=[12])
    texts = served.take([10, 11, 12, 20, 21, 22], [0.0] * 6)
    assert served.tokens == [10, 11, 12] and served.stats.finish_reason == "stop"
    assert len(texts) == 3 and served.stats.tokens == 3
    assert served.text == byte_model.tokenizer().decode([10, 11])
    capped = request(2, stop_ids=[12])
    capped.take([10, 11, 12], [0.0] * 3)
    assert capped.tokens == [10, 11] and capped.stats.finish_reason == "length"
    both = request(3, stop_ids=[12])
    both.take([10, 11, 12], [0.0] * 3)
    assert both.stats.finish_reason == "stop"


@pytest.mark.parametrize("depth", range(1, 9))
def test_fc17_a_stop_inside_an_accepted_path_ends_where_plain_ends(depth):
    """FC-17: the token at each depth of an accepted path of 8 is declared the end token."""
    at = 9 + depth  # the first token, then a step of nine: the second step's candidates follow
    token = answer()[at]
    assert token not in answer()[:at]
    expected = plain(PROMPT, 40, stop=(token,))
    made = complete(
        byte_model.model(), PROMPT, max_tokens=40, drafter=deep(), policy="wy", stop=(token,)
    )
    assert made.tokens == expected.tokens == answer()[: at + 1]
    assert made.text == expected.text
    assert made.finish_reason == expected.finish_reason == "stop"
    assert made.stats.tokens == at + 1
    assert made.stats.num_accepted_tokens == 8 + depth  # the stop is a candidate, nothing after it
    assert made.stats.steps == 2


def test_fc17_a_stop_string_across_tokens_ends_text_and_stream():
    """FC-17: a stop string inside an accepted path; nothing of it or after it is streamed."""
    whole = plain(PROMPT, 40).text
    at = next(i for i in range(12, 30) if whole.find(whole[i : i + 3]) == i)
    settings = {"max_tokens": 40, "stop": (whole[at : at + 3],)}
    expected = plain(PROMPT, **settings)
    made = complete(byte_model.model(), PROMPT, drafter=deep(), policy="wy", **settings)
    streamed = stream(byte_model.model(), PROMPT, drafter=deep(), policy="wy", **settings)
    assert "".join(piece.text for piece in streamed) == made.text == expected.text == whole[:at]
    assert made.tokens == expected.tokens and made.finish_reason == "stop"


def test_fc17_the_models_own_end_tokens_and_those_given_end_a_text():
    """FC-17: end tokens of the configuration are always among the stops."""
    (served,) = make_requests(byte_model.model(eos=(11,)), ["x"], 5, (12,))
    served.take([10, 11], [0.0, 0.0])
    assert served.stats.finish_reason == "stop"
    (served,) = make_requests(byte_model.model(eos=(11,)), ["x"], 5, (12,))
    served.take([10, 12], [0.0, 0.0])
    assert served.stats.finish_reason == "stop"


# FC-18


@pytest.mark.parametrize("budget", [0, 1, 8])
def test_fc18_exactly_as_many_tokens_as_asked_for(budget):
    """FC-18: max tokens 0, 1 and 8 with depth 4 all acceptable; reported equals delivered."""
    drafter = varied()
    with compilations() as compiled:
        made = complete(byte_model.model(), PROMPT, max_tokens=budget, drafter=drafter)
    assert made.tokens == answer()[:budget]
    assert made.stats.tokens == budget and made.finish_reason == "length"
    if budget == 0:
        assert not served_by(compiled)  # no model call
        assert made.stats.policy in REGISTRY and made.stats.drafter == "scripted"
    if budget == 8:  # one from the prompt, then 4 + 1, then what is left
        assert made.stats.steps == 2 and made.stats.num_accepted_tokens == 5


def test_fc18_a_text_fills_the_context_and_not_one_row_more():
    """FC-18: context 64, prompt 60, depth 8, max tokens 100: 64 in total, as in plain."""
    model = byte_model.model(context=64)
    prompt = list(np.random.default_rng(0).integers(0, 256, 60))
    (served,) = make_requests(model, [prompt], 100, ())
    assert served.budget == 4
    plainly = agreement.record(model, [prompt], 4, policy="wy")[0]
    truth = (plainly.tokens + (1, 2, 3, 4, 5, 6),)
    drafter = Scripted(tree="chain8", truth=truth, schedule=((8, 8),))
    state = agreement.drain(run(model, [served], "wy", drafter, None, None, 0))
    assert tuple(served.tokens) == plainly.tokens and served.stats.finish_reason == "length"
    assert served.stats.num_draft_tokens == served.stats.num_accepted_tokens == 2
    assert state is not None and state.max_length == 64 and int(state.length[0]) == 63
    drafted = agreement.Recording(tuple(served.tokens), served.stats, state)
    agreed = agreement.compare(model, prompt, drafted, plainly)
    assert agreed.ok and agreed.surfaces, agreed  # no committed row was overwritten


def test_fc18_a_prompt_that_fills_the_context_is_refused():
    """FC-18: there is no room for a single token; the message says what to do."""
    with pytest.raises(ValueError, match="64 tokens and the model's context is 64; shorten it"):
        complete(byte_model.model(context=64), [1] * 64)


# FC-20, FC-26


@pytest.mark.parametrize("drafter", ["mtp", "mtp+suffix"])
def test_fc20_the_mtp_drafter_without_its_tensors_fails_before_generating(drafter):
    """FC-20: asking for the MTP drafter of a model without mtp.* tensors, before any token."""
    with compilations() as compiled:
        with pytest.raises(ValueError, match=r"no mtp\.\* tensors"):
            next(stream(byte_model.model(mtp=False), PROMPT, drafter=drafter))
    assert not served_by(compiled)


def test_fc26_the_default_drafter_is_one_that_the_model_can_have():
    """FC-26: without an MTP head the default drafts by suffix, and the figures say so."""
    made = complete(byte_model.model(mtp=False), PROMPT, max_tokens=0)
    assert (made.stats.drafter, made.stats.tree) == ("suffix", "best16x8")
    made = complete(byte_model.model(), PROMPT, max_tokens=0)
    assert (made.stats.drafter, made.stats.tree) == ("mtp+suffix", "hydra8")
    with pytest.raises(ValueError, match="no drafter to fill it"):
        complete(byte_model.model(), PROMPT, drafter=None, tree="chain3")


# FC-23


def test_fc23_nothing_compiles_after_the_first_step():
    """FC-23: 200 tokens, 0 to 4 accepted of 0 to 4 drafted, log-probabilities on and off."""
    model = byte_model.model()
    complete(model, PROMPT, max_tokens=2, drafter=varied())
    (warm,) = make_requests(model, [PROMPT], 200, ())
    with compilations() as compiled:
        off = complete(model, PROMPT, max_tokens=200, drafter=varied())
        on = complete(model, PROMPT, max_tokens=200, drafter=varied(), logprobs=True)
        agreement.drain(run(model, [warm], "auto", varied(), None, None, 0, warm_up=True))
    assert not compiled
    assert tuple(warm.tokens) == off.tokens  # warming up had no effect
    assert off.tokens == on.tokens == answer()[:200]
    assert off.logprobs is None and len(on.logprobs) == 200
    assert all(value < 0 for value in on.logprobs)
    assert [count > 0 for count in off.stats.accepted_per_pos] == [True] * 4


def test_fc23_no_more_prefill_variants_than_buckets():
    """FC-23: prompt lengths 1 to 64 run through one program; longer ones add the other buckets."""
    model = byte_model.model()
    complete(model, PROMPT, max_tokens=2, drafter=varied())
    with compilations() as compiled:
        for length in range(1, 65):
            complete(model, [5] * length, max_tokens=1, drafter=varied())
    assert not compiled
    shapes = {
        block.shape[1]
        for length in range(1, 3000)
        for block, _ in prompt_blocks(np.zeros((1, length), np.int32), np.array([length]))
    }
    assert shapes == set(PREFILL_BUCKETS)


def test_fc23_policies_drafters_and_settings_share_what_takes_in_the_prompt():
    """FC-23: the model's part of a prompt is compiled once, whatever decodes afterwards."""
    model, penalised = byte_model.model(), Sampling(temperature=1.0, presence_penalty=0.5)
    complete(model, PROMPT, max_tokens=2, policy="wy", drafter="mtp", tree="chain2")
    with compilations() as compiled:
        how = {"policy": "ring", "drafter": "suffix", "tree": "chain2", "sampling": penalised}
        complete(model, PROMPT, max_tokens=2, **how)
    assert served_by(compiled) == {"jit(prime)", "jit(adopt)", "jit(steps)"}


def test_fc23_all_that_a_rollback_needs_stays_readable():
    """FC-23: public steps donate nothing: going back to the old state gives the old result."""
    model, ids = byte_model.model(), [[5, 7, 11]]
    _, old = prefill(model, init_state(model.config, 1, 64, policy="wy"), ids, [3])
    before = Surfaces(old).row(0)
    tree = Tree.from_parents([1, 2, 3, 4], [-1, 0, 1, 0])
    out, scratch = verify(model, old, tree)
    new = publish(model, old, tree, scratch, choose([[0, 1, 2]], 3))
    again, _ = verify(model, old, tree)
    np.testing.assert_array_equal(np.asarray(out.logits), np.asarray(again.logits))
    assert_consistent(Surfaces(old).row(0), before, 1e-30)  # the same bytes
    assert int(new.length[0]) == 6
    for leaf in jax.tree.leaves((old, tree, scratch, out, new)):
        np.asarray(leaf)  # raises if deleted
    for leaf in jax.tree.leaves(model.params):
        assert not leaf.is_deleted()  # the loop gave its drafters references to these
