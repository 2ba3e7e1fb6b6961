"""Streams through trees equal plain sampling token for token, whatever is drafted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_trees import likely_tree
from toy_target import Target

from treejax.sampling import Sampling, sample
from treejax.steps.select import select
from treejax.tree import Tree


def plain_streams(target, prompts, count, sampling, keys):
    """``count`` tokens a sequence, one at a time through ``sample``."""
    texts = [list(prompt) for prompt in prompts]
    for _ in range(count):
        logits = jnp.asarray(np.stack([target.row(text) for text in texts]))
        position = jnp.asarray([len(text) for text in texts])
        tokens = sample(logits, sampling=sampling, key=keys, position=position)
        for text, token in zip(texts, np.asarray(tokens), strict=True):
            text.append(int(token))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


CAPACITY, DEPTH = 12, 4


def tree_streams(target, prompts, count, sampling, keys, futures, seed):
    """The same through trees and ``select``: (streams, mean emitted a step)."""
    rng = np.random.default_rng(seed)
    texts, steps, emitted_tokens = [list(prompt) for prompt in prompts], 0, 0
    first = sample(
        jnp.asarray(np.stack([target.row(text) for text in texts])),
        sampling=sampling,
        key=keys,
        position=jnp.asarray([len(text) for text in texts]),
    )
    for text, token in zip(texts, np.asarray(first), strict=True):
        text.append(int(token))
    while min(len(t) - len(p) for t, p in zip(texts, prompts, strict=True)) < count:
        drafts = []
        for text, prompt, future in zip(texts, prompts, futures, strict=True):
            tokens, parents = likely_tree(
                rng, CAPACITY, DEPTH, target.vocabulary, future[len(text) - len(prompt) :]
            )
            tokens[0] = text[-1]
            drafts.append((tokens, parents))
        tree = Tree.from_parents(*zip(*drafts, strict=True), capacity=CAPACITY, max_depth=DEPTH)
        rows = [target.tree_rows(t, *d, CAPACITY) for t, d in zip(texts, drafts, strict=True)]
        choice = select(
            tree,
            jnp.asarray(np.stack(rows)),
            sampling=sampling,
            key=keys,
            position=jnp.asarray([len(text) - 1 for text in texts]),  # the root is not yet in it
        )
        tokens, counts = (np.asarray(x) for x in choice.emitted(tree))
        steps, emitted_tokens = steps + len(texts), emitted_tokens + int(counts.sum())
        for text, row, n in zip(texts, tokens, counts, strict=True):
            text.extend(int(token) for token in row[:n])
    streams = [text[len(p) : len(p) + count] for text, p in zip(texts, prompts, strict=True)]
    return streams, emitted_tokens / steps


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9]]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.8, top_p=0.95),
        Sampling(np.array([0.0, 0.7, 1.0, 1.6]), top_k=np.array([3, 5, 2, 13]), min_p=0.01),
    ],
    ids=["greedy", "nucleus", "per_row"],
)
def test_tree_streams_equal_plain_streams_token_for_token(sampling):
    """Four prompts of different lengths, different trees a row and step, padding, any packing."""
    target = Target(seed=1, vocabulary=13)
    keys = jax.random.split(jax.random.key(5), 4)
    count = 150
    plain = plain_streams(target, PROMPTS, count + DEPTH + 2, sampling, keys)
    trees, mean = tree_streams(target, PROMPTS, count, sampling, keys, plain, seed=2)
    assert trees == [stream[:count] for stream in plain]
    assert mean > 1.8  # many steps really accept several nodes


def test_fc16_a_stream_depends_on_prompt_settings_and_seed_alone():
    """FC-16: the same alone, in a batch, in any order, after other requests, with any trees."""
    target, sampling = Target(seed=3, vocabulary=13), Sampling(1.0, top_p=0.9)
    keys = jax.vmap(jax.random.key)(jnp.asarray([11, 12, 13, 14]))
    nothing = [[] for _ in PROMPTS]
    together, _ = tree_streams(target, PROMPTS, 40, sampling, keys, nothing, seed=0)
    again, _ = tree_streams(target, PROMPTS, 40, sampling, keys, together, seed=1)
    assert again == together
    order = [2, 0, 3, 1]
    moved = [PROMPTS[i] for i in order]
    shuffled, _ = tree_streams(target, moved, 40, sampling, keys[np.array(order)], nothing, seed=2)
    assert shuffled == [together[i] for i in order]
    alone, _ = tree_streams(target, PROMPTS[2:3], 40, sampling, keys[2:3], nothing[:1], seed=3)
    assert alone == together[2:3]
    others = jax.vmap(jax.random.key)(jnp.asarray([21, 22, 23, 14]))
    different, _ = tree_streams(target, PROMPTS, 40, sampling, others, nothing, seed=0)
    assert different[3] == together[3]
    for row in range(3):
        assert different[row] != together[row]
