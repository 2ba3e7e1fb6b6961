"""Best-first trees of the MTP head against brute force in float64, and in the loop."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from draft_texts import BATCH, Text, begin, compiled
from oracle_model import OracleModel

import treejax
from treejax import layers
from treejax.checkpoint import load_model
from treejax.drafters import MTP, MTPTree, make_drafter
from treejax.mtp import mtp_forward
from treejax.sampling import Sampling, noise, per_sequence

pytestmark = pytest.mark.compiles_fast

PRESET, IDS, DEPTH = "qwen3_5", (3, 7, 11, 20, 41, 58), 3
COUNTS = (6, 9, 11)  # tokens of the golden text that each sequence of the batch holds
LENGTHS = (4, 9, 1)  # the same of made-up texts


@functools.cache
def oracle_rows(form):
    """Per sequence: {path of tokens: its value}, of all paths of up to DEPTH tokens of IDS."""
    model, arrays = OracleModel(golden.checkpoint(PRESET)), golden.arrays(PRESET, "mtp")
    found = []
    for count in COUNTS:
        hidden, ids = arrays["main_hidden"][:count], arrays["ids"][: count + 1]
        out, logits, *cache = model.mtp(hidden, ids[1:])
        values, level = {}, {(): (0.0, out[-1:], logits[-1], cache)}
        for _ in range(DEPTH):
            rows = {path: log_softmax(node[2]) for path, node in level.items()}
            if form == "marginal":  # the row of the best path serves them all
                best = max(level, key=lambda path: level[path][0])
                rows = dict.fromkeys(level, rows[best])
            following = {}
            for path, (value, above, _, cache) in level.items():
                for column, token in enumerate(IDS):
                    out, logits, *longer = model.mtp(above, [token], *cache)
                    child = (*path, token)
                    values[child] = value + rows[path][column]
                    following[child] = (values[child], out, logits[-1], longer)
            level = following
        found.append(values)
    return found


def log_softmax(logits):
    """Of the columns of IDS alone."""
    z = logits[list(IDS)]
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


@functools.cache
def golden_draft():
    """What every drafter of this depth and vocabulary knows after COUNTS tokens of the text."""
    drafter, arrays = (
        MTPTree("best9x3", branch=3, vocabulary=IDS[::-1]),
        golden.arrays(PRESET, "mtp"),
    )
    ids, hidden = arrays["ids"].astype(np.int32), arrays["main_hidden"].astype(np.float32)
    every = jnp.asarray(np.stack([hidden] * 3)), jnp.asarray(np.stack([ids] * 3))
    draft = drafter.init(load_model(golden.checkpoint(PRESET)), 3, 32)
    draft = jax.jit(drafter.prime)(draft, *every, jnp.array(COUNTS, jnp.int32))
    return draft, jnp.asarray(ids[list(COUNTS)])


def paths_of(tree, b):
    """Tokens from below the root to each row in use, the root left out, in the tree's order."""
    tokens, parent = np.asarray(tree.tokens[b]), np.asarray(tree.parent[b])
    found = {0: ()}
    for row in range(1, int(tree.size[b])):
        assert 0 <= parent[row] < row, "parents come first"
        found[row] = (*found[int(parent[row])], int(tokens[row]))
    return [found[row] for row in sorted(found)][1:]


def beam_search(values, beam, branch):
    """What a beam sees, level by level, from the values of all paths."""
    seen, level = [], [()]
    for depth in range(DEPTH):
        children = []
        for path in level:
            own = [child for child in values if child[:-1] == path]
            children += sorted(own, key=values.get, reverse=True)[:branch]
        seen += children
        level = sorted(children, key=values.get, reverse=True)[:beam]
        assert len(children[0]) == depth + 1
    return seen


@pytest.mark.parametrize("form", ["conditional", "marginal"])
@pytest.mark.parametrize("nodes, beam, branch", [(20, 36, 6), (9, 2, 3)])
def test_the_tree_is_the_best_that_the_beam_sees(form, nodes, beam, branch):
    """The N best path products in float64, in order; of a beam of 36 and 6 children, of all."""
    drafter = MTPTree(
        f"best{nodes}x{DEPTH}", beam=beam, branch=branch, form=form, vocabulary=IDS[::-1]
    )

    @jax.jit
    def propose(draft, pending):
        return drafter.propose(draft, None, pending, None), drafter.grow(draft, pending, None)

    (tree, q, _), (grown, _) = propose(*golden_draft())
    assert (q, tree.capacity, tree.max_depth) == (None, nodes + 1, DEPTH)
    np.testing.assert_array_equal(tree.size, [nodes + 1] * 3)
    for b, values in enumerate(oracle_rows(form)):
        seen = beam_search(values, beam, branch)
        if beam == 36:
            assert len(seen) == 6 + 36 + 216
        best = sorted(seen, key=values.get, reverse=True)[: nodes + 1]
        gaps = -np.diff([values[path] for path in best])
        assert gaps.min() > golden.TOLERANCE / 10, "a tie that rounding may turn"
        assert paths_of(tree, b) == best[:nodes]

        paths = []
        for token, above in np.stack([grown.tokens[b], grown.above[b]], axis=1):
            paths.append((*(paths[above] if above >= 0 else ()), int(token)))
        assert sorted(paths) == sorted(seen)
        expected = [values[path] for path in paths]
        np.testing.assert_allclose(grown.values[b], expected, atol=golden.TOLERANCE, rtol=0)


@functools.cache
def primed(seed, lengths):
    """What every drafter of this depth knows of a text of draft_texts, and its pending tokens."""
    text = Text(seed)
    draft = begin(MTP("2,2,2"), text, np.array(lengths))
    return draft, text.pending(np.array(lengths))


def propose(drafter, draft, pending):
    return compiled(drafter)[1](draft, None, pending, None)


def test_rows_are_those_of_trees_of_fixed_shape():
    """All of 2 children below every node: conditional rows; along the greedy path: marginal."""
    draft, pending = primed(1, LENGTHS)
    fixed = propose(MTP("2,2,2"), draft, pending)[0]
    spine = propose(MTP("caterpillar3x2"), draft, pending)[0]
    for form in ("conditional", "marginal"):
        drafter = MTPTree("best14x3", beam=8, branch=2, form=form)
        tree, _, after = propose(drafter, draft, pending)
        again, _, _ = propose(drafter, after, pending)
        jax.tree.map(np.testing.assert_array_equal, tree, again)
        for b in range(BATCH):
            paths = paths_of(tree, b)
            assert len(set(paths)) == 14, "siblings differ"
            if form == "conditional":
                assert set(paths) == set(paths_of(fixed, b))
                continue
            levels = [{path[d] for path in paths_of(spine, b) if len(path) > d} for d in range(3)]
            every = [set(itertools.product(*levels[: d + 1])) for d in range(3)]
            assert set(paths) == set.union(*every)


def test_sequences_do_not_see_one_another():
    drafter = MTPTree("best9x3", beam=3, branch=4)
    together = propose(drafter, *primed(5, LENGTHS))[0]
    for b in range(BATCH):
        text, mixed, counts = Text(5), Text(6), np.array([5, 9, 2])
        counts[b] = LENGTHS[b]
        mixed.tokens[b], mixed.hidden[b] = text.tokens[b], text.hidden[b]
        draft = begin(MTP("2,2,2"), mixed, counts)
        other = propose(drafter, draft, mixed.pending(counts))[0]
        assert paths_of(other, b) == paths_of(together, b)
        assert paths_of(other, b - 1) != paths_of(together, b - 1)


def sampled(drafter, settings, seeds):
    """A function of seeds: the proposals of a sampled step at ``settings``."""
    draft, pending = primed(2, LENGTHS)
    lengths = jnp.array(LENGTHS, jnp.int32)

    @jax.jit
    def run(draft, keys):
        return drafter.propose(draft, SimpleNamespace(length=lengths), pending, keys)[0]

    trees = []
    for seed in seeds:
        keys = jax.random.split(jax.random.key(seed), BATCH)
        own, keys, _ = per_sequence(BATCH, settings, keys, lengths, tiny.CONFIG.vocab_size)
        trees.append(run(draft.replace(sampling=own), keys))
    return trees


def test_coupled_trees_follow_the_noise_of_the_target_and_greedy_rows_none():
    settings = Sampling(temperature=np.array([3.0, 0.0, 3.0]), top_k=40)
    fixed = MTPTree("best9x3", beam=3, branch=4)
    coupled = dataclasses.replace(fixed, coupled=True)
    assert (fixed.proposals, coupled.proposals) == ("fixed", "coupled")
    tree, other = sampled(coupled, settings, (3, 4))
    warm, again = sampled(fixed, settings, (3, 4))
    greedy = propose(fixed, *primed(2, LENGTHS))[0]
    assert paths_of(tree, 1) == paths_of(other, 1) == paths_of(greedy, 1) == paths_of(warm, 1)
    for b in (0, 2):
        assert paths_of(tree, b) != paths_of(other, b)
        assert paths_of(warm, b) == paths_of(again, b), "no noise in a fixed tree"
        assert paths_of(tree, b)[0] != paths_of(greedy, b)[0], "noise of this size moves the best"
        assert paths_of(warm, b)[0] == paths_of(greedy, b)[0], "temperature alone does not"


def test_coupled_children_are_ranked_by_logits_and_the_noise_of_their_position():
    drafter = MTPTree("best61x3", beam=1, branch=61, coupled=True)
    draft, pending = primed(2, LENGTHS)
    lengths = jnp.array(LENGTHS, jnp.int32)
    keys = jax.random.split(jax.random.key(3), BATCH)
    own, keys, _ = per_sequence(BATCH, Sampling(temperature=2.0), keys, lengths)
    grown, _ = jax.jit(drafter.grow)(draft.replace(sampling=own), pending, (keys, lengths))
    text, model = Text(2), tiny.model()
    pairs = jnp.asarray(text.hidden[:, :-1]), jnp.asarray(text.tokens[:, 1:])
    out, _ = jax.jit(mtp_forward, static_argnames="config")(model.config, model.params, *pairs)
    logits = np.asarray(layers.logits(model.params, out))[range(BATCH), lengths - 1]
    for b in range(BATCH):
        g = np.asarray(noise(keys[b], lengths[b] + 1, 61))
        perturbed = logits[b] + 2 * g
        order = np.argsort(-perturbed, kind="stable")
        np.testing.assert_array_equal(grown.tokens[b, :61], order)
        values = perturbed - perturbed.max() - np.log(np.exp(perturbed - perturbed.max()).sum())
        np.testing.assert_allclose(grown.values[b, :61], values[order], atol=1e-3, rtol=0)


def test_banned_tokens_are_never_drafted():
    settings = Sampling(temperature=np.array([0.0, 1.0, 1.0]), allowed_tokens=[5, 8, 9])
    (tree,) = sampled(MTPTree("best40x3", beam=3, branch=6), settings, (0,))
    np.testing.assert_array_equal(tree.size, [1 + 3 + 9 + 9] * BATCH)
    for b in range(BATCH):
        assert {token for path in paths_of(tree, b) for token in path} == {5, 8, 9}


def test_text_is_plain_decodings():
    """On the shipped model: greedy, and sampled with trees ranked by the target's noise."""
    model, prompts = treejax.load_model(), ["import os\n\n\ndef read(path):\n"] * 2
    settings = Sampling(temperature=np.array([0.0, 0.7]), top_p=0.9)
    drafter = MTPTree("best10x4", beam=3, branch=4, coupled=True)
    texts = [
        treejax.complete(
            model, prompts, max_tokens=40, drafter=drafter, policy="wy", sampling=settings
        )
        for drafter in (drafter, None)
    ]
    for drafted, plain in zip(*texts, strict=True):
        assert drafted.tokens == plain.tokens
        assert drafted.stats.acceptance_length > 2
    assert texts[0][0].tokens != texts[0][1].tokens


def test_what_cannot_be_drafted_is_refused():
    with pytest.raises(ValueError, match=r"'mtp_tree' cannot fill the tree 'chain5', it takes"):
        MTPTree("chain5")
    with pytest.raises(ValueError, match="form 'joint' is unknown, expected one of: conditional"):
        MTPTree(form="joint")
    with pytest.raises(ValueError, match="beam of 0 and a branch of 8 grow nothing"):
        MTPTree(beam=0)
    with pytest.raises(ValueError, match="see 14 candidates, too few for best27x4"):
        MTPTree("best27x4", beam=2, branch=2)
    with pytest.raises(ValueError, match="vocabulary is no tuple of token ids"):
        MTPTree(vocabulary="few")
    assert make_drafter("mtp_tree", "best7x4").shape.name == "best7x4"
