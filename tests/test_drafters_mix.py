"""The mix of head and lookup against the head alone and the list oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_texts import BATCH, ROOM, Text, assert_cache, begin, compiled, propose_after
from lookup_oracle import groups, majority

from treejax.drafters import MTP, Hydra, Lookup, MTPSuffix
from treejax.drafters.topologies import parse

pytestmark = pytest.mark.compiles_fast


@pytest.mark.parametrize("spec", ["hydra27", "hydra2x3+0/5,1"])
def test_mix_equals_head_and_lookup_oracle(spec):
    """Spine and runners-up are the head's; tail and rescue chains are the majority's copies."""
    lookup, lengths = Lookup(longest=4, shortest=1, matches=4), np.array([8, 33, 58])
    drafter, shape, text = MTPSuffix(spec, lookup), parse(spec), Text(7)
    near = MTP(Hydra(shape.spine, shape.width))
    # Plant the head's own drafts in the texts, so that the lookups have something to find. The
    # last tokens stay: on them the drafts depend most.
    candidates, rng = propose_after(near, text, lengths), np.random.default_rng(8)
    chosen = rng.integers(1, candidates.shape[1], text.tokens.shape)
    early = np.arange(ROOM) < lengths[:, None] - 1
    hits = (rng.random(text.tokens.shape) < 0.6) & early
    text.tokens = np.where(hits, np.take_along_axis(candidates, chosen, axis=1), text.tokens)

    candidates, found = propose_after(near, text, lengths), 0
    expected = np.full((BATCH, shape.capacity), -1, np.int32)
    expected[:, list(shape.near_rows)] = candidates
    for b in range(BATCH):
        for rows in (shape.tail_rows, *(shape.rescue_rows(r) for r in range(len(shape.rescue)))):
            if rows:
                above = list(shape.path(shape.parents[rows[0]]))
                context = text.tokens[b, : lengths[b]].tolist() + expected[b, above].tolist()
                every = groups(context, lookup, len(rows))
                copied = majority(every[0]) if every else ()
                expected[b, list(rows[: len(copied)])] = copied
                found += bool(copied)
    assert found >= BATCH, "too few lookups succeeded to test anything"

    draft = begin(drafter, text, lengths)
    tree = jax.device_get(compiled(drafter)[1](draft, None, text.pending(lengths), None)[0])
    full = jax.device_get(jax.jit(shape.supported)(jnp.asarray(expected)))
    np.testing.assert_array_equal(tree.tokens, full.tokens)
    np.testing.assert_array_equal(tree.parent, full.parent)
    for b in range(BATCH):
        pairs = set(zip(tree.parent[b], tree.tokens[b], strict=True)) - {(-1, -1)}
        assert len(pairs) == tree.size[b], "siblings must differ"


def test_mix_follows_the_accepted_path():
    drafter = MTPSuffix("hydra2x3+0/5,1", Lookup(longest=4, shortest=1, matches=4))
    shape, text, committed = parse("hydra2x3+0/5,1"), Text(9), np.array([4, 9, 1])
    _, propose, observe = compiled(drafter)
    draft, rng = begin(drafter, text, committed), np.random.default_rng(2)
    for _ in range(7):
        _, _, draft = propose(draft, None, text.pending(committed), None)
        ends = rng.integers(-1, shape.capacity, BATCH)
        tree, choice, hidden, lengths = text.step(shape, committed, ends, rng)
        draft = observe(draft, tree, choice, hidden)
        committed = committed + lengths
    left, _, draft = propose(draft, None, text.pending(committed), None)
    np.testing.assert_array_equal(draft.memory.text.length, committed)
    for b, count in enumerate(committed):
        kept = draft.memory.text.tokens[b, :count]
        np.testing.assert_array_equal(kept, text.tokens[b, :count])
    fresh = begin(drafter, text, committed)
    right, _, fresh = propose(fresh, None, text.pending(committed), None)
    np.testing.assert_array_equal(left.tokens, right.tokens)
    assert_cache(draft.memory.head, fresh.memory.head, committed)
