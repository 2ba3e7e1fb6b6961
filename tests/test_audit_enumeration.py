"""The audit's exact enumeration: right rules have no distance from plain, wrong ones their own."""

import jax
import numpy as np
import pytest
import rules_exact

from treejax.audit.sampler.enumeration import (
    EXACT,
    Toy,
    coin_distance,
    depths,
    enumerable,
    every_draft,
    match_distance,
    ordered_trees,
)
from treejax.audit.sampler.faults import REGISTRY
from treejax.audit.sampler.faults.base import Bent
from treejax.audit.sampler.worlds import P, Q
from treejax.steps.rules import Match, MultiStep, Traversal, Typical

STAR = [-1, 0, 0, 0]


def test_every_ordered_tree_is_there():
    assert [len(ordered_trees(rows)) for rows in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]
    assert sorted(ordered_trees(5)) == sorted(rules_exact.topologies(5))


@pytest.mark.parametrize("proposals", ["iid", "without_replacement", "fixed"])
def test_drafts_are_all_there_with_their_chances(proposals):
    toy = Toy.random(np.random.default_rng(0), 3, 2, gaps=0.0)
    tokens, context, chance = every_draft(toy, [-1, 0, 0, 1], proposals)
    assert len(np.unique(tokens, axis=0)) == 27 and abs(chance.sum() - 1) < EXACT
    assert (context[:, 0] == 0).all() and (context[:, 3] >= 4).all()
    first = np.bincount(tokens[:, 1], chance, minlength=3)
    expected = np.full(3, 1 / 3) if proposals == "fixed" else toy.q[0]
    np.testing.assert_allclose(first, expected, atol=EXACT)
    twice = chance[tokens[:, 1] == tokens[:, 2]].sum()
    if proposals == "iid":
        assert twice == pytest.approx((toy.q[0] ** 2).sum())
    if proposals == "without_replacement":
        assert twice < EXACT


def test_match_and_rules_with_coins_have_no_distance():
    rng, law = np.random.default_rng(1), Traversal().law  # one program serves one bound method
    for parents in [tree for rows in range(1, 5) for tree in ordered_trees(rows)]:
        toy = Toy.random(rng, 3, max(depths(parents)))
        assert match_distance(toy, parents, rng, 4) < EXACT
        assert coin_distance(law, "without_replacement", toy, parents, rng, 4) < EXACT


def test_distances_of_wrong_laws_are_those_that_the_tests_own_enumeration_finds():
    fault, rng = REGISTRY["no_residual"], np.random.default_rng(2)
    law = Bent(fault.rule, fault.law).law
    for toy, parents in (
        (Toy.constant(P, Q, 1), STAR),
        (Toy.random(rng, 3, 2), [-1, 0, 0, 1]),
    ):
        found = coin_distance(law, fault.proposals, toy, parents, rng, 4)
        other = rules_exact.Model.constant(P, Q, max(depths(parents)))
        other.vocabulary, other.depth, other.p, other.q = toy.vocabulary, 2, toy.p, toy.q
        other.offset = np.cumsum([0, *(toy.vocabulary**n for n in range(3))])
        with jax.enable_x64(True):
            outcomes = rules_exact.compiled(law)
            joint, _ = rules_exact.joint_law(outcomes, other, parents, fault.proposals, rng, 4)
        plain = other.plain(max(depths(parents)))
        assert found == pytest.approx(rules_exact.total_variation(joint, plain), abs=EXACT)
        assert found > 0.05


def test_a_rule_for_other_draws_and_a_lossy_rule_are_far_off():
    rng = np.random.default_rng(3)
    toy = Toy.constant(P, Q, 1)
    assert coin_distance(MultiStep().law, "iid", toy, STAR, rng) < EXACT
    assert coin_distance(MultiStep().law, "without_replacement", toy, STAR, rng) > 0.1
    assert coin_distance(Typical().law, "iid", toy, STAR, rng) > 0.3
    assert enumerable(Typical()) and enumerable(Match())


def test_only_rules_whose_draws_are_known_are_enumerated():
    class Mine(Match):
        name = "mine"

    assert not enumerable(Mine())
