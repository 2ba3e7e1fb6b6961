"""Field cases FC-10 to FC-12: prompts, padding, slots, and rows that take no part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_trees
import reference_run as run
from stepping import Surfaces, assert_consistent, choose, decode

from treejax import layers
from treejax.engine import complete
from treejax.model import prefill
from treejax.policies import REGISTRY
from treejax.state import init_state, reset, with_policy
from treejax.steps.publish import publish
from treejax.steps.verify import verify
from treejax.tree import Tree

policies = pytest.mark.parametrize("policy", REGISTRY)


def fresh(policy="replay", batch=run.BATCH):
    return init_state(run.CONFIG, batch, run.ROWS, policy=policy)


def feed(state, rows):
    """Prefill one piece a sequence, empty pieces included: (out, state)."""
    return prefill(run.model(), state, *run.padded(rows))


def assert_states_close(actual, expected, tolerance=run.TOLERANCE):
    actual, expected = Surfaces(actual), Surfaces(expected)
    for b in range(len(actual.length)):
        assert_consistent(actual.row(b), expected.row(b), tolerance)


def assert_same_bytes(actual, expected, b):
    """All that a slot owns is bitwise the same, attention rows past its length included."""
    for name in ("recurrent", "conv", "keys", "values"):
        both = (jax.tree.leaves(getattr(state, name)) for state in (actual, expected))
        for leaves in zip(*both, strict=True):
            a, e = (np.asarray(leaf)[:, b] for leaf in leaves)
            if name in ("keys", "values"):
                a, e = a[:, :-1], e[:, :-1]  # the spare row absorbs writes that do not count
            assert a.tobytes() == e.tobytes(), name
    assert actual.length[b] == expected.length[b]


@functools.cache
def short_prompts():
    """Texts of 4 to 7 tokens, states of all but their last 4, and (out, state) of the whole."""
    rng = np.random.default_rng(31)
    texts = [rng.integers(0, 61, length + 4) for length in range(4)]
    _, state = feed(fresh(), [text[:length] for length, text in enumerate(texts)])
    return texts, state, *feed(fresh(), texts)


@policies
def test_fc10_prompts_shorter_than_the_convolution(policy):
    """FC-10: lengths 0 to 3 at width 4: history [0,0,x0], [0,x0,x1], [x0,x1,x2]; then verified."""
    texts, state, whole, expected = short_prompts()
    state = with_policy(state, policy)
    np.testing.assert_array_equal(state.length, [0, 1, 2, 3])
    for layer in run.CONFIG.linear_layers:
        history = np.asarray(state.conv_of(layer))
        for length in range(4):
            assert (history[length, : 3 - length] == 0).all()
            assert (history[length, 3 - length :] != 0).any(-1).all()
    tree = Tree.from_parents(
        [text[length:] for length, text in enumerate(texts)],
        [random_trees.chain(4)] * 4,
        run.CAPACITY,
        run.MAX_DEPTH,
    )
    out, scratch = verify(run.model(), state, tree)
    state = publish(run.model(), state, tree, scratch, choose([range(4)] * 4, run.MAX_DEPTH))
    assert_states_close(state, expected)
    for b in range(4):
        np.testing.assert_allclose(out.logits[b, 3], whole.logits[b], rtol=0, atol=1e-3)
        # logits of about 10, from states that agree to 1e-5


@policies
def test_fc10_divided_prompts(policy):
    """FC-10: 1+7, 3+5, 64+1 and 65+63 tokens leave what 8, 8, 65 and 128 tokens at once leave."""
    rng = np.random.default_rng(32)
    pieces = [(1, 7), (3, 5), (64, 1), (65, 63)]
    texts = [rng.integers(0, 61, sum(piece)) for piece in pieces]
    whole, expected = feed(fresh(policy), texts)
    _, state = feed(fresh(policy), [text[:n] for text, (n, _) in zip(texts, pieces, strict=True)])
    out, state = feed(state, [text[n:] for text, (n, _) in zip(texts, pieces, strict=True)])
    assert_states_close(state, expected)
    np.testing.assert_allclose(out.logits, whole.logits, rtol=0, atol=1e-3)  # as above


def test_fc10_a_prompt_longer_than_the_largest_bucket():
    """FC-10: 1,100 tokens run as blocks; states and scores are those of pieces of 500 and 600."""
    text = np.random.default_rng(33).integers(0, 61, (1, 1100))
    empty = init_state(run.CONFIG, 1, 1100)
    out, at_once = prefill(run.model(), empty, text, [1100], hidden="all")
    _, state = prefill(run.model(), empty, text[:, :500], [500])
    last, state = prefill(run.model(), state, text[:, 500:], [600])
    assert_states_close(state, at_once)
    np.testing.assert_allclose(last.logits, out.logits, rtol=0, atol=1e-3)  # as above
    assert out.hidden.shape == (1, 1100, run.CONFIG.hidden_size)
    np.testing.assert_allclose(out.hidden[:, -1], last.hidden, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [[1, 2], np.array([False, True, True, False])], ids=str)
@policies
def test_fc10_a_recycled_slot_starts_from_zero(policy, rows):
    """FC-10: one-token prompts in slots that served long requests equal a fresh engine's."""
    rng = np.random.default_rng(34)
    _, used = feed(fresh(policy), [rng.integers(0, 61, 128) for _ in range(4)])
    recycled = reset(used, rows)
    pieces = [[], [7], [8], []]
    out, recycled = feed(recycled, pieces)
    expected, new = feed(fresh(policy), pieces)
    for b in (1, 2):
        actual, wanted = Surfaces(recycled).row(b), Surfaces(new).row(b)
        assert recycled.length[b] == 1
        for name, array in wanted.items():
            np.testing.assert_array_equal(actual[name], array)
        np.testing.assert_array_equal(out.logits[b], expected.logits[b])
    for b in (0, 3):  # the neighbours never noticed
        assert_same_bytes(recycled, used, b)


def test_fc10_an_empty_prompt_is_refused_and_nothing_is_added():
    """FC-10: length 0 is one line; the same prompt gives the same text as feeding it by hand."""
    with pytest.raises(ValueError, match="^prompt 1 is empty, expected at least one token$"):
        complete(run.model(), [[1, 2], []], max_tokens=1)
    out, _ = run.prefilled("replay")
    results = complete(run.model(), run.prompts(), max_tokens=1, drafter=None)
    firsts = [result.tokens[0] for result in results]
    np.testing.assert_array_equal(firsts, np.argmax(out.logits, -1))


def to_the_right(tokens, mask):
    """Left-padded prompts as the right-padded ones that prefill takes."""
    return run.padded([row[real] for row, real in zip(tokens, mask.astype(bool), strict=True)])


@functools.cache
def solo(b):
    """One request alone in a batch of one: scores and hidden rows of its prompt, and its state."""
    return prefill(run.model(), fresh(batch=1), *run.padded([run.prompts()[b]]), hidden="all")


@pytest.mark.parametrize("side", ["left", "right"])
def test_fc11_padding_never_reaches_a_state(side):
    """FC-11: 3, 9 and 17 tokens (and 5) in one batch, padded with real token ids, equal solo."""
    prompts, width = run.prompts(), 20
    tokens = np.random.default_rng(35).integers(0, 61, (run.BATCH, width))
    mask = np.zeros((run.BATCH, width), np.int32)
    for b, prompt in enumerate(prompts):
        place = slice(0, len(prompt)) if side == "right" else slice(width - len(prompt), width)
        tokens[b, place], mask[b, place] = prompt, 1
    given = (tokens, mask.sum(1)) if side == "right" else to_the_right(tokens, mask)
    out, state = prefill(run.model(), fresh(), *given, hidden="all")
    scores = np.asarray(jax.jit(layers.logits)(run.model().params, out.hidden))
    for b, prompt in enumerate(prompts):
        alone, own = solo(b)
        wanted = np.asarray(layers.logits(run.model().params, alone.hidden))[0, : len(prompt)]
        # Scores are near 10 in magnitude: 1e-5 of that, times the head's gain of 50.
        np.testing.assert_allclose(scores[b, : len(prompt)], wanted, rtol=0, atol=1e-3)
        assert_consistent(Surfaces(state).row(b), Surfaces(own).row(0), run.TOLERANCE)


def test_fc11_a_padded_row_alone():
    """FC-11: a batch of one is masked as well: 3 tokens padded to 17 equal 3 tokens."""
    tokens = np.full((1, 17), 5)
    tokens[0, :3] = run.prompts()[0]
    out, state = prefill(run.model(), fresh(batch=1), tokens, [3])
    alone, own = solo(0)
    assert_states_close(state, own)
    np.testing.assert_allclose(out.logits, alone.logits, rtol=0, atol=1e-3)  # as above


@pytest.mark.parametrize("b", range(run.BATCH))
def test_fc11_streams_equal_solo(b):
    """FC-11: greedy decoding alone gives the stream that the request had beside its neighbours."""
    reference = run.greedy_reference()
    out, state = solo(b)
    logits, tokens = out.logits, []
    for _ in range(24):
        tokens.append(int(np.argmax(logits[0])))
        logits, state = decode(run.model(), state, tokens[-1:])
    np.testing.assert_array_equal(tokens, reference.tokens[:24, b])
    assert_consistent(Surfaces(state).row(0), reference.row(b, 24), run.TOLERANCE)


LIVE = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (3,), (1, 3)]


@pytest.mark.parametrize("live", LIVE, ids=str)
@policies
def test_fc12_inactive_rows(policy, live):
    """FC-12: capacity 4 with 1 to 4 live requests: each equals solo, unused slots keep their bytes.

    Three steps of a branching tree in seven rows, of which five are in use.
    """
    reference = run.random_reference()
    _, start = run.prefilled(policy)
    state, steps = start, np.zeros(run.BATCH, int)
    parents, right = [-1, 3, 0, 2, 0], [0, 2, 3, 1]  # the accepted path in packing order
    for take in (3, 1, 4):
        trees, paths = [[0]] * run.BATCH, [[]] * run.BATCH
        lists = [[-1]] * run.BATCH
        for b in live:
            tokens = np.full(5, 60)
            tokens[right] = reference.tokens[steps[b] : steps[b] + 4, b]
            tokens[4] = (tokens[2] + 1) % 61  # the sibling
            trees[b], lists[b], paths[b] = tokens, parents, right[:take]
            steps[b] += take
        tree = Tree.from_parents(trees, lists, run.CAPACITY, run.MAX_DEPTH)
        _, scratch = verify(run.model(), state, tree)
        state = publish(run.model(), state, tree, scratch, choose(paths, run.MAX_DEPTH))
        surfaces = Surfaces(state)
        for b in range(run.BATCH):
            if b in live:
                expected = reference.row(b, steps[b])
                assert_consistent(surfaces.row(b), expected, run.TOLERANCE)
            else:
                assert_same_bytes(state, start, b)


def test_fc12_rows_past_the_length_are_never_read():
    """FC-12: other numbers in all rows past a sequence's length leave every bit as it was."""
    _, state = run.prefilled("replay")
    past = np.arange(run.ROWS + 1) >= np.array(run.PROMPTS)[:, None]
    past = jnp.asarray(past)[None, :, :, None, None]
    used = state.replace(
        keys=jnp.where(past, 30.0, state.keys), values=jnp.where(past, -30.0, state.values)
    )
    tree = Tree.from_parents([range(4)] * 4, [[-1, 0, 0, 1]] * 4, run.CAPACITY, run.MAX_DEPTH)
    for step in (
        lambda start: verify(run.model(), start, tree)[0].logits[:, :4],
        lambda start: feed(start, [[1, 2, 3]] * run.BATCH)[0].logits,
    ):
        clean, dirty = (np.asarray(step(start)) for start in (state, used))
        np.testing.assert_array_equal(clean.view(np.uint32), dirty.view(np.uint32))


def test_fc12_what_does_not_fit_is_refused_before_the_call():
    """FC-12: no write is clamped onto committed rows; each refusal is one line."""
    model, rows = run.model(), 20
    state = init_state(run.CONFIG, run.BATCH, rows)
    _, state = prefill(model, state, *run.padded(run.prompts()))  # lengths 3, 9, 17, 5
    chain = [random_trees.chain(5)] * run.BATCH
    tree = Tree.from_parents([range(5)] * run.BATCH, chain, run.CAPACITY, run.MAX_DEPTH)
    with pytest.raises(ValueError, match="needs 22 rows and the state holds 20"):
        verify(model, state, tree)
    fits = tree.trim(jnp.array([4, 4, 2, 4], jnp.int32))
    _, scratch = verify(model, state, fits)
    full = publish(model, state, fits, scratch, choose([[0], [0], [0, 1, 2], [0]], run.MAX_DEPTH))
    np.testing.assert_array_equal(full.length, [4, 10, 20, 6])
    for b in range(run.BATCH):  # committed rows are what they were
        before, after = Surfaces(state).row(b), Surfaces(full).row(b)
        for name in ("K1", "V1"):
            np.testing.assert_array_equal(after[name][: len(before[name])], before[name])
    root = Tree.root_only(jnp.zeros(run.BATCH, jnp.int32), run.CAPACITY, run.MAX_DEPTH)
    with pytest.raises(ValueError, match="needs 21 rows and the state holds 20"):
        verify(model, full, root)
    with pytest.raises(ValueError, match="needs 21 rows and the state holds 20"):
        prefill(model, full, np.zeros((run.BATCH, 1), np.int32), [0, 0, 1, 0])
    with pytest.raises(ValueError, match="needs 22 rows and the state holds 20"):
        publish(model, full, fits, scratch, choose([[], [], [0, 1], []], run.MAX_DEPTH))
    wrong_paths = {
        "not a path from the root": [[1, 2], [], [], []],
        "does not follow the parents": [[0, 2], [], [], []],
    }
    for message, paths in wrong_paths.items():
        with pytest.raises(ValueError, match=message):
            publish(model, state, fits, scratch, choose(paths, run.MAX_DEPTH))
    with pytest.raises(ValueError, match="the tree has batch 1 and the state 4"):
        verify(model, state, Tree.from_parents([1], [-1]))


def test_fc12_a_scratch_of_another_tree_state_or_policy_is_refused():
    """FC-12: what was verified is what is published, in the state that it was verified on."""
    model, state = run.model(), fresh()
    tree, twin = (Tree.from_parents([[t, 5]] * run.BATCH, [[-1, 0]] * run.BATCH) for t in (1, 2))
    _, scratch = verify(model, state, tree)
    choice = choose([[0, 1]] * run.BATCH, 1)
    after = publish(model, state, tree, scratch, choice)
    with pytest.raises(ValueError, match="made from another tree"):
        publish(model, state, twin, scratch, choice)
    with pytest.raises(ValueError, match=r"lengths \[0, 0, 0, 0\] and this one has \[2, 2, 2, 2\]"):
        publish(model, after, tree, scratch, choice)
    with pytest.raises(ValueError, match="under policy Replay.* and the state has WY"):
        publish(model, with_policy(state, "wy"), tree, scratch, choice)


def test_fc12_tokens_and_lengths_out_of_range_are_refused():
    """FC-12: an index that JAX would clamp is an error on the host."""
    state = fresh()
    for tokens, lengths, message in (
        (np.full((4, 2), 61), [2, 2, 2, 2], "tokens must lie in 0..60, got 61"),
        (np.full((4, 2), -1), [2, 2, 2, 2], "tokens must lie in 0..60"),
        (np.zeros((4, 2), int), [3, 0, 0, 0], "must lie in 0..2"),
        (np.zeros((4, 2), int), [-1, 0, 0, 0], "must lie in 0..2"),
        (np.zeros((3, 2), int), [1, 1, 1], "do not fit a state of batch 4"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            prefill(run.model(), state, tokens, lengths)
        assert "\n" not in str(caught.value)
    for rows in ([4], [-1]):
        with pytest.raises(ValueError, match=r"must lie in 0\.\.3"):
            reset(state, rows)
