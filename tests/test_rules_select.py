"""Acceptance rules through ``select`` and ``decide``: packing, batches, greedy rows, histories."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_trees import children_first, random_parents, random_tokens, shuffle
from scipy import stats

from treejax.history import begin
from treejax.sampling import Sampling
from treejax.steps.rules import REGISTRY, MultiStep, Traversal, Typical, WithoutReplacement
from treejax.steps.rules.base import Law, coins, decide
from treejax.steps.select import select
from treejax.tree import Tree

pytestmark = pytest.mark.compiles_fast

COIN_RULES = [MultiStep(), WithoutReplacement(), Traversal("iid"), Traversal(), Typical()]


def one(tree):
    return jax.tree.map(lambda x: x[0], tree)


def many(tree, count):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), tree)


def random_case(rng, vocabulary, capacity, depth, size):
    parents = random_parents(rng, size, depth)
    tokens = random_tokens(rng, parents, vocabulary)
    tree = Tree.from_parents(tokens, parents, capacity=capacity, max_depth=depth)
    logits = rng.standard_normal((1, capacity, vocabulary)) * 2
    q = rng.dirichlet(np.ones(vocabulary), (1, capacity))
    logits[:, size:], q[:, size:] = np.nan, np.nan  # nothing reads rows past the tree
    return tree, jnp.asarray(logits, jnp.float32), jnp.asarray(q, jnp.float32)


@pytest.mark.parametrize("rule", COIN_RULES, ids=str)
def test_at_temperature_0_every_rule_is_greedy_acceptance(rule):
    """With no key, and as one row of a batch that samples; the path equals that of ``match``."""
    rng, accepted = np.random.default_rng(12), 0
    for size in (1, 5, 12, 12, 12):
        tree, logits, q = random_case(rng, 16, 12, 4, size)
        for row in range(size):  # lead into the tree
            below = np.flatnonzero(np.asarray(tree.parent[0]) == row)
            if below.size:
                logits = logits.at[0, row, tree.tokens[0, rng.choice(below)]].add(20.0)
        q = q if rule.needs_q else None
        expected = select(tree, logits)
        accepted += int(expected.accepted[0])
        bare = select(tree, logits, rule=rule, q=q)
        jax.tree.map(np.testing.assert_array_equal, bare, expected)
        mixed = select(
            many(tree, 2), jnp.tile(logits, (2, 1, 1)), sampling=Sampling(np.array([0.0, 1.0])),
            key=jax.random.key(size), position=5, rule=rule,
            q=None if q is None else jnp.tile(q, (2, 1, 1)),
        )  # fmt: skip
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:1], y), mixed, expected)
    assert accepted >= 8


@pytest.mark.parametrize("rule", COIN_RULES, ids=str)
def test_a_decision_does_not_depend_on_packing_padding_batch_or_jit(rule):
    rng = np.random.default_rng(13)
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 5]
    tokens = random_tokens(rng, parents, 12)
    p, q = rng.dirichlet(np.ones(12), (2, 10))
    for row in range(1, 10):  # chances well inside (0, 1)
        p[parents[row], tokens[row]] += 0.2
        q[parents[row], tokens[row]] += 0.5
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    gumbel, u = jnp.asarray(rng.gumbel(size=12), jnp.float32), rng.random((20, 10))
    seen, jitted = [], jax.jit(rule.law)

    @jax.jit
    def decided(tree, law, tossed, gumbel):
        choice = jax.vmap(lambda u: decide(tree, law, u, gumbel))(tossed)
        return choice.path, choice.length, choice.pending

    rank = np.array([parents[:row].count(above) for row, above in enumerate(parents)])
    for order in (np.arange(10), shuffle(parents, rng)[1], children_first(parents)[1]):
        place = np.argsort(order)
        moved = [-1 if parents[old] < 0 else int(place[parents[old]]) for old in order]
        for capacity in (10, 13):
            spare = ((0, capacity - 10), (0, 0))
            tree = Tree.from_parents(tokens[order], moved, capacity=capacity, max_depth=4)
            ranks = np.pad(rank[order], (0, capacity - 10))[None]
            tree = one(tree.replace(rank=jnp.asarray(ranks, jnp.int32)))
            rows = [
                jnp.asarray(np.pad(x[order], spare, constant_values=np.nan), jnp.float32)
                for x in (p, q)
            ]
            law = jitted(tree, *rows)
            assert not np.isnan(law.chance).any() and (np.asarray(law.chance[10:]) == 0).all()
            tossed = np.pad(u[:, order], ((0, 0), (0, capacity - 10))).astype(np.float32)
            choices = decided(tree, law, jnp.asarray(tossed), gumbel)
            for rows, length, pending in zip(*map(np.asarray, choices), strict=True):
                path = [int(order[row]) for row in rows if row >= 0]
                assert path[0] == 0 and all(
                    parents[below] == above for above, below in itertools.pairwise(path)
                )
                assert len(path) == length
                seen.append((path, int(pending)))
    decisions = [seen[start : start + 20] for start in range(0, len(seen), 20)]
    assert all(other == decisions[0] for other in decisions)
    assert rule == Typical() or len({tuple(path) for path, _ in decisions[0]}) >= 3


def test_rows_are_decided_alike_alone_and_in_a_batch():
    rng = np.random.default_rng(14)
    cases = [random_case(rng, 20, 9, 3, size) for size in (1, 4, 9)]
    tree = jax.tree.map(lambda *x: jnp.concatenate(x), *(case[0] for case in cases))
    logits, q = (jnp.concatenate([case[i] for case in cases]) for i in (1, 2))
    keys = jax.random.split(jax.random.key(1), 3)
    for rule in (MultiStep(), Traversal(), Typical()):
        settings = {"sampling": Sampling(0.9, top_p=0.9), "rule": rule}
        q_of = (lambda x: x) if rule.needs_q else (lambda x: None)
        batch = jax.jit(
            lambda tree, logits, q, keys, settings=settings: select(
                tree, logits, key=keys, position=jnp.asarray([4, 5, 6]), q=q, **settings
            )
        )(tree, logits, q_of(q), keys)
        for row, (alone, rows, own) in enumerate(cases):
            single = select(
                alone, rows, key=keys[row][None], position=4 + row, q=q_of(own), **settings
            )
            jax.tree.map(
                lambda x, y, row=row: np.testing.assert_array_equal(x[row], y[0]), batch, single
            )


def test_every_row_sees_its_own_path_in_the_history():
    """A ban of repeats by a huge penalty: no rule may emit a token of the root's path twice."""
    vocabulary = 6
    tree = many(Tree.from_parents([1, 2, 3, 2, 4], [-1, 0, 1, 2, 0]), 500)
    history = begin(jnp.full((500, 1), 5), jnp.ones(500, jnp.int32), vocabulary)
    logits = jnp.zeros((500, 5, vocabulary))
    sampling = Sampling(1.0, presence_penalty=2.0, frequency_penalty=1e4, repetition_penalty=2.0)
    flat = np.zeros((5, vocabulary))
    flat[0, [2, 4]], flat[1, 3], flat[2, 2] = 0.5, 1.0, 1.0
    q = jnp.broadcast_to(jnp.asarray(flat, jnp.float32), logits.shape)
    for rule in (REGISTRY["match"], Traversal(), Typical()):  # a walk, and rows all at once
        choice = select(
            tree, logits, sampling=sampling, key=jax.random.key(2), position=1, history=history,
            rule=rule, q=q if rule.needs_q else None,
        )  # fmt: skip
        tokens, count = (np.asarray(x) for x in choice.emitted(tree))
        assert count.max() == 3 and count.min() >= 1  # the last row would repeat token 2
        for row, n in zip(tokens, count, strict=True):
            assert len({1, *row[:n].tolist()}) == n + 1
    with pytest.raises(ValueError, match="need the history"):
        select(tree, logits, sampling=sampling, key=jax.random.key(2), position=1, rule="typical")


def test_p_is_the_processed_row():
    """A rule works on p after all settings: with top-k 1 it is greedy at any temperature."""
    tree, logits, q = random_case(np.random.default_rng(15), 8, 6, 3, 6)
    choice = select(
        tree, logits, sampling=Sampling(2.0, top_k=1), key=jax.random.key(0), position=3,
        rule="multi_step", q=q,
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, choice, select(tree, logits))


# Draws


def test_coins_are_even_and_strict():
    keys = jax.random.split(jax.random.key(3), 400)
    u = np.asarray(jax.vmap(lambda key: coins(key, jnp.int32(7), 50))(keys))
    assert u.dtype == np.float32 and (u >= 0).all() and (u < 1).all()
    assert stats.kstest(u.ravel(), "uniform").pvalue > 0.001
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.2
    other = np.asarray(jax.vmap(lambda key: coins(key, jnp.int32(8), 50))(keys))
    assert (other != u).mean() > 0.99
    assert (np.diff(np.sort(u.ravel())[:200]) > 0).all()  # finer than 2^-23 near 0

    tree = one(Tree.from_parents([0, 1], [-1, 0]))
    for chance, coin, length in ((0.0, 0.0, 1), (1.0, 1 - 2.0**-24, 2), (0.5, 0.5, 1)):
        law = Law(jnp.asarray([1.0, chance]), jnp.full((2, 3), 1 / 3), leaves_first=False)
        choice = decide(tree, law, jnp.asarray([0.0, coin]), jnp.zeros(3))
        assert int(choice.length) == length


def test_typical_keeps_the_longest_typical_path_and_then_the_likeliest_token():
    tree = one(Tree.from_parents([0, 1, 2, 3, 4, 0], [-1, 0, 0, 2, 2, 1]))
    p = np.full((6, 5), 0.02)
    p[0] = [0.1, 0.6, 0.25, 0.03, 0.02]
    p[1] = [0.04, 0.9, 0.02, 0.02, 0.02]
    p[2] = [0.0, 0.0, 0.1, 0.3, 0.6]
    p[4] = [0.1, 0.1, 0.2, 0.5, 0.1]
    law = Typical().law(tree, jnp.asarray(p, jnp.float32), None)
    choice = decide(tree, law, jnp.full(6, 0.5), jnp.zeros(5))
    # Token 1 is likelier than 2, but only 2 leads on: 3 and 4 both typical, 4 the likelier.
    np.testing.assert_array_equal(choice.path[:3], [0, 2, 4])
    assert int(choice.length) == 3 and int(choice.pending) == 3
    strict = Typical(epsilon=1.0, delta=5.0).law(tree, jnp.asarray(p, jnp.float32), None)
    assert int(decide(tree, strict, jnp.full(6, 0.5), jnp.zeros(5)).length) == 1
    entropy = -(p[0] * np.log(p[0])).sum()
    for delta, length in ((0.6 * np.exp(entropy) * 1.01, 1), (0.6 * np.exp(entropy) * 0.99, 2)):
        law = Typical(epsilon=1.0, delta=delta).law(tree, jnp.asarray(p, jnp.float32), None)
        assert int(decide(tree, law, jnp.full(6, 0.5), jnp.zeros(5)).length) == length
    cold = jnp.asarray(np.eye(5)[[1, 0, 0, 0, 0, 0]], jnp.float32)  # one-hot: the root draws 1
    for bounds, length in (((0.99, 5.0), 3), ((1.0, 0.99), 3), ((1.0, 1.0), 1)):
        law = Typical(*bounds).law(tree, cold, None)
        choice = decide(tree, law, jnp.full(6, 0.5), jnp.zeros(5))
        assert int(choice.length) == length and int(choice.pending) == (1 if length == 1 else 0)
    for wrong, message in (({"epsilon": 0.0}, "epsilon of rule"), ({"delta": -1}, "delta of rule")):
        with pytest.raises(ValueError, match=message):
            Typical(**wrong)
