"""The MTP head against golden numbers, and its cache against one rebuilt from scratch."""

import functools
from types import SimpleNamespace

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from lookup_oracle import continuations, majority

from treejax import layers
from treejax.checkpoint import load_model
from treejax.drafters import MTP, Hydra, Lookup, MTPSuffix, make_drafter
from treejax.drafters.topologies import parse
from treejax.model import Model
from treejax.mtp import mtp_forward
from treejax.steps.select import Choice

forward = jax.jit(mtp_forward, static_argnames="config")
scores = jax.jit(layers.logits)


@functools.cache
def golden_model(preset):
    return load_model(golden.checkpoint(preset))


@functools.cache
def golden_pairs(preset):
    """All pairs of the golden run, prompt and chained drafts: hidden [1, T, H], tokens [1, T]."""
    arrays = golden.arrays(preset, "mtp")
    chained = [arrays["hidden"][-1:], arrays["chain_hidden"][:-1]]
    hidden = np.concatenate([arrays["main_hidden"], *chained])
    following = [arrays["ids"][1:], arrays["next_token"][None], arrays["draft_tokens"][:-1]]
    following = np.concatenate(following).astype(np.int32)
    return jnp.asarray(hidden)[None], jnp.asarray(following)[None]


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_fc21_head_equals_golden(preset):
    """FC-21: embedding half first, post-norm hidden, rotary position t; then chained on h'."""
    model, arrays = golden_model(preset), golden.arrays(preset, "mtp")
    out, (keys, values) = forward(model.config, model.params, *golden_pairs(preset))
    logits, count = scores(model.params, out), len(arrays["ids"])
    pairs = {
        "hidden": out[0, :count],
        "logits": logits[0, :count],
        "chain_hidden": out[0, count:],
        "chain_logits": logits[0, count:],
        "key": np.swapaxes(keys[0, :count], 0, 1),
        "value": np.swapaxes(values[0, :count], 0, 1),
    }
    for name, got in pairs.items():
        np.testing.assert_allclose(got, arrays[name], atol=golden.TOLERANCE, rtol=0, err_msg=name)


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_fc21_drafter_equals_golden(preset):
    """FC-21: prime and propose give the golden drafts, runners-up and cache.

    So many runners-up that their order gives away any change of the logits.
    """
    model, arrays = golden_model(preset), golden.arrays(preset, "mtp")
    ids, steps, width = arrays["ids"], len(arrays["draft_tokens"]), 60
    drafter = MTP(f"caterpillar{steps}x{width}")
    draft = drafter.init(model, 1, 32)
    draft = jax.jit(drafter.prime)(
        draft,
        jnp.asarray(arrays["main_hidden"])[None],
        jnp.asarray(ids)[None],
        jnp.array([len(ids)], jnp.int32),
    )
    pending = jnp.asarray(arrays["next_token"])[None]
    tree, q, draft = jax.jit(drafter.propose)(draft, None, pending, None)

    assert q is None and int(tree.size[0]) == 1 + steps * width
    tokens, shape = np.asarray(tree.tokens[0]), drafter.static_shape
    golden_logits = np.concatenate([arrays["logits"][-1:], arrays["chain_logits"]])
    node = 0
    for step in range(steps):
        below = list(shape.children(node))
        assert tokens[below[0]] == arrays["draft_tokens"][step]
        best = np.sort(golden_logits[step])[::-1][:width]
        # twice the tolerance: two logits may swap ranks when each is off by one
        limit = 2 * golden.TOLERANCE
        np.testing.assert_allclose(golden_logits[step][tokens[below]], best, atol=limit, rtol=0)
        node = below[0]
    for name, cache in (("key", draft.memory.keys), ("value", draft.memory.values)):
        got = np.swapaxes(cache[0, : len(ids)], 0, 1)
        np.testing.assert_allclose(got, arrays[name], atol=golden.TOLERANCE, rtol=0, err_msg=name)


@pytest.mark.parametrize("preset", golden.PRESETS)
@pytest.mark.parametrize("mistake", ["pre-norm hidden", "hidden first", "shifted hidden"])
def test_fc21_wrong_inputs_move_the_logits(preset, mistake):
    """FC-21: the golden comparison would notice each known way to feed the head wrongly."""
    model, arrays = golden_model(preset), golden.arrays(preset, "mtp")
    (hidden, following), params = golden_pairs(preset), dict(model.params)
    if mistake == "pre-norm hidden":  # up to a scale that the head's own norm removes
        hidden = hidden / (1.0 + params["norm"])[None, None, :]
    elif mistake == "hidden first":
        halves = jnp.split(params["mtp"]["fc"], 2)
        params["mtp"] = params["mtp"] | {"fc": jnp.concatenate(halves[::-1])}
    else:
        hidden = jnp.roll(hidden, 1, axis=1)
    out, _ = forward(model.config, params, hidden, following)
    expected = np.concatenate([arrays["logits"], arrays["chain_logits"]])
    moved = np.abs(scores(params, out)[0] - expected).max()
    assert moved > 100 * golden.TOLERANCE


ROOM, BATCH = 60, 3  # the same everywhere, so that each drafter is compiled once


class Text:
    """Random texts with a random "true" hidden row a token: what a target would hand over."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        vocabulary, width = tiny.CONFIG.vocab_size, tiny.CONFIG.hidden_size
        self.tokens = rng.integers(0, vocabulary, (BATCH, ROOM), dtype=np.int32)
        self.hidden = rng.normal(size=(BATCH, ROOM, width)).astype(np.float32)

    def prompt(self, lengths):
        """hidden, tokens and lengths of a right-padded prompt, with filler past its end."""
        real = np.arange(ROOM) < np.array(lengths)[:, None]
        tokens = np.where(real, self.tokens, 3).astype(np.int32)
        hidden = np.where(real[:, :, None], self.hidden, np.float32(9.0))
        return jnp.asarray(hidden), jnp.asarray(tokens), jnp.array(lengths, jnp.int32)

    def pending(self, committed):
        return jnp.asarray(self.tokens[np.arange(BATCH), committed])

    def step(self, shape, committed, ends, rng):
        """A verified tree that accepts the path to row ``ends[b]``; -1 takes no part.

        Accepted rows carry the text's tokens and hidden rows, all others junk.
        """
        size = (BATCH, shape.capacity, tiny.CONFIG.hidden_size)
        tokens = rng.integers(0, tiny.CONFIG.vocab_size, size[:2], dtype=np.int32)
        hidden = rng.normal(size=size).astype(np.float32)
        path = np.full((BATCH, shape.max_depth + 1), -1, np.int32)
        lengths = np.zeros(BATCH, np.int32)
        for b, end in enumerate(ends):
            if end >= 0:
                rows = shape.path(int(end))
                where = committed[b] + np.arange(len(rows))
                tokens[b, list(rows)] = self.tokens[b, where]
                hidden[b, list(rows)] = self.hidden[b, where]
                path[b, : len(rows)], lengths[b] = rows, len(rows)
        bonus = self.pending(committed + lengths)
        choice = Choice(jnp.asarray(path), jnp.asarray(lengths), bonus)
        return shape.full(jnp.asarray(tokens)), choice, jnp.asarray(hidden), lengths


@functools.cache
def compiled(drafter):
    return jax.jit(drafter.prime), jax.jit(drafter.propose), jax.jit(drafter.observe)


def begin(drafter, text, lengths):
    """A drafter's data after the first ``lengths`` tokens of each text."""
    draft = drafter.init(tiny.model(), BATCH, ROOM)
    return compiled(drafter)[0](draft, *text.prompt(lengths))


def propose_after(drafter, text, lengths):
    """What is proposed after the first ``lengths`` tokens, seen as a prompt: tokens [B, N]."""
    draft = begin(drafter, text, lengths)
    return np.asarray(compiled(drafter)[1](draft, None, text.pending(lengths), None)[0].tokens)


def assert_cache(draft, other, lengths):
    """The first ``lengths`` rows of two heads' caches agree."""
    for b, count in enumerate(lengths):
        for name in ("keys", "values"):
            left, right = (getattr(d, name)[b, :count] for d in (draft, other))
            # the same products in blocks of other sizes: float32 rounding of values near 1
            np.testing.assert_allclose(left, right, atol=1e-5, rtol=0, err_msg=name)


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
                copied = majority(continuations(context, lookup, len(rows)))
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
    np.testing.assert_array_equal(draft.memory.history.length, committed)
    for b, count in enumerate(committed):
        kept = draft.memory.history.tokens[b, :count]
        np.testing.assert_array_equal(kept, text.tokens[b, :count])
    fresh = begin(drafter, text, committed)
    right, _, fresh = propose(fresh, None, text.pending(committed), None)
    np.testing.assert_array_equal(left.tokens, right.tokens)
    assert_cache(draft.memory.head, fresh.memory.head, committed)


@pytest.mark.parametrize("name", ["mtp", "mtp+suffix"])
def test_fc20_no_head_no_mtp_drafter(name):
    """FC-20: a model that loads without ``mtp.*`` tensors refuses the drafter before generating."""
    params = {key: value for key, value in tiny.model().params.items() if key != "mtp"}
    with pytest.raises(ValueError, match=r"needs an MTP head, .* no mtp\.\* tensors") as caught:
        make_drafter(name).init(Model(params, tiny.CONFIG), 1, 16)
    assert "\n" not in str(caught.value)
    assert make_drafter("suffix").init(Model(params, tiny.CONFIG), 1, 16)


@pytest.mark.parametrize("preset", ["qwen3_next", "qwen3_5", "qwen3_5_wrapped"])
def test_bfloat16_head_gives_the_golden_drafts(preset):
    """Every dtype meets its own; the drafts are those of float32, 0.19 ahead of the second best."""
    model, arrays = load_model(golden.checkpoint(preset), "bfloat16"), golden.arrays(preset, "mtp")
    drafter, count = MTP(f"chain{len(arrays['draft_tokens'])}"), len(arrays["ids"])
    draft = drafter.init(model, 1, 32)
    prompt = jnp.asarray(arrays["main_hidden"], jnp.bfloat16), jnp.asarray(arrays["ids"])
    lengths = jnp.array([count], jnp.int32)
    draft = jax.jit(drafter.prime)(draft, *(a[None] for a in prompt), lengths)
    pending = jnp.asarray(arrays["next_token"])[None]
    tree, _, draft = jax.jit(drafter.propose)(draft, None, pending, None)
    assert draft.memory.keys.dtype == draft.memory.waiting.dtype == jnp.bfloat16
    np.testing.assert_array_equal(tree.tokens[0, 1:], arrays["draft_tokens"])
