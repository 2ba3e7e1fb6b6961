"""Scripted steps of the continuation audit: every length of path, in any drafter's trees."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from treejax.audit.continuation.lengths import (
    Prompter,
    bushy,
    deepest,
    free,
    not_by_its_rule,
    plan_of,
    script_of,
    told,
    unread,
)
from treejax.audit.step import Subject
from treejax.drafters import MTP, Suffix
from treejax.drafters.resting import Resting
from treejax.drafters.scripted import Scripted
from treejax.model import Model
from treejax.policies import Replay
from treejax.steps.rules import REGISTRY as RULES

SCRIPTED = Scripted("3,2,1", truth=((1, 2, 3, 4),), schedule=((3, 1), (2, 2)))
BATCH, VOCABULARY = 3, tiny.CONFIG.vocab_size


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
@pytest.mark.parametrize("depth", [0, 1, 2, 8, 11])
def test_every_length_is_planned(batch, depth):
    plan = plan_of(batch, depth)
    assert set(plan.ravel().tolist()) == set(range(depth + 1))
    assert (len(plan) - 1) * batch < depth + 1  # and no step more than that takes


@pytest.mark.parametrize(
    ("capacity", "depth", "vocabulary"), [(1, 0, 61), (4, 3, 61), (17, 8, 61), (16, 3, 4)]
)
def test_a_tree_for_shapes_that_are_data(capacity, depth, vocabulary):
    tree = bushy(capacity, depth, vocabulary)
    assert tree.max_depth == depth and tree.capacity <= capacity
    assert tree.capacity == capacity or vocabulary == 4
    assert max(tree.ranks) + 1 < vocabulary
    assert all(tree.children(row) for row in tree.path(tree.depths.index(depth))[:-1])


def test_the_tree_is_the_drafters_own_where_that_is_fixed_and_tokens_suffice():
    assert script_of(MTP("3,2,1"), VOCABULARY).shape == MTP("3,2,1").shape
    assert script_of(MTP("3,2,1"), 4).shape == MTP("3,2,1").shape  # three siblings of four tokens
    assert script_of(MTP("3,2,1"), 3).shape.capacity == 1 + 3 * 2
    assert script_of(Suffix("best16x8"), VOCABULARY).shape.max_depth == 8
    assert script_of(Resting(inner=MTP("3")), VOCABULARY).schedule == ((0, 0),)


@pytest.mark.parametrize("inner", [SCRIPTED, Suffix("best9x4")], ids=lambda d: d.name)
def test_as_many_candidates_of_one_path_are_right_as_it_is_told(inner):
    """Of each sequence its own number; one that is told nothing has the drafter's own tree."""
    model, depth = Model(tiny.random_params(tiny.CONFIG), tiny.CONFIG), deepest(inner)
    state: Any = SimpleNamespace(length=jnp.zeros(BATCH, jnp.int32))  # all that they read of it
    keys = jax.random.split(jax.random.key(0), BATCH)
    draft = inner.init(model, BATCH, 64)
    answers = np.arange(BATCH * (depth + 1)).reshape(BATCH, -1) % VOCABULARY
    pending = jnp.asarray(answers[:, 0], jnp.int32)

    @jax.jit
    def propose(weights):
        prompted = draft.replace(weights=weights)
        tree, _, after = Prompter(inner).propose(prompted, state, pending, keys)
        own, _, its = inner.propose(draft, state, pending, keys)
        return tree, after.memory, own, its.memory

    subject = Subject(Replay(), inner, RULES["match"])
    for right in (*plan_of(BATCH, depth), np.array([depth, -1, 0])):
        for turn in range(2):
            tree, memory, own, its = propose(told(draft.weights, answers, right, turn))
            assert_equal(memory, its)
            assert (tree.capacity, tree.max_depth) == (inner.capacity, inner.max_depth)
            for b in range(BATCH):
                if right[b] < 0:
                    assert_equal(*(jax.tree.map(lambda x, b=b: x[b], t) for t in (tree, own)))
                else:
                    assert len(followed(tree, answers, b)) == 1 + right[b]
    tree, _, own, _ = propose(free(subject, draft.weights, BATCH))
    assert_equal(tree, own)


def assert_equal(mine, its):
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True):
        np.testing.assert_array_equal(one, other)


def followed(tree, answers, b):
    """The rows along which tree ``b`` holds the answers; each has no double among its siblings."""
    tokens, parents = (np.asarray(x)[b, : int(tree.size[b])] for x in (tree.tokens, tree.parent))
    path = [0]
    for token in answers[b, 1:]:
        below = [row for row in range(len(tokens)) if parents[row] == path[-1]]
        assert len({int(tokens[row]) for row in below}) == len(below)
        (*found,) = [row for row in below if tokens[row] == token]
        if not found:
            break
        path += found
    return path


def test_a_rule_that_reads_q_gives_way_to_one_that_does_not():
    subject = Subject(Replay(), SCRIPTED, RULES["match"])
    assert unread(subject) is subject and not_by_its_rule(subject) == []
    for name in ("multi_step", "traversal", "block"):
        other = Subject(Replay(), SCRIPTED, RULES[name])
        assert unread(other) == subject
        (row,) = not_by_its_rule(other)
        assert row["subject"].endswith(f" by {name}") and row["why"].endswith(
            "by rule match instead"
        )
