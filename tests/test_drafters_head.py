"""The head's cache follows the accepted path, and trees are drafted from it alone."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from draft_texts import BATCH, ROOM, Text, assert_cache, begin, compiled, propose_after

from treejax import layers
from treejax.drafters import MTP
from treejax.mtp import mtp_forward

pytestmark = pytest.mark.compiles_fast

forward = jax.jit(mtp_forward, static_argnames="config")
scores = jax.jit(layers.logits)


@pytest.mark.parametrize("spec", ["chain4", "3,2,1"])
def test_fc06_cache_equals_one_rebuilt_from_true_hidden_rows(spec):
    """FC-06: after k drafts with a accepted, a = 0 .. k, the head's cache covers exactly the text.

    Compared with the head run over the whole text at once, and with a drafter that saw the whole
    text as a prompt. A sequence that takes no part in a step keeps its place.
    """
    model, drafter, rng = tiny.model(), MTP(spec), np.random.default_rng(11)
    _, propose, observe = compiled(drafter)
    shape, text, committed = drafter.static_shape, Text(1), np.array([1, 5, 12])
    draft, seen = begin(drafter, text, committed), set()
    for _ in range(12):
        _, _, draft = propose(draft, None, text.pending(committed), None)
        ends = rng.integers(-1, shape.capacity, BATCH)
        tree, choice, hidden, lengths = text.step(shape, committed, ends, rng)
        draft = observe(draft, tree, choice, hidden)
        committed = committed + lengths
        seen |= {int(n) for n in lengths}
        np.testing.assert_array_equal(draft.memory.rows + draft.memory.count, committed)
    assert seen == set(range(shape.max_depth + 2)), "every number of accepted drafts must occur"

    proposed, _, draft = propose(draft, None, text.pending(committed), None)
    hidden, following = jnp.asarray(text.hidden[:, :-1]), jnp.asarray(text.tokens[:, 1:])
    _, (keys, values) = forward(model.config, model.params, hidden, following)
    assert_cache(draft.memory, SimpleNamespace(keys=keys, values=values), committed)
    np.testing.assert_array_equal(proposed.tokens, propose_after(drafter, text, committed))


def test_proposing_twice_gives_the_same_tree():
    drafter, text, committed = MTP("chain4"), Text(2), np.array([4, 9, 1])
    draft, propose = begin(drafter, text, committed), compiled(drafter)[1]
    first, _, draft = propose(draft, None, text.pending(committed), None)
    second, _, draft = propose(draft, None, text.pending(committed), None)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(draft.memory.rows + draft.memory.count, committed)


def test_prompt_in_pieces_equals_whole():
    drafter, text, lengths = MTP("chain4"), Text(3), np.array([1, 2, 20])
    prime, propose, _ = compiled(drafter)
    hidden, tokens, _ = text.prompt(lengths)
    pieces, start = drafter.init(tiny.model(), BATCH, ROOM), 0
    for end in (1, 2, 9, 20):  # rolled, so that each piece lies first in a block of the same size
        count = jnp.asarray(np.clip(lengths - start, 0, end - start))
        pieces = prime(pieces, np.roll(hidden, -start, 1), np.roll(tokens, -start, 1), count)
        start = end
    left, _, pieces = propose(pieces, None, text.pending(lengths), None)
    np.testing.assert_array_equal(left.tokens, propose_after(drafter, text, lengths))
    whole = propose(begin(drafter, text, lengths), None, text.pending(lengths), None)[2]
    assert_cache(pieces.memory, whole.memory, lengths)


def test_prompt_after_decoding_joins_what_waits():
    """A later prompt piece completes the accepted rows that wait, and starts with the pending."""
    drafter, text, committed = MTP("chain4"), Text(4), np.array([3, 6, 8])
    prime, propose, observe = compiled(drafter)
    draft = begin(drafter, text, committed)
    _, _, draft = propose(draft, None, text.pending(committed), None)
    rng = np.random.default_rng(0)
    tree, choice, hidden, lengths = text.step(drafter.static_shape, committed, (4, 2, -1), rng)
    draft = observe(draft, tree, choice, hidden)
    committed, more = committed + lengths, np.array([5, 3, 4])
    piece = (committed[:, None] + np.arange(ROOM)) % ROOM, np.arange(BATCH)[:, None]
    arrays = (jnp.asarray(a[piece[::-1]]) for a in (text.hidden, text.tokens))
    draft = prime(draft, *arrays, jnp.asarray(more))
    committed = committed + more
    left, _, draft = propose(draft, None, text.pending(committed), None)
    np.testing.assert_array_equal(left.tokens, propose_after(drafter, text, committed))
    fresh = propose(begin(drafter, text, committed), None, text.pending(committed), None)[2]
    assert_cache(draft.memory, fresh.memory, committed)


def test_sequences_do_not_see_one_another():
    drafter, text, lengths = MTP("chain4"), Text(5), np.array([7, 3, 12])
    together, other = propose_after(drafter, text, lengths), Text(6)
    for b in range(BATCH):
        mixed, counts = Text(6), np.array([5, 9, 2])
        counts[b] = lengths[b]
        mixed.tokens[b], mixed.hidden[b] = text.tokens[b], text.hidden[b]
        changed = propose_after(drafter, mixed, counts)
        np.testing.assert_array_equal(changed[b], together[b])
        assert (other.tokens[b] != text.tokens[b]).any()


def test_idle_sequences_keep_their_memory():
    """Length 0, of a prompt piece or a choice, leaves all but the spare row as it was."""
    drafter, text, lengths = MTP("chain4"), Text(7), np.array([7, 0, 12])
    before, after = drafter.init(tiny.model(), BATCH, ROOM), begin(drafter, text, lengths)
    assert after.memory.count.tolist() == [1, 0, 1]
    _assert_rows_equal(before, after, [1])
    _, propose, observe = compiled(drafter)
    _, _, before = propose(after, None, text.pending(lengths), None)
    rng = np.random.default_rng(0)
    step = text.step(drafter.static_shape, lengths, (-1, -1, 3), rng)
    after = observe(before, *step[:3])
    assert after.memory.count.tolist() == [1, 0, 4]
    _assert_rows_equal(before, after, [0, 1])


def _assert_rows_equal(before, after, rows):
    old, new = jax.device_get((before.memory, after.memory))
    for name in ("keys", "values"):
        np.testing.assert_array_equal(getattr(old, name)[rows, :-1], getattr(new, name)[rows, :-1])
    for name in ("rows", "waiting", "after", "count"):
        np.testing.assert_array_equal(getattr(old, name)[rows], getattr(new, name)[rows])


def test_wide_tree_equals_every_path_run_alone():
    """Level by level under a tree mask, a node's children are those of its path as a chain."""
    model, drafter, text = tiny.model(), MTP("4,3,2"), Text(6)
    shape, count = drafter.static_shape, 7
    tokens = propose_after(drafter, text, np.full(BATCH, count))
    for node in range(shape.capacity):
        children = list(shape.children(node))
        if not children:
            continue
        hidden, following = np.zeros_like(text.hidden)[:, 1:], np.zeros_like(text.tokens)[:, 1:]
        hidden[:, :count] = text.hidden[:, :count]
        following[:, : count - 1] = text.tokens[:, 1:count]
        for place, row in enumerate(shape.path(node), start=count - 1):
            following[:, place] = tokens[:, row]
            pairs = jnp.asarray(hidden), jnp.asarray(following)
            out, _ = forward(model.config, model.params, *pairs)
            hidden[:, place + 1] = out[:, place]
        ranked = np.argsort(-np.asarray(scores(model.params, out))[:, place], kind="stable")
        np.testing.assert_array_equal(tokens[:, children], ranked[:, : len(children)])
