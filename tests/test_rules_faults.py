"""The enumeration sees faults: each known mistake moves the joint law well away from plain's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules_exact import Model, compiled, depths_of, joint_law, total_variation

from treejax.steps.rules import Block, MultiStep, Traversal, WithoutReplacement, residual
from treejax.steps.rules.base import Law

pytestmark = pytest.mark.compiles_fast

SEEN = 0.01  # ten orders of magnitude above what the exact tests allow
# A row on which faults of one node show, found by search: most are nearly invisible at random rows.
P = np.array([6, 4, 5, 8, 11]) / 34
Q = np.array([12, 8, 1, 144, 1]) / 166
STAR = [-1, 0, 0, 0]
ITEMS = {
    "multi_step": (MultiStep(), "iid"),
    "without_replacement": (WithoutReplacement(), "without_replacement"),
    "traversal_iid": (Traversal("iid"), "iid"),
    "traversal_without": (Traversal("without_replacement"), "without_replacement"),
}
ALL = list(ITEMS)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def distance(law, draws, model, parents=None):
    """Total variation from plain of ``law`` on one tree, by default three siblings."""
    parents = STAR if parents is None else parents
    rng, depth = np.random.default_rng(0), max(depths_of(parents))
    joint, _ = joint_law(compiled(law), model, parents, draws, rng, len(parents))
    return total_variation(joint, model.plain(depth))


def designed(depth=1):
    return Model.constant(P, Q, depth)


@pytest.mark.parametrize("name", ALL)
def test_without_a_fault_there_is_no_distance(name):
    rule, draws = ITEMS[name]
    assert distance(rule.law, draws, designed()) < 1e-12


@pytest.mark.parametrize("name", ALL)
def test_a_residual_that_is_not_normalised_is_seen(name, monkeypatch):
    rule, draws = ITEMS[name]
    monkeypatch.setattr(residual, "normalise", lambda values: values)

    def law(tree, p, q):
        broken = rule.law(tree, p, q)  # what is drawn from stays a law: later tests see the fault
        return broken.replace(weights=broken.weights / broken.weights.sum(axis=1, keepdims=True))

    assert distance(law, draws, designed()) > SEEN


@pytest.mark.parametrize("name", ["without_replacement", "traversal_without"])
def test_siblings_tested_in_another_order_than_drawn_are_seen(name):
    rule, draws = ITEMS[name]

    def law(tree, p, q):
        return rule.law(tree.replace(rank=-tree.rank), p, q)

    assert distance(law, draws, designed()) > SEEN


@pytest.mark.parametrize("rule", [MultiStep(), Traversal("iid")], ids=str)
def test_q_that_keeps_the_tokens_already_drawn_is_seen(rule):
    assert distance(rule.law, "without_replacement", designed()) > SEEN


@pytest.mark.parametrize("name", [*ALL, "block"])
def test_the_last_token_drawn_from_the_whole_p_is_seen(name):
    rule, draws = ITEMS.get(name, (Block(), "iid"))
    parents = [-1, 0, 1] if name == "block" else STAR

    def law(tree, p, q):
        return rule.law(tree, p, q).replace(weights=p)

    assert distance(law, draws, designed(max(depths_of(parents))), parents) > SEEN


@pytest.mark.parametrize("name", ALL)
def test_a_chance_of_p_instead_of_p_over_q_is_seen(name):
    rule, draws = ITEMS[name]

    def law(tree, p, q):
        above = jnp.maximum(tree.parent, 0)
        return rule.law(tree, p, q).replace(chance=p[above, jnp.maximum(tree.tokens, 0)])

    assert distance(law, draws, designed()) > SEEN


def test_raw_q_and_q_of_a_candidate_picked_without_chance_are_seen():
    """A drafter that reports a q which it does not draw from."""
    sharp = Model.constant(P, Q**2 / (Q**2).sum(), 1)

    def law(tree, p, q):  # the drafter draws from sharp.q, the rule is told Q
        return MultiStep().law(tree, p, jnp.broadcast_to(Q, q.shape))

    assert distance(law, "iid", sharp) > SEEN
    fixed = Model.constant(P, np.eye(5)[3], 1)
    assert distance(law, "iid", fixed) > SEEN
    assert distance(MultiStep().law, "iid", fixed) < 1e-12  # q one-hot is the honest one


@pytest.mark.parametrize("draws", ["iid", "without_replacement"])
def test_a_path_tested_by_a_product_of_coins_from_its_leaf_is_seen(draws):
    """The leaves-first order with the chances of single steps: not traversal verification."""
    top_down = MultiStep() if draws == "iid" else WithoutReplacement()

    def law(tree, p, q):
        made = top_down.law(tree, p, q)
        return Law(chance=made.chance, weights=made.weights, leaves_first=True)

    rng = np.random.default_rng(2)
    assert distance(law, draws, Model(rng, 3, 2), [-1, 0, 0, 1]) > SEEN
