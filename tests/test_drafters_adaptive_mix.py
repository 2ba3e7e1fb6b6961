"""The adaptive mix: merging, measured trust and whole trees against dictionaries of paths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from draft_texts import BATCH, ROOM, Text, begin, compiled
from lookup_oracle import as_paths, best_prefixes, groups, majority

import treejax
from treejax.drafters import Lookup, Mix, MTPSuffix, ResponseStore
from treejax.drafters import trust as trust_of
from treejax.drafters.head_cache import Passes
from treejax.drafters.merge import merge
from treejax.drafters.prefixes import Pool, best_first
from treejax.drafters.spine import draft_spine
from treejax.sampling import Sampling, per_sequence
from treejax.steps.select import Choice

pytestmark = pytest.mark.compiles_fast

LOOKUP = Lookup(longest=5, shortest=1, matches=4)


def random_pool(rng, count, depth, alphabet):
    """A pool in random order with equal siblings: its arrays and every place's path."""
    paths, parents = {-1: ()}, np.full(count, -1, np.int32)
    tokens = rng.integers(0, alphabet, count).astype(np.int32)
    for place in rng.permutation(count):
        above = [p for p in paths if len(paths[p]) < depth]
        parents[place] = rng.choice(above)
        paths[int(place)] = (*paths[int(parents[place])], int(tokens[place]))
    chances = rng.choice(np.array([0.25, 0.5, 0.75, 1.0], np.float32), count)
    return (tokens, parents, chances), paths


def test_merged_pools_equal_dictionaries_of_paths():
    count, depth, nodes, batch = 24, 4, 9, 300
    rng = np.random.default_rng(0)
    made = [random_pool(rng, count, depth, rng.integers(2, 5)) for _ in range(batch)]
    arrays = [jnp.asarray(np.stack(each)) for each in zip(*(pool for pool, _ in made), strict=True)]
    merged = jax.jit(jax.vmap(lambda *pool: merge(Pool(*pool), depth)))(*arrays)
    grow = jax.jit(jax.vmap(lambda pool: best_first(pool, jnp.int32(99), nodes, depth)))
    trees, fewer = jax.device_get(grow(merged)), 0
    for b, ((_, _, chances), paths) in enumerate(made):
        best = {}
        for place, path in paths.items():
            if place >= 0:
                best[path] = max(best.get(path, 0.0), float(chances[place]))
        values = {}
        for path in sorted(best, key=len):
            values[path] = best[path] * values.get(path[:-1], 1.0)
        assert as_paths(trees, b) == best_prefixes(values, nodes)
        fewer += len(values) < count
    assert fewer > 200, "most pools must hold equal siblings"


def test_places_without_a_node_are_left_out():
    pool = Pool(
        tokens=jnp.array([5, 5, 6, 7], jnp.int32),
        parent=jnp.array([-1, -1, 1, -1], jnp.int32),
        value=jnp.array([-1.0, 0.5, 0.5, -1.0]),
    )
    tree = jax.jit(lambda p: best_first(merge(p, 2), jnp.int32(1), 4, 2))(pool)
    assert tree.size == 3
    assert tree.tokens.tolist() == [1, 5, 6, -1, -1]
    assert tree.parent.tolist() == [-1, 0, 1, -1, -1]


def test_nothing_stands_at_or_below_a_place_of_chance_0():
    pool = Pool(
        tokens=jnp.array([4, 5, 6, 6, 8], jnp.int32),
        parent=jnp.array([-1, -1, 1, 0, 3], jnp.int32),
        value=jnp.array([0.5, 0.0, 0.5, 0.25, 0.0]),
    )
    tree = jax.jit(lambda p: best_first(merge(p, 3), jnp.int32(1), 5, 3))(pool)
    assert tree.size == 3
    assert tree.tokens.tolist()[:3] == [1, 4, 6]
    assert tree.parent.tolist()[:3] == [-1, 0, 1]


def test_trust_equals_counting_by_hand():
    depth, longest, decay, rng = 4, 3, 0.5, np.random.default_rng(1)
    learn = jax.jit(lambda *a: trust_of.learn(*a, decay))
    counts = jax.tree.map(lambda x: x[0], trust_of.no_trust(1, longest))
    offered, hits = np.zeros((longest + 1, 2)), np.zeros((longest + 1, 2))
    for _ in range(60):
        size = rng.integers(0, depth + 1)
        tokens = np.where(np.arange(depth) < size, rng.integers(0, 2, depth), -1).astype(np.int32)
        truth, count = rng.integers(0, 2, depth).astype(np.int32), int(rng.integers(0, depth + 1))
        ratios = rng.choice(np.array([0.25, 0.5, 1.0], np.float32), depth)
        several, length = rng.random(depth) < 0.5, int(rng.integers(0, longest + 1))
        copies = trust_of.Copies(*map(jnp.asarray, (tokens, ratios)), jnp.int32(length), several)
        counts = learn(counts, copies, jnp.asarray(truth), jnp.int32(count))
        new_offered, new_hits = np.zeros_like(offered), np.zeros_like(hits)
        seen = np.zeros(offered.shape, bool)
        for d in range(min(size, count)):
            bucket = min(length + d, longest), int(several[d])
            seen[bucket] = True
            new_offered[bucket] += ratios[d]
            new_hits[bucket] += tokens[d] == truth[d]
            if tokens[d] != truth[d]:
                break
        offered = offered * np.where(seen, decay, 1.0) + new_offered
        hits = hits * np.where(seen, decay, 1.0) + new_hits
    np.testing.assert_allclose(counts.offered, offered, rtol=1e-6)
    np.testing.assert_allclose(counts.hits, hits, rtol=1e-6)
    assert hits.sum() > 5
    agreed = np.arange(longest + 1)[:, None]
    expected = np.minimum((hits + agreed) / (offered + agreed + 1), 1.0)
    np.testing.assert_allclose(trust_of.factors(counts), expected, rtol=1e-6)


def planted(seed):
    """Texts over few tokens, so that lookups find something."""
    text = Text(seed)
    text.tokens = (text.tokens % 4).astype(np.int32)
    text.tokens[0] = np.arange(ROOM) % 7  # everything about the first one can be copied
    return text


def expected_values(context, tokens, chances, factor, depth, held):
    """{path: value} by dictionaries: head, copies below the spine and runners-up, and copies."""
    best = {}

    def offer(path, chance):
        if len(path) <= depth:
            best[path] = max(best.get(path, np.float32(0)), np.float32(chance))

    def decided(above):
        every = groups(context + list(above), LOOKUP, depth, held)
        return every[0] if every else None

    def copy(above, found):
        path, share = majority(found), found.trie() if found else {}
        votes = [len(found.texts)] if found else []
        for d in range(len(path)):
            votes.append(round(float(share[path[: d + 1]]) * votes[0]))
            ratio = np.float32(votes[-1]) / np.float32(votes[-2])
            bucket = min(found.length + d, LOOKUP.longest), int(votes[-2] > 1)
            offer((*above, *path[: d + 1]), ratio * factor[bucket])

    spine = ()
    for d, row in enumerate(tokens):
        for rank, token in enumerate(row):
            offer((*spine, int(token)), chances[d, rank])
        spine = (*spine, int(row[0]))
    copy(spine, decided(spine))
    for runner in tokens[0, 1:]:
        copy((int(runner),), decided((int(runner),)))
    found = decided(())
    total = len(found.texts) if found else 0
    for path, share in (found.trie() if found else {}).items():
        before = round(float(found.trie().get(path[:-1], 1)) * total)
        # the value of a prefix is its share of all occurrences, in float32
        share = np.float32(round(float(share) * total)) / np.float32(total)
        above = np.float32(before) / np.float32(total)
        bucket = min(found.length + len(path) - 1, LOOKUP.longest), int(before > 1)
        offer(path, share / above * factor[bucket])
    values = {}
    for path in sorted(best, key=len):
        values[path] = best[path] * values.get(path[:-1], np.float32(1))
    return values


def spine_of(draft, pending, passes):
    @jax.jit
    def run(draft, pending):
        made = Passes(draft, draft.memory.head, pending)
        return draft_spine(draft, made, pending, MIX.width, passes, passes, jnp.bool_(True))

    return jax.device_get(run(draft, pending))


def follow(drafter, draft, text, committed, steps, rng):
    """Let the text be accepted as far as proposed trees hold it, and one token more."""
    _, propose, observe = compiled(drafter)
    for _ in range(steps):
        tree, _, draft = propose(draft, None, text.pending(committed), None)
        tree = jax.device_get(tree)
        path = np.full((BATCH, drafter.max_depth + 1), -1, np.int32)
        hidden = rng.normal(size=(BATCH, drafter.capacity, tiny.CONFIG.hidden_size))
        lengths = np.zeros(BATCH, np.int32)
        for b in range(BATCH):
            node = 0
            while node is not None:
                path[b, lengths[b]] = node
                hidden[b, node] = text.hidden[b, committed[b] + lengths[b]]
                lengths[b] += 1
                token = text.tokens[b, committed[b] + lengths[b]]
                below = (tree.parent[b] == node) & (tree.tokens[b] == token)
                node = int(np.argmax(below)) if below.any() else None
        committed = committed + lengths
        bonus = text.pending(committed)
        choice = Choice(jnp.asarray(path), jnp.asarray(lengths), bonus)
        tree = jax.tree.map(jnp.asarray, tree)
        draft = observe(draft, tree, choice, jnp.asarray(hidden.astype(np.float32)))
    return draft, committed


HELD = np.random.default_rng(4).integers(0, 4, (2, 9)).tolist()
STORE = ResponseStore(32)
for response in HELD:
    STORE.learn(response)
MIX = Mix(width=2, few=1, most=3, covered=4)
DRAFTER = MTPSuffix("best9x6", LOOKUP, STORE, passes=3, mix=MIX)


def test_trees_equal_dictionaries_of_paths():
    text, rng, drafter, shapes = planted(3), np.random.default_rng(4), DRAFTER, set()
    draft, committed = begin(drafter, text, np.array([20, 9, 14])), np.array([20, 9, 14])
    for _ in range(5):
        pending = text.pending(committed)
        tree, q, _ = compiled(drafter)[1](draft, None, pending, None)
        again = compiled(drafter)[1](draft, None, pending, None)[0]
        assert q is None
        jax.tree.map(np.testing.assert_array_equal, tree, again)
        tree, spine = jax.device_get(tree), spine_of(draft, pending, 3)
        factor = np.asarray(trust_of.factors(draft.memory.mix.trust))
        for b in range(BATCH):
            context = text.tokens[b, : committed[b] + 1].tolist()
            known = (spine.tokens[b], spine.chances[b], factor[b], drafter.max_depth, HELD)
            values = expected_values(context, *known)
            assert as_paths(tree, b) == best_prefixes(values, 9)
            pairs = set(zip(tree.parent[b], tree.tokens[b], strict=True)) - {(-1, -1)}
            assert len(pairs) == tree.size[b], "siblings must differ"
            shapes.add(tuple(tree.parent[b].tolist()))
        draft, committed = follow(drafter, draft, text, committed, 1, rng)
    assert len(shapes) > 3, "topology must follow the text"
    assert float(draft.memory.mix.trust.hits[0].sum()) > 3
    np.testing.assert_array_equal(draft.memory.text.length, committed)


def test_a_trusted_match_takes_the_budget_as_depth():
    text, rng = planted(5), np.random.default_rng(6)
    draft, committed = begin(DRAFTER, text, np.array([16, 9, 9])), np.array([16, 9, 9])
    draft, committed = follow(DRAFTER, draft, text, committed, 4, rng)
    tree = compiled(DRAFTER)[1](draft, None, text.pending(committed), None)[0]
    paths = [as_paths(tree, b) for b in range(BATCH)]
    deep = tuple(text.tokens[0, committed[0] + 1 : committed[0] + 7].tolist())
    assert deep in paths[0], "the periodic text must be copied to the full depth"


def test_banned_tokens_are_neither_drafted_nor_copied():
    """The texts are copied from freely, and the head has three runners-up of chance 0."""
    drafter = MTPSuffix("best9x4", LOOKUP, passes=2, mix=Mix(width=5))
    text, lengths = planted(3), np.array([20, 20, 20])
    text.tokens[2] = np.arange(ROOM) % 2 + 5
    free = begin(drafter, text, lengths)
    allowed = [[5, 6], range(40), [5, 6]]
    masks = np.array([np.isin(np.arange(tiny.CONFIG.vocab_size), list(ids)) for ids in allowed])
    sampling, *_ = per_sequence(BATCH, Sampling(allowed_tokens=masks), None, None)
    pending = text.pending(lengths)
    tree, _, draft = compiled(drafter)[1](free.replace(sampling=sampling), None, pending, None)
    other, *_ = compiled(drafter)[1](free, None, pending, None)
    for b in (0, 2):
        drafted = set(tree.tokens[b, 1 : tree.size[b]].tolist())
        assert drafted and drafted <= {5, 6}
        parent = np.asarray(tree.parent[b, 1 : tree.size[b]])
        assert (parent >= 0).all() and (parent < np.arange(1, tree.size[b])).all()
    assert set(other.tokens[0, 1:].tolist()) - {5, 6}, "without bans others are worth more"
    paths = as_paths(jax.device_get(tree), 2)
    assert tuple(text.tokens[2, 21:25].tolist()) in paths, "allowed tokens are still copied"
    # What was not proposed counts neither as offered nor as missed.
    assert (np.asarray(draft.memory.mix.copies.tokens)[0] == -1).all()
    assert (np.asarray(draft.memory.mix.copies.tokens)[2] >= 5).all()


def test_passes_hang_on_the_match():
    """Few passes only where every active sequence is covered, and then as if few were asked."""
    either = dataclasses.replace(DRAFTER, passes="conditional")
    text, lengths = planted(7), np.array([30, 30, 30])
    for row in (1, 2):
        text.tokens[row] = np.arange(ROOM) % (row + 4)
    made = []
    for uncovered in (False, True):
        if uncovered:
            text.tokens[2, 25:] = 50 + np.arange(ROOM - 25)
        draft = begin(either, text, lengths)
        tree, _, draft = compiled(either)[1](draft, None, text.pending(lengths), None)
        fixed = DRAFTER if uncovered else dataclasses.replace(DRAFTER, passes=1)
        other = begin(fixed, text, lengths)
        other = compiled(fixed)[1](other, None, text.pending(lengths), None)[0]
        jax.tree.map(np.testing.assert_array_equal, tree, other)
        length = jnp.array([1, 1, int(not uncovered)], jnp.int32)
        path = jnp.full((BATCH, 7), -1, jnp.int32).at[:, 0].set(jnp.where(length > 0, 0, -1))
        hidden = jnp.zeros((BATCH, either.capacity, tiny.CONFIG.hidden_size))
        choice = Choice(path, length, text.pending(lengths + 1))
        draft = compiled(either)[2](draft, tree, choice, hidden)
        made.append((int(draft.memory.mix.passes), int(draft.memory.mix.steps)))
    assert made == [(1, 1), (3, 1)]
    # The sequence that nothing covers took no part in the step: it decides nothing afterwards.
    _, _, draft = compiled(either)[1](draft, None, text.pending(lengths + 1), None)
    assert int(draft.memory.mix.made) == 1


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"tree": "hydra8", "passes": 3}, "fixed roles"),
        ({"tree": "hydra8", "mix": Mix()}, "fixed roles"),
        ({"tree": "chain5"}, "cannot fill"),
        ({"tree": "best200x10"}, "more nodes than the 1.. that 5 head passes of width 3"),
        ({"tree": "best9x4", "passes": 5}, "from 1 to 4"),
        ({"tree": "best9x4", "passes": "some"}, "from 1 to 4"),
        ({"tree": "best9x4", "passes": "conditional"}, "too many"),
        ({"tree": "best9x8", "passes": "conditional", "lookup": Lookup(longest=3)}, "never occur"),
    ],
)
def test_what_cannot_act_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        MTPSuffix(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"few": 0}, {"few": 6}, {"covered": 0}, {"decay": 0.0}]
)
def test_impossible_mixes_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        Mix(**wrong)


def test_text_is_plain_decodings():
    model, prompts = tiny.model(), [[5, 6, 7, 8] * 4, [9, 3, 3], [1, 2, 1, 2, 1]]
    plain = treejax.complete(model, prompts, max_tokens=24, drafter=None)
    store = ResponseStore(64)
    for each in plain[:2]:
        store.learn(each.tokens)
    mix = Mix(few=1, most=3, covered=3)
    drafter = MTPSuffix("best9x6", LOOKUP, store, passes="conditional", mix=mix)
    drafted = treejax.complete(model, prompts, max_tokens=24, drafter=drafter)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    accepted = [each.stats.num_accepted_tokens for each in drafted]
    assert min(accepted[:2]) > 10, "what the store holds must be copied"
