"""Prompt lookup against a plain Python oracle that works on lists."""

import dataclasses
from collections import Counter
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

from treejax.drafters import Lookup, Suffix
from treejax.drafters.committed import append, no_text
from treejax.drafters.lookup import look_up
from treejax.drafters.prefixes import walk
from treejax.steps.select import Choice

pytestmark = pytest.mark.compiles_fast

ROOM = 40
find = jax.jit(look_up, static_argnames=("settings", "depth"))
add = jax.jit(append)


def first(groups):
    """The only group of a lookup by the longest match."""
    return jax.tree.map(lambda x: x[0], groups)


MODEL = SimpleNamespace(config=None)  # prompt lookup knows nothing of the model


def random_contexts(seed, count):
    """Contexts of 1 .. ROOM tokens over alphabets of 1 to 5: repetitive, with many ties."""
    rng = np.random.default_rng(seed)
    contexts = []
    for _ in range(count):
        size, alphabet = rng.integers(1, ROOM + 1), rng.integers(1, 6)
        context = rng.integers(0, alphabet, size).tolist()
        if rng.random() < 0.5:  # plant an earlier occurrence of a long suffix
            piece = context[: rng.integers(1, size + 1)]
            context = (piece + context)[-ROOM:]
        contexts.append(context)
    return contexts


def primed(drafter, contexts):
    """A draft that has seen all but the last token of each context, and these last tokens."""
    tokens = np.full((len(contexts), ROOM), 7, np.int32)  # filler that must not be read
    for row, context in zip(tokens, contexts, strict=True):
        row[: len(context) - 1] = context[:-1]
    lengths = jnp.array([len(context) - 1 for context in contexts], jnp.int32)
    draft = drafter.init(MODEL, len(contexts), ROOM)
    draft = drafter.prime(draft, None, jnp.asarray(tokens), lengths)
    return draft, jnp.array([context[-1] for context in contexts], jnp.int32)


SETTINGS = [
    (Lookup(longest=8, shortest=2, matches=8), "best16x8"),
    (Lookup(longest=3, shortest=1, matches=4, least_value=0.5), "best12x5"),
    (Lookup(longest=6, shortest=1, matches=8, rule="score", least_value=0.1), "best16x8"),
    (Lookup(longest=5, shortest=2, matches=6, rule="score", least_value=0.34), "best4x4"),
]


@pytest.mark.parametrize("lookup, tree", SETTINGS)
def test_tree_equals_the_oracle(lookup, tree):
    contexts = random_contexts(sum(map(ord, tree)), 300)
    drafter = Suffix(tree, lookup)
    draft, pending = primed(drafter, contexts)
    proposed, q, _ = jax.jit(drafter.propose)(draft, None, pending, None)
    assert q is None
    proposed = jax.device_get(proposed)
    nodes, least, shapes, decided = drafter.shape.nodes, lookup.least_value, set(), set()
    for b, context in enumerate(contexts):
        found = groups(context, lookup, drafter.max_depth)
        best = decide(found, lookup, lambda group: tree_score(group, least, nodes))
        expected = best_prefixes(best.trie(least), nodes) if best else []
        assert as_paths(proposed, b) == expected, context
        assert proposed.tokens[b, 0] == context[-1]
        size = 1 + len(expected)
        assert (proposed.tokens[b, size:] == -1).all() and (proposed.parent[b, size:] == -1).all()
        siblings = Counter()
        for row in range(1, size):
            parent = int(proposed.parent[b, row])
            assert int(proposed.rank[b, row]) == siblings[parent]
            siblings[parent] += 1
        shapes.add(tuple(proposed.parent[b].tolist()))
        decided.add(bool(best) and best.length == found[0].length)
    assert len(shapes) > 4, "the contexts must give various trees"
    assert (proposed.size == 1).any() and (proposed.size > 2).any()
    if lookup.rule == "score" and nodes < 16:
        assert False in decided, "a shorter match must win somewhere"


@pytest.mark.parametrize(
    "lookup", [Lookup(8, 2, 8), Lookup(4, 1, 5, rule="score", least_value=0.3)]
)
def test_chain_equals_the_oracle(lookup):
    contexts, least = random_contexts(5, 300), lookup.least_value
    drafter = Suffix("chain6", lookup)
    draft, pending = primed(drafter, contexts)
    proposed = jax.device_get(jax.jit(drafter.propose)(draft, None, pending, None)[0])
    for b, context in enumerate(contexts):
        best = decide(groups(context, lookup, 6), lookup, lambda g: chain_score(g, least))
        path = majority(best, least)
        assert as_paths(proposed, b) == [path[: i + 1] for i in range(len(path))], context


def test_rows_of_a_batch_are_independent():
    contexts = random_contexts(12, 300)[:3]
    drafter = Suffix("best6x4", Lookup(4, 1, 4, rule="score"))
    propose = jax.jit(drafter.propose)
    draft, pending = primed(drafter, contexts)
    together = propose(draft, None, pending, None)[0]
    for b in range(3):
        draft, pending = primed(drafter, [contexts[b]] * 3)
        alone = propose(draft, None, pending, None)[0]
        np.testing.assert_array_equal(together.tokens[b], alone.tokens[0])
        np.testing.assert_array_equal(together.parent[b], alone.parent[0])


def test_what_lies_past_the_context_is_never_read():
    context = jnp.array([1, 2, 3, 1, 2, 3, 1, 2, 9, 9, 9, 1, 2, 3], jnp.int32)
    settings = Lookup(longest=4, shortest=2, matches=4)
    short = find(context[:8], jnp.int32(8), settings, 5)
    padded = find(context, jnp.int32(8), settings, 5)
    np.testing.assert_array_equal(short.tokens, padded.tokens)
    assert jax.jit(walk)(first(short), 0.0)[0].tolist() == [3, 1, 2, 3, 1]


def test_a_context_shorter_than_the_suffix():
    context = jnp.array([4, 4, 0, 0], jnp.int32)
    found = first(find(context, jnp.int32(2), Lookup(longest=8, shortest=1, matches=2), 3))
    assert found.found.tolist() == [True, False]
    assert found.tokens.tolist() == [[4, 4, 4], [-1, -1, -1]]
    found = find(context, jnp.int32(1), Lookup(longest=8, shortest=1, matches=2), 3)
    assert not found.found.any()


def test_ties_go_to_the_earlier_parent_and_then_to_the_lower_token():
    # after "1 2": 3 (oldest), 4, 3, 4 (latest), then the context ends in "1 2"
    context = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2]
    drafter = Suffix("best4x2", Lookup(longest=2, shortest=2, matches=4))
    draft, pending = primed(drafter, [context])
    proposed, _, _ = jax.jit(drafter.propose)(draft, None, pending, None)
    assert as_paths(proposed, 0) == [(3,), (4,), (3, 0), (4, 0)]


@pytest.mark.parametrize(
    "wrong", [{"rule": "shortest"}, {"least_value": 1.5}, {"least_value": float("nan")}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}|lookup rule"):
        dataclasses.replace(Lookup(), **wrong)


def test_memory_follows_the_accepted_path():
    drafter = Suffix("chain3", Lookup(longest=3, shortest=1, matches=4))
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 3, 5).tolist() for _ in range(4)]
    draft, pending = primed(drafter, texts)
    propose, observe = jax.jit(drafter.propose), jax.jit(drafter.observe)
    for _ in range(6):
        tree, _, draft = propose(draft, None, pending, None)
        length = rng.integers(0, np.asarray(tree.size) + 1, dtype=np.int32)  # 0: takes no part
        path = np.where(np.arange(4) < length[:, None], np.arange(4, dtype=np.int32), -1)
        bonus = rng.integers(0, 3, 4, dtype=np.int32)
        draft = observe(draft, tree, Choice(*map(jnp.asarray, (path, length, bonus))), None)
        for b, text in enumerate(texts):
            if length[b]:
                text += [*tree.tokens[b, 1 : length[b]].tolist(), int(bonus[b])]
        pending = jnp.asarray(np.where(length > 0, bonus, pending))
    assert draft.memory.length.tolist() == [len(text) - 1 for text in texts]
    for b, text in enumerate(texts):
        assert draft.memory.tokens[b, : len(text) - 1].tolist() == text[:-1]
        assert int(pending[b]) == text[-1]


def test_prompts_in_pieces_and_full_memory():
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
    whole = add(no_text(2, 12), tokens, jnp.array([12, 9]))
    pieces = add(no_text(2, 12), tokens[:, :5], jnp.array([5, 5]))
    pieces = add(pieces, tokens[:, 5:], jnp.array([7, 4]))
    nothing = add(pieces, tokens[:, :5], jnp.array([0, 0]))
    for other in (pieces, nothing):
        np.testing.assert_array_equal(whole.length, other.length)
        np.testing.assert_array_equal(whole.tokens[0, :12], other.tokens[0, :12])
        np.testing.assert_array_equal(whole.tokens[1, :9], other.tokens[1, :9])
