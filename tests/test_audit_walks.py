"""Walks, their exact laws and the G-tests between them."""

import dataclasses
import itertools

import numpy as np
import pytest
import sampling_oracle
import tiny
from scipy import stats

from treejax.audit import sampler
from treejax.audit.prefixes import prefixes
from treejax.audit.sampler.capture import TOKENS, capture
from treejax.audit.sampler.faults.base import Sampler
from treejax.audit.sampler.g_test import g_test, survival
from treejax.audit.sampler.law import laws
from treejax.audit.sampler.streams import different_streams
from treejax.audit.sampler.walks import Outcome, g_tests, keys_of, take_walks
from treejax.audit.sampler.worlds import CHAIN, CLEAR, DESIGNED, made_up
from treejax.model import Model
from treejax.sampling import Sampling
from treejax.steps.rules import Match

pytestmark = pytest.mark.compiles_fast

MODEL = Model(tiny.random_params(tiny.CONFIG), tiny.CONFIG)
MATCH = Sampler(Match(), "fixed")


# G-tests


def test_the_survival_function_is_chi_squares():
    for freedom in (1, 2, 3, 7, 30, 400, 5000):
        for x in (1e-3, 0.3 * freedom, freedom, 1.4 * freedom, freedom + 60, 4 * freedom + 90):
            expected = stats.chi2.sf(x, freedom)
            assert survival(x, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-300)
    assert survival(0.0, 3) == 1.0 and survival(1e6, 3) == 0.0


def test_p_values_are_even_with_many_rare_cells():
    """10 of 300 cells hold most of the law: the others are pooled, and p stays uniform."""
    rng = np.random.default_rng(0)
    law = np.concatenate([rng.dirichlet(np.ones(10)) * 0.8, rng.dirichlet(np.ones(290)) * 0.2])
    p = [g_test(rng.multinomial(4000, law), law)[2] for _ in range(2000)]
    assert stats.kstest(p, "uniform").pvalue > 1e-3
    assert 0.0005 < np.mean(np.array(p) < 0.002) < 0.006


def test_what_cannot_happen_and_what_tells_nothing():
    law = np.array([0.5, 0.5, 0.0])
    assert g_test(np.array([50, 49, 1]), law)[2] == 0.0
    assert g_test(np.array([50, 50, 0]), law) == (0.0, 1, 1.0)
    assert g_test(np.array([7, 3, 0]), law)[2] == 1.0, "too few to test"
    with pytest.raises(ValueError, match="sum to 0.9"):
        g_test(np.array([1, 1]), np.array([0.4, 0.5]))


# Exact laws


def test_the_law_is_that_of_the_tests_own_oracle():
    rng, clear = np.random.default_rng(1), 0
    for _ in range(150):
        size = int(rng.integers(8, 13))
        settings = sampling_oracle.random_settings(rng, size) | {"temperature": 0.7}
        logits = (np.round(rng.standard_normal(size) * 4) / 4).astype(np.float32)
        prompt, output = rng.integers(0, size, 2).tolist(), rng.integers(0, size, 3).tolist()
        expected, margin = sampling_oracle.law(logits, prompt, output, **settings)
        sampling = Sampling(
            **{name: value for name, value in settings.items() if name != "exact_top_k"},
            exact_top_k=settings["exact_top_k"],
        )
        counts = np.bincount(output, minlength=size)[None]
        held = np.isin(np.arange(size), prompt)
        p, near = laws(logits[None], counts, held, sampling)
        if margin > 1e-9:
            clear += 1
            np.testing.assert_allclose(p[0], expected, atol=1e-12)
            assert near > 0
    assert clear > 100


@pytest.mark.parametrize("name", DESIGNED)
def test_a_worlds_joint_law_is_the_product_along_every_string(name):
    world = dataclasses.replace(DESIGNED[name](), length=3)
    joint, margin = world.joint()
    assert abs(joint.sum() - 1) < 1e-12 and margin > CLEAR
    prompt = np.isin(np.arange(world.vocabulary), world.prompt)
    rng = np.random.default_rng(2)
    strings = list(itertools.product(range(world.vocabulary), repeat=3))
    for at in rng.choice(len(strings), 20, replace=False):
        state, seen, chance = world.start, [world.root], 1.0
        for token in strings[at]:
            counts = np.bincount(seen, minlength=world.vocabulary)[None]
            p, _ = laws(world.target[[state]], counts, prompt, world.sampling)
            chance, state = chance * p[0, token], world.after[state, token]
            seen.append(token)
        assert joint[at] == pytest.approx(chance, abs=1e-12)


def test_made_up_steps_differ_and_are_clear():
    worlds = made_up(6)
    assert len({world.target.tobytes() for world in worlds}) == 6
    assert all(world.joint()[1] > CLEAR for world in worlds)


# Walks


def test_walks_under_match_are_plain_draws_token_for_token():
    """Through trees and without any; in parts that do not come out even; and by other keys."""
    world, keys = DESIGNED["penalties"](), keys_of(3000, 5)
    tokens, accepted = take_walks(world, MATCH, keys)
    plain, _ = take_walks(dataclasses.replace(world, steps=0, length=5), MATCH, keys)
    np.testing.assert_array_equal(tokens, plain)
    assert 0.8 < accepted < 2.5
    joint, _ = world.joint()
    outcomes = g_tests(tokens, joint, world.vocabulary)
    assert {one.kind for one in outcomes} == {"conditional", "joint"}
    assert min(one.p for one in outcomes) > 1e-4
    other, _ = take_walks(world, MATCH, keys_of(3000, 6))
    assert (other != tokens).any(axis=1).mean() > 0.9


def test_a_law_that_is_a_little_off_is_seen_where_it_is():
    """The oracle at another temperature: every kind of test rejects."""
    world = DESIGNED["cold"]()
    tokens, _ = take_walks(world, MATCH, keys_of(3000, 5))
    warmer = dataclasses.replace(world, sampling=Sampling(temperature=0.6))
    found = g_tests(tokens, warmer.joint()[0], world.vocabulary)
    for kind in ("conditional", "joint"):
        assert min(one.p for one in found if one.kind == kind) < 1e-8
    tokens[0, 0] = -1
    outside = g_tests(tokens, world.joint()[0], world.vocabulary)
    assert outside == [Outcome("joint", "tokens outside the vocabulary", np.inf, 0, 0.0)]


def test_streams_are_those_of_plain_and_the_trees_are_accepted():
    differs, accepted = different_streams(DESIGNED["penalties"](), MATCH, 24, 24, 3)
    assert differs.shape == (24,) and not differs.any()
    assert accepted > 0.8


def test_captured_steps_hold_rows_of_the_model_and_are_walked_through_by_their_law():
    """By the audit itself, which captures the same steps."""
    few = {"walks": 4000, "seeds": 1, "trees": ((3, 3),)}
    settings = dataclasses.replace(sampler.Settings.quick(), worlds=(), steps=2, **few)
    (prompt,) = prefixes(MODEL, "held-out", 1, 64, settings.seed)
    worlds = capture(MODEL, prompt, settings.steps, settings.seed)
    assert [world.name for world in worlds] == ["step 2", "step 4"]
    for world in worlds:
        assert world.target.shape == world.draft.shape == (10, TOKENS)
        assert world.joint()[1] > CLEAR and np.isfinite(world.draft).all()
        for row in range(1, world.tree.capacity):  # the tree's own tokens lead down it
            assert row in world.after[world.tree.parents[row]]
    assert worlds[0].shape(True) is CHAIN
    report = sampler.run(MODEL, [Match()], settings)
    assert report.green, report.red
    assert report.facts["sampler"]["worlds"] == ["step 2", "step 4"]
    assert report.facts["sampler"]["captured steps"] == "2 of one generation"
    assert {check.where.get("world") for check in report.checks} == {None, "step 2", "step 4"}
    tests = [check for check in report.checks if "G-test" in check.name]
    assert len(tests) >= 3 and min(check.value for check in tests) > 1e-5
