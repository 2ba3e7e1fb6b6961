"""Every lossless rule is exact: every draft, coin and last draw of every tree of up to 7 rows.

Enumerated in full, for each rule and each way of drawing that it takes, with fresh random p and q
for every tree (some probabilities 0), rows packed in a random order:
- 3 tokens: all 197 rooted ordered trees of 1 to 7 rows;
- 4 tokens: all 65 of up to 6 rows, and every sixth of the 132 of 7 rows;
- 5 tokens: all 65 of up to 6 rows, and three of 7 rows (5 million outcomes each).
"""

import jax
import numpy as np
import pytest
from rules_exact import Model, compiled, depths_of, joint_law, topologies, total_variation

from treejax.steps.rules import (
    REGISTRY,
    Block,
    MultiStep,
    Traversal,
    Typical,
    WithoutReplacement,
)
from treejax.steps.rules.base import CoinRule

EXACT = 1e-12  # float64 sums of up to five million terms
SMALL = [tree for size in range(1, 7) for tree in topologies(size)]
SEVEN = topologies(7)
CHAINS = [list(range(-1, size - 1)) for size in range(1, 8)]
SPREAD = [[-1, 0, 0, 0, 0, 0, 0], [-1, 0, 1, 1, 0, 4, 4], [-1, 0, 0, 2, 2, 4, 4]]
RULES = [
    (MultiStep(), "iid"),
    (WithoutReplacement(), "iid"),
    (WithoutReplacement(), "without_replacement"),
    (Traversal("iid"), "iid"),
    (Traversal("without_replacement"), "iid"),
    (Traversal("without_replacement"), "without_replacement"),
]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def worst_of(rule, draws, vocabulary, trees, capacity, seed, **settings):
    """The largest total variation from plain decoding over the trees."""
    rng, outcomes, worst = np.random.default_rng(seed), compiled(rule.law), 0.0
    for parents in trees:
        depth = max(depths_of(parents))
        model = Model(rng, vocabulary, depth, **settings)
        joint, _ = joint_law(outcomes, model, parents, draws, rng, capacity)
        worst = max(worst, total_variation(joint, model.plain(depth)))
    return worst


def test_all_trees_are_there():
    assert [len(topologies(size)) for size in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]
    assert len({tuple(tree) for tree in [*SMALL, *SEVEN]}) == 197
    assert all(tree in SEVEN for tree in SPREAD)


@pytest.mark.parametrize("rule, draws", RULES, ids=str)
def test_the_joint_law_is_plains_on_every_tree(rule, draws):
    assert worst_of(rule, draws, 3, [*SMALL, *SEVEN], 7, seed=1) < EXACT
    assert worst_of(rule, draws, 4, SMALL, 6, seed=2) < EXACT
    assert worst_of(rule, draws, 4, SEVEN[::6], 7, seed=3) < EXACT
    assert worst_of(rule, draws, 5, SMALL, 6, seed=4) < EXACT
    assert worst_of(rule, draws, 5, SPREAD, 7, seed=5) < EXACT


@pytest.mark.parametrize("vocabulary", [3, 4, 5])
def test_block_verification_is_exact_on_every_chain(vocabulary):
    assert worst_of(Block(), "iid", vocabulary, CHAINS, 7, seed=vocabulary) < EXACT


@pytest.mark.parametrize("rule, draws", [*RULES, (Block(), "iid")], ids=str)
def test_degenerate_rows_are_exact_too(rule, draws):
    """p one-hot (temperature 0), q equal to p, and many zeros that p and q do not share."""
    trees = CHAINS[:4] if rule.chains_only else [t for t in SMALL if len(t) in (3, 4)]
    for settings in ({"temperature": 0}, {"same": True}, {"zeros": 0.6}):
        assert worst_of(rule, draws, 3, trees, 4, seed=6, **settings) < EXACT


def test_equal_p_and_q_accept_the_first_path_to_its_end():
    rng = np.random.default_rng(7)
    for rule, draws in RULES:
        outcomes = compiled(rule.law)
        for parents in ([-1, 0, 1, 2], [-1, 0, 0, 1]):
            model = Model(rng, 3, 3, zeros=0, same=True)
            _, accepted = joint_law(outcomes, model, parents, draws, rng, 4)
            assert accepted == pytest.approx(max(depths_of(parents)), abs=1e-9)


def test_typical_acceptance_is_not_lossless():
    rng, outcomes = np.random.default_rng(8), compiled(Typical().law)
    distances = []
    for parents in [t for t in SMALL if len(t) == 4]:
        depth = max(depths_of(parents))
        model = Model(rng, 3, depth)
        joint, _ = joint_law(outcomes, model, parents, "iid", rng, 4)
        distances.append(total_variation(joint, model.plain(depth)))
    assert min(distances) > 0.01
    assert not Typical.lossless
    greedy = Model(rng, 3, 3, temperature=0)  # at temperature 0 it is greedy acceptance
    joint, _ = joint_law(outcomes, greedy, CHAINS[3], "iid", rng, 4)
    assert total_variation(joint, greedy.plain(3)) < EXACT


def test_every_registered_rule_is_one_of_those_enumerated():
    enumerated = {(rule.name, draws) for rule, draws in [*RULES, (Block(), "iid")]}
    enumerated |= {("block", "without_replacement")}  # the same draws on a chain
    claimed = {
        (name, kind)
        for name, rule in REGISTRY.items()
        if isinstance(rule, CoinRule) and rule.lossless
        for kind in rule.takes
    }
    assert claimed == enumerated
