"""Planted faults of samplers: otherwise right.

Each hook's right form is held against the shipped function that it stands in for, so that a fault
is one thing gone wrong and no other.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treejax.audit.sampler.detection import LUMOTREE
from treejax.audit.sampler.enumeration import EXACT, Toy, coin_distance
from treejax.audit.sampler.faults import REGISTRY, coins, draws
from treejax.audit.sampler.faults.base import Bent, Given, Sampler, shipped
from treejax.audit.sampler.faults.laws import sequential_law
from treejax.audit.sampler.walks import history_of, keys_of, propose, rows_of, target_rows
from treejax.audit.sampler.worlds import DESIGNED, P, Q
from treejax.sampling import per_sequence
from treejax.steps.rules import Match, MultiStep, WithoutReplacement

BATCH = 64


@functools.cache
def given_of(rule, proposals, name="penalties"):
    """What 64 sequences' rules are given in the first step of a world."""
    world = DESIGNED[name]()
    size, keys = world.vocabulary, keys_of(BATCH, 3)
    at = jnp.full(BATCH, len(world.prompt), jnp.int32)
    sampling, keys, position = per_sequence(BATCH, world.sampling, keys, at, size)
    start = (jnp.full(BATCH, value, jnp.int32) for value in (world.start, world.root))
    made = jax.jit(propose, static_argnames=("shape", "sampler"))(
        rows_of(world), world.tree, Sampler(rule, proposals), *start, sampling, (keys, position)
    )
    logits = target_rows(rows_of(world), made[2])
    history = history_of(world, sampling, BATCH)
    return Given(made[0], made[1], logits, sampling, keys, position, history)


def same(choice, other):
    jax.tree.map(np.testing.assert_array_equal, choice, other)


def test_every_fault_has_a_name_a_sentence_and_a_world():
    assert len(REGISTRY) >= 30
    for name, fault in REGISTRY.items():
        hooks = (fault.law, fault.given, fault.choose, fault.deliver)
        assert sum(hook is not None for hook in hooks) == 1, name
        assert fault.says and "fault" not in fault.says.lower(), name
        assert fault.world in DESIGNED and fault.rule.lossless, name
    assert set(LUMOTREE) <= set(REGISTRY)


def test_what_faults_are_built_from_is_right_without_them():
    given = given_of(WithoutReplacement(), "without_replacement")
    rule = WithoutReplacement()
    right = jax.jit(lambda g: (shipped(rule, g), coins.with_chance(rule, g, coins.unchanged)))
    same(*right(given))
    given = given_of(Match(), "fixed")
    walked = draws.walked_with(lambda position, depth: position + 1 + depth, "No fault.")
    same(*jax.jit(lambda g: (shipped(Match(), g), walked(Match(), g)))(given))


@pytest.mark.parametrize("rule", [MultiStep(), WithoutReplacement()], ids=str)
def test_the_sequential_law_that_normalises_is_the_rules_own(rule):
    given = given_of(WithoutReplacement(), "without_replacement", "designed")
    p = jax.nn.softmax(given.logits, axis=-1)
    replaced = rule.takes == frozenset({"iid"})

    @jax.jit
    @jax.vmap
    def both(tree, p, q):
        mine = sequential_law(tree, p, q, replaced=replaced, renormalise=True)
        return mine, rule.law(tree, p, q)

    mine, own = both(given.tree, p, given.q)
    np.testing.assert_allclose(mine.chance, own.chance, atol=1e-6)
    np.testing.assert_allclose(mine.weights, own.weights, atol=1e-6)


@pytest.mark.parametrize(
    "name, least",
    [("residual_not_normalised", 0.119), ("q_not_updated", 0.4), ("p_without_q", 0.2)],
)
def test_the_designed_row_shows_faults_of_one_node(name, least):
    """The distances that the search for this row promised."""
    fault, rng = REGISTRY[name], np.random.default_rng(0)
    law = Bent(fault.rule, fault.law).law
    star = [-1, 0, 0, 0]
    toy = Toy.constant(P, Q, 1)
    assert coin_distance(law, fault.proposals, toy, star, rng) > least
    assert coin_distance(fault.rule.law, fault.proposals, toy, star, rng) < EXACT
