"""The store of earlier responses: bounded, in order, and never read across a separator."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookup_oracle import (
    as_paths,
    best_prefixes,
    chain_score,
    decide,
    groups,
    majority,
    tree_score,
)

from treejax.drafters import Lookup, ResponseStore, Suffix

pytestmark = pytest.mark.compiles_fast

MODEL = SimpleNamespace(config=None)
ROOM, CAPACITY = 24, 64


def responses_of(store):
    """What a store holds, as lists, by the documented layout."""
    text, found = store.tokens.tolist(), [[]]
    assert len(text) == store.capacity
    for token in text:
        if token == -1:
            found.append([])
        else:
            found[-1].append(token)
    assert found[-1] == [], "the last response must be ended"
    return [response for response in found if response]


def test_memory_is_bounded_and_the_oldest_tokens_go_first():
    rng, learned = np.random.default_rng(0), []
    store = ResponseStore(40)
    for _ in range(60):
        response = rng.integers(0, 50, rng.integers(0, 25)).tolist()
        store.learn(response)
        learned += [*response, -1] if response else []
        expected = ([-1] * 40 + learned)[-40:]
        assert store.tokens.tolist() == expected
        assert store.snapshot().shape == (40,)
    assert len(learned) > 400


def test_a_response_longer_than_the_store_leaves_its_end():
    store = ResponseStore(5)
    store.learn(range(100))
    assert store.tokens.tolist() == [96, 97, 98, 99, -1]


def test_a_snapshot_stays_as_it_was():
    store = ResponseStore(6)
    store.learn([1, 2])
    draft = Suffix("chain2", store=store).init(MODEL, 1, 8)
    before = np.asarray(draft.weights["store"]).tolist()
    Suffix("chain2", store=store).learn([3, 4])
    assert draft.weights["store"].tolist() == before == [-1, -1, -1, 1, 2, -1]
    assert store.snapshot().tolist() == [1, 2, -1, 3, 4, -1]


@pytest.mark.parametrize("tokens", [[3, -1, 4], [2**31]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(ValueError, match="expected ids"):
        ResponseStore(8).learn(tokens)


def test_a_store_without_room_is_refused():
    with pytest.raises(ValueError, match="2 or more"):
        ResponseStore(1)


def test_stores_are_told_apart_by_identity():
    left, right = ResponseStore(8), ResponseStore(8)
    assert Suffix(store=left) == Suffix(store=left) != Suffix(store=right)
    assert hash(Suffix(store=left)) == hash(Suffix(store=left))


def test_a_drafter_without_a_store_learns_nothing():
    drafter = Suffix("chain2")
    drafter.learn([1, 2, 3])
    assert drafter.init(MODEL, 1, 8).weights == {}


def queries(seed, count):
    """A store's responses and contexts over small alphabets, some of them copied from there."""
    rng = np.random.default_rng(seed)
    store = ResponseStore(CAPACITY)
    for _ in range(12):
        store.learn(rng.integers(0, 4, rng.integers(1, 14)).tolist())
    contexts = []
    for _ in range(count):
        context = rng.integers(0, rng.integers(2, 6), rng.integers(1, ROOM)).tolist()
        if rng.random() < 0.5:
            start = rng.integers(0, CAPACITY - 4)
            piece = store.tokens[start : start + 4]
            context = (context + piece[piece >= 0].tolist())[-ROOM:]
        contexts.append(context)
    return store, contexts


def proposed_by(drafter, contexts):
    tokens = np.full((len(contexts), ROOM), 2, np.int32)
    for row, context in zip(tokens, contexts, strict=True):
        row[: len(context) - 1] = context[:-1]
    lengths = jnp.array([len(context) - 1 for context in contexts], jnp.int32)
    draft = drafter.init(MODEL, len(contexts), ROOM)
    draft = drafter.prime(draft, None, jnp.asarray(tokens), lengths)
    pending = jnp.array([context[-1] for context in contexts], jnp.int32)
    return jax.device_get(jax.jit(drafter.propose)(draft, None, pending, None)[0])


@pytest.mark.parametrize(
    "tree, lookup",
    [
        ("best8x5", Lookup(5, 1, 4, rule="score", least_value=0.2)),
        ("best12x6", Lookup(6, 2, 5, rule="longest")),
        ("chain5", Lookup(4, 1, 4, rule="score", least_value=0.3)),
    ],
)
def test_context_and_store_compete_as_in_the_oracle(tree, lookup):
    store, contexts = queries(sum(map(ord, tree)), 300)
    drafter, least = Suffix(tree, lookup, store), lookup.least_value
    nodes = drafter.capacity - 1
    proposed = proposed_by(drafter, contexts)
    alone, held, copied = proposed_by(Suffix(tree, lookup), contexts), responses_of(store), 0
    for b, context in enumerate(contexts):
        found = groups(context, lookup, drafter.max_depth, held)
        if tree.startswith("chain"):
            best = decide(found, lookup, lambda group: chain_score(group, least))
            path = majority(best, least)
            expected = [path[: i + 1] for i in range(len(path))]
        else:
            best = decide(found, lookup, lambda group: tree_score(group, least, nodes))
            expected = best_prefixes(best.trie(least), nodes) if best else []
        assert as_paths(proposed, b) == expected, context
        copied += expected != as_paths(alone, b)
    assert 30 < copied < 300, "store and context must both decide often"


def test_nothing_is_read_across_a_separator():
    store = ResponseStore(16)
    for response in ([7, 8], [9, 1, 2], [3, 4]):
        store.learn(response)
    drafter = Suffix("chain4", Lookup(longest=3, shortest=1, matches=2), store)
    contexts = [[8], [9], [5, 8, 9], [2], [3], [4]]
    proposed = proposed_by(drafter, contexts)
    paths = [as_paths(proposed, b)[-1:] for b in range(len(contexts))]
    assert paths == [[], [(1, 2)], [(1, 2)], [], [(4,)], []]


def test_later_responses_win_equal_votes():
    store = ResponseStore(16)
    drafter = Suffix("chain1", Lookup(longest=2, shortest=1, matches=4), store)
    for token in (5, 6):
        drafter.learn([1, 2, token])
    assert as_paths(proposed_by(drafter, [[1, 2]]), 0) == [(6,)]
    drafter.learn([1, 2, 5])
    assert as_paths(proposed_by(drafter, [[1, 2]]), 0) == [(5,)]
