"""Sampling settings and acceptance rules through the whole loop; FC-13, FC-15."""

import dataclasses

import numpy as np
import pytest
import tiny

from treejax import agreement
from treejax.drafters import MTP, ResponseStore, Suffix
from treejax.engine import complete
from treejax.model import Model
from treejax.sampling import Sampling

pytestmark = pytest.mark.compiles_fast

PROMPTS = [[5, 9, 2, 9, 2, 11], [7, 7, 3]]
EVERYTHING = Sampling(
    temperature=0.9,
    top_k=30,
    top_p=0.95,
    min_p=0.001,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias={3: 2.0, 4: -100.0},
    banned_tokens=(6, 8),
    min_tokens=12,
)


def serve(sampling, drafter, prompts=PROMPTS, max_tokens=40, **more):
    settings = {"policy": "wy", "max_tokens": max_tokens, "sampling": sampling} | more
    return complete(tiny.model(), prompts, drafter=drafter, **settings)


def test_every_option_at_once_gives_plains_text():
    """FC-15: bias, bans, penalties, minimum length and filters, drafted and plain, in a batch."""
    model = Model(tiny.model().params, dataclasses.replace(tiny.CONFIG, eos_token_ids=(60,)))
    settings = {"policy": "wy", "max_tokens": 40, "sampling": EVERYTHING}
    drafted = complete(model, PROMPTS, drafter=MTP("2,1,1"), **settings)
    plain = complete(model, PROMPTS, drafter=None, **settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    emitted = {token for g in plain for token in g.tokens}
    assert emitted and not emitted & {4, 6, 8}
    assert all(60 not in g.tokens[:12] for g in plain)
    assert sum(g.stats.num_accepted_tokens for g in drafted) > 0


def test_greedy_penalties_move_the_argmax():
    """FC-15: at temperature 0 the penalised argmax, the same with a tree."""
    penalised = Sampling(repetition_penalty=1.8, frequency_penalty=1.0)
    drafted, plain = serve(penalised, MTP("2,1,1")), serve(penalised, None)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    repeats = [len(set(g.tokens)) for g in serve(Sampling(), None)]
    assert min(len(set(g.tokens)) for g in plain) > max(repeats)


def test_no_end_before_the_minimum():
    """FC-15: the token that ends a text is not drawn before ``min_tokens``."""
    (free,) = serve(Sampling(), None, PROMPTS[:1])
    end = free.tokens[3]
    config = dataclasses.replace(tiny.CONFIG, eos_token_ids=(end,))
    model = Model(tiny.model().params, config)
    how = {"policy": "wy", "max_tokens": 40}
    early = complete(model, PROMPTS[0], drafter=MTP("2,1,1"), **how)
    assert early.finish_reason == "stop" and len(early.tokens) == free.tokens.index(end) + 1
    late = complete(model, PROMPTS[0], drafter=MTP("2,1,1"), sampling=Sampling(min_tokens=9), **how)
    assert end not in late.tokens[:9]


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("multi_step", MTP("2,2", draws="iid")),
        ("traversal", MTP("2,2", draws="without_replacement")),
        ("typical", MTP("2,2")),
    ],
)
def test_rules_serve_with_honest_proposals_and_say_what_they_are(rule, drafter):
    """FC-13: greedy they emit plain's text; sampled, texts of the asked length, again the same."""
    warm = serve(Sampling(0.8, top_k=20), drafter, rule=rule)
    assert [len(g.tokens) for g in warm] == [40, 40]
    assert [g.tokens for g in warm] == [
        g.tokens for g in serve(Sampling(0.8, top_k=20), drafter, rule=rule)
    ]
    stats = warm[0].stats
    assert (stats.rule, stats.lossless) == (rule, rule != "typical")
    assert sum(g.stats.num_accepted_tokens for g in warm) > 0
    if rule == "traversal":
        greedy = serve(Sampling(), drafter, rule=rule)
        assert [g.tokens for g in greedy] == [g.tokens for g in serve(Sampling(), None)]


@pytest.mark.parametrize(
    ("rule", "drafter", "message"),
    [
        ("multi_step", MTP("2,2"), "needs candidates of kind iid"),
        ("without_replacement", MTP("2,2", draws="coupled"), "the drafter's are coupled"),
        ("block", MTP("2,2", draws="iid"), "serves chains only"),
        ("oak", MTP("2,2"), "rule 'oak' is unknown"),
    ],
)
def test_a_rule_that_cannot_be_right_is_refused_before_anything_runs(rule, drafter, message):
    """FC-13."""
    with pytest.raises(ValueError, match=message):
        serve(Sampling(0.8), drafter, rule=rule)


def test_finished_responses_enter_the_store():
    store = ResponseStore(200)
    made = serve(Sampling(), Suffix("chain4", store=store))
    held = [token for token in store.tokens.tolist() if token >= 0]
    assert held == [token for g in made for token in g.tokens]


def test_the_margin_of_a_difference_counts_penalties_too():
    """What plain decoding takes the argmax of has its penalties in it."""
    sampling = Sampling(presence_penalty=3.0, logit_bias={2: 1.0})
    (plain,) = agreement.record(tiny.model(), PROMPTS[:1], 12, policy="replay", sampling=sampling)
    how = (tiny.model(), PROMPTS[0], plain.tokens[:11], "replay", sampling, 0)
    scores = agreement.plain_scores(*how)
    assert int(np.argmax(scores)) == plain.tokens[11]
    bare = agreement.plain_scores(*how[:4], Sampling(), 0)
    seen = sorted(set(plain.tokens[:11]) - {2})
    np.testing.assert_allclose(bare[seen] - scores[seen], 3.0, rtol=1e-5)
