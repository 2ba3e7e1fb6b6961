"""How rows of logits become candidates: ranked, coupled, drawn; and the reduced vocabulary."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny
from draft_texts import BATCH, Text, begin

from treejax.drafters import MTP
from treejax.drafters.candidates import drawn, top
from treejax.drafters.vocabulary import frequent_tokens
from treejax.sampling import Sampling, noise, per_sequence, process

pytestmark = pytest.mark.compiles_fast

LENGTHS = jnp.array((4, 9, 1), jnp.int32)
MIXED = Sampling(temperature=np.array([2.0, 0.0, 2.0]), top_k=40)  # the second row is greedy


@functools.cache
def primed(vocabulary=None):
    """The head's data after made-up texts, the same for every tree of depth 2."""
    text, drafter = Text(3), MTP("3,2", vocabulary=vocabulary)
    return begin(drafter, text, np.asarray(LENGTHS)), text.pending(np.asarray(LENGTHS))


@functools.cache
def proposing(drafter):
    return jax.jit(
        lambda draft, pending, keys: drafter.propose(
            draft, SimpleNamespace(length=LENGTHS), pending, keys
        )[:2]
    )


def propose(drafter, settings=None, seed=0):
    """Tree, q and keys of a step at ``settings``; None is before the loop knows any."""
    draft, pending = primed(drafter.vocabulary)
    keys = None
    if settings is not None:
        keys = jax.random.split(jax.random.key(seed), BATCH)
        own = per_sequence(BATCH, settings, keys, LENGTHS, tiny.CONFIG.vocab_size)
        settings, keys, _ = own
    tree, q = proposing(drafter)(draft.replace(sampling=settings), pending, keys)
    return jax.device_get(tree), q, keys


def test_top_k_in_two_stages_is_that_of_a_stable_sort():
    """Ties go to the lowest id, within blocks and across them; -inf is the smallest."""
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (2, 3, 5000)).astype(np.float32)
    scores[0, 0, 1000:] = -np.inf
    scores[1, 2] = rng.normal(size=5000)
    scores[0, 1, :3] = -np.inf
    expected = np.argsort(-scores, axis=-1, kind="stable")
    for count in (1, 2, 8, 12):  # the last too many for two stages
        values, ids = jax.jit(top, static_argnums=1)(jnp.asarray(scores), count)
        np.testing.assert_array_equal(ids, expected[..., :count])
        np.testing.assert_array_equal(values, np.take_along_axis(scores, np.asarray(ids), axis=-1))


def test_coupled_candidates_are_ranked_by_log_q_and_the_targets_noise():
    """One noise for all nodes of a depth, that of the position which their children have."""
    coupled, shape = MTP("3,2", draws="coupled"), MTP("3,2").static_shape
    tree, q, keys = propose(coupled, MIXED)
    other, _, _ = propose(coupled, MIXED, seed=1)
    plain, _, _ = propose(MTP("3,2"), MIXED)
    assert q is None and coupled.proposals == "coupled" and MTP("3,2").proposals == "fixed"
    np.testing.assert_array_equal(tree.tokens[1], plain.tokens[1])
    assert (tree.tokens[[0, 2], 1:4] != other.tokens[[0, 2], 1:4]).any(axis=1).all()

    _, rows, _ = propose(MTP("3,2", draws="without_replacement"), MIXED)  # its root has the same q
    log_q = np.log(np.maximum(rows, 1e-30))
    for b in (0, 2):
        g = np.asarray(noise(keys[b], LENGTHS[b] + 1, tiny.CONFIG.vocab_size))
        best = np.argsort(-(log_q[b, 0] + g), kind="stable")
        np.testing.assert_array_equal(tree.tokens[b, list(shape.children(0))], best[:3])


def test_outside_the_filters_the_best_follow():
    """With two tokens inside, the third child is the best of the others under the same noise."""
    settings = Sampling(temperature=2.0, top_k=2)
    tree, _, keys = propose(MTP("3,2", draws="coupled"), settings)
    free, _, _ = propose(MTP("3,2", draws="coupled"), Sampling(temperature=2.0))
    _, q, _ = propose(MTP("3,2", draws="without_replacement"), settings)
    _, every, _ = propose(MTP("3,2", draws="without_replacement"), Sampling(temperature=2.0))
    for b in range(BATCH):
        g = np.asarray(noise(keys[b], LENGTHS[b] + 1, tiny.CONFIG.vocab_size))
        score = np.log(np.asarray(every[b, 0])) + g
        inside = np.asarray(q[b, 0]) > 0
        assert inside.sum() == 2
        order = np.lexsort((-score, ~inside))
        np.testing.assert_array_equal(tree.tokens[b, 1:4], order[:3])
    assert (free.tokens[:, 1:4] != tree.tokens[:, 1:4]).any()


@pytest.mark.parametrize("draws", ["iid", "without_replacement"])
def test_q_is_the_processed_row_and_greedy_rows_take_the_likeliest(draws):
    drafter = MTP("3,2", draws=draws)
    assert drafter.proposals == draws
    tree, q, _ = propose(drafter, MIXED)
    other, _, _ = propose(drafter, MIXED, seed=1)
    top_tree, _, _ = propose(MTP("3,2"), MIXED)
    size = tiny.CONFIG.vocab_size
    assert q.dtype == jnp.float32 and q.shape == (BATCH, drafter.capacity, size)
    assert np.isfinite(q).all()
    np.testing.assert_allclose(np.asarray(q)[:, :4].sum(axis=-1), 1.0, atol=1e-5)
    inner = np.asarray(q)[[0, 2], :4]
    assert ((inner > 0).sum(axis=-1) == 40).all(), "top-k of the target applies"
    assert (np.asarray(q)[1, :4].max(axis=-1) == 1).all(), "one-hot where greedy"
    assert (tree.tokens[[0, 2], 1:] != other.tokens[[0, 2], 1:]).any(axis=1).all()
    if draws == "iid":
        np.testing.assert_array_equal(tree.tokens[1, 1:4], [top_tree.tokens[1, 1]] * 3)
        greedy, _, _ = propose(drafter)
        assert (greedy.tokens[:, 1:4] == greedy.tokens[:, 1:2]).all()
    else:
        np.testing.assert_array_equal(tree.tokens[1], top_tree.tokens[1])
        greedy, q, _ = propose(drafter)
        np.testing.assert_array_equal(greedy.tokens, propose(MTP("3,2"))[0].tokens)
        assert (np.asarray(q)[:, :4].max(axis=-1) == 1).all()


ROW = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))


def many_draws(repeat, count=3, settings=None):
    """[20000, count] draws of one row by as many keys, and of a second row with the same logits."""
    batch = 20_000
    keys = jax.random.split(jax.random.key(7), batch)
    settings, keys, length = per_sequence(
        batch, settings or Sampling(temperature=1.0), keys, jnp.int32(12), 5
    )
    logits = jnp.broadcast_to(jnp.asarray(ROW), (batch, 2, 5))
    slots = (
        np.arange(2 * count).reshape(2, count) if repeat else np.array([[0] * count, [4] * count])
    )
    run = jax.jit(drawn, static_argnames="repeat")
    tokens, q = run(logits, settings, (keys, length), jnp.asarray(slots), repeat=repeat)
    one = jax.tree.map(lambda values: values[0], settings)
    expected = jax.nn.softmax(process(jnp.asarray(ROW), one))
    np.testing.assert_allclose(q[0, 0], expected, atol=1e-6)
    return np.asarray(tokens)


def assert_law(outcomes, law):
    """A chi-square of counted outcomes, integers, against their probabilities."""
    counts = np.bincount(outcomes, minlength=len(law))
    assert counts[law == 0].sum() == 0
    seen = law > 0
    assert scipy.stats.chisquare(counts[seen], law[seen] * counts.sum()).pvalue > 1e-4


def test_iid_siblings_are_independent_draws_from_q():
    tokens, p = many_draws(True), np.exp(ROW.astype(np.float64))
    joint = np.einsum("a,b,c->abc", p, p, p).ravel()
    assert_law(tokens[:, 0] @ [25, 5, 1], joint / joint.sum())
    pair = np.outer(p, p).ravel()
    assert_law(tokens[:, 0, 0] * 5 + tokens[:, 1, 0], pair / pair.sum())


def test_without_replacement_the_order_is_that_of_draws():
    tokens, p = many_draws(False), np.exp(ROW.astype(np.float64))
    p = p / p.sum()
    law = np.zeros((5, 5, 5))
    for a, b, c in np.ndindex(5, 5, 5):
        if len({a, b, c}) == 3:
            law[a, b, c] = p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
    assert_law(tokens[:, 0] @ [25, 5, 1], law.ravel())
    pair = np.outer(p, p).ravel()
    assert_law(tokens[:, 0, 0] * 5 + tokens[:, 1, 0], pair)  # other rows have other noise


def test_without_replacement_the_likeliest_follow_when_q_is_used_up():
    tokens = many_draws(False, 4, Sampling(temperature=1.0, top_k=2))
    assert (np.sort(tokens[:, 0, :2], axis=-1) == [0, 1]).all()
    assert (tokens[:, 0, 2:] == [2, 3]).all()


IDS = (50, 3, 17, 8, 22, 60, 41)


def test_a_reduced_vocabulary_drafts_the_best_of_its_own():
    small, whole = MTP("3,2", vocabulary=IDS), MTP("3,2", draws="without_replacement")
    tree, _, _ = propose(small, MIXED)
    _, q, _ = propose(whole, Sampling(temperature=1.0))
    scores = np.asarray(q)[:, 0, list(IDS)]
    best = np.array(IDS)[np.argsort(-scores, axis=-1)[:, :3]]
    np.testing.assert_array_equal(tree.tokens[:, 1:4], best)
    assert set(tree.tokens[:, 1:].flat) <= set(IDS)


def test_a_vocabulary_of_all_tokens_changes_nothing():
    """The target's noise is that of the full vocabulary, whatever the head scores."""
    every = tuple(range(tiny.CONFIG.vocab_size))[::-1]
    coupled = MTP("3,2", draws="coupled")
    tree, _, _ = propose(dataclasses.replace(coupled, vocabulary=every), MIXED)
    np.testing.assert_array_equal(tree.tokens, propose(coupled, MIXED)[0].tokens)


def test_q_of_a_reduced_vocabulary_lives_in_the_full_one():
    settings = Sampling(temperature=1.0, banned_tokens=[3])
    tree, q, _ = propose(MTP("3,2", draws="without_replacement", vocabulary=IDS), settings)
    inside = np.isin(np.arange(tiny.CONFIG.vocab_size), IDS) & (np.arange(61) != 3)
    rows = np.asarray(q)[:, :4]
    assert (rows[..., inside] > 0).all() and (rows[..., ~inside] == 0).all()
    np.testing.assert_allclose(rows.sum(axis=-1), 1.0, atol=1e-5)
    _, every, _ = propose(MTP("3,2", draws="without_replacement"), settings)
    share = np.asarray(every)[:, 0] * inside
    np.testing.assert_allclose(rows[:, 0], share / share.sum(axis=-1, keepdims=True), atol=1e-5)
    assert 3 not in tree.tokens[:, 1:]


def test_settings_that_need_a_history_are_left_to_the_target():
    penalised = Sampling(
        temperature=2.0, top_k=40, repetition_penalty=1.3, min_tokens=4, end_tokens=[0]
    )
    coupled = MTP("3,2", draws="coupled")
    tree, _, _ = propose(coupled, penalised)
    bare, _, _ = propose(coupled, Sampling(temperature=np.array([2.0] * 3), top_k=40))
    np.testing.assert_array_equal(tree.tokens, bare.tokens)


def test_frequent_tokens_are_counted():
    assert frequent_tokens([[5, 2, 2, 9], np.array([9, 9, 1])], 3) == (9, 2, 1)
    with pytest.raises(ValueError, match="5 frequent tokens were asked for and 4 different ones"):
        frequent_tokens([[5, 2, 2, 9], [9, 9, 1]], 5)


def test_what_cannot_be_drafted_is_refused():
    with pytest.raises(ValueError, match="draws 'best' are unknown, expected one of: top, coupled"):
        MTP(draws="best")
    with pytest.raises(ValueError, match="holds 2 ids of which 1 differ"):
        MTP(vocabulary=(4, 4))
    with pytest.raises(ValueError, match="wants 3 different tokens below one node and has only 2"):
        MTP("3,2", vocabulary=(4, 5)).init(tiny.model(), 1, 8)
    with pytest.raises(ValueError, match="holds token 61, expected ids below the model's 61"):
        MTP("chain2", vocabulary=(4, 61)).init(tiny.model(), 1, 8)
    assert MTP("3,2", draws="iid", vocabulary=(4, 5)).init(tiny.model(), 1, 8)
