"""10,000 random tree steps, every sampling option at once: token for token plain drawing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_trees import likely_tree
from sampling_cases import padded, stacked
from sampling_oracle import random_settings
from toy_target import Target

from treejax.history import after, begin, extend
from treejax.sampling import sample
from treejax.steps.select import select
from treejax.tree import Tree

V, CAPACITY, DEPTH, STEPS = 13, 12, 4, 25
LOGITS = Target(seed=8, vocabulary=V).table.astype(np.float32)
LOGITS[::2] = np.round(LOGITS[::2])  # every other row with ties
TABLE = jnp.asarray(LOGITS)


def hashed(index, token):
    """The row of the context that has one token more, as toy_target numbers them."""
    return (index * 31 + token + 1) % len(LOGITS)


@jax.jit
def plain_step(sampling, keys, index, length, history):
    """One token of every sequence, and the context after it."""
    how = {"sampling": sampling, "key": keys, "position": length, "history": history}
    tokens = sample(TABLE[index], **how)
    return tokens, hashed(index, tokens), length + 1, jax.vmap(after)(history, tokens)


@jax.jit
def tree_step(tree, limit, sampling, keys, index, length, history):
    """One step through ``tree``, cut to ``limit``; index and length are those below the root."""
    tree = tree.trim(limit)
    above = jnp.maximum(tree.parent, 0)
    at = jnp.broadcast_to(hashed(index, tree.tokens[:, 0])[:, None], tree.tokens.shape)
    for _ in range(DEPTH):
        below = hashed(jnp.take_along_axis(at, above, axis=1), tree.tokens)
        at = jnp.where(tree.parent >= 0, below, at)
    inside = jnp.arange(CAPACITY)[None, :] < tree.size[:, None]
    logits = jnp.where(inside[..., None], TABLE[at], jnp.nan)
    how = {"sampling": sampling, "key": keys, "position": length, "history": history}
    choice = select(tree, logits, **how).mask(limit >= 0)
    last = jnp.take_along_axis(choice.path, jnp.maximum(choice.length - 1, 0)[:, None], axis=1)
    last = jnp.take_along_axis(at, jnp.maximum(last, 0), axis=1)[:, 0]
    path = jnp.take_along_axis(tree.tokens, jnp.maximum(choice.path, 0), axis=1)
    context = (
        jnp.where(choice.length > 0, last, index),
        length + choice.length,
        extend(history, path, choice.length),
    )
    return *choice.emitted(tree), context


def draft(rng, root, future):
    tokens, parents = likely_tree(rng, CAPACITY, DEPTH, V, future)
    tokens[0] = root
    return tokens, parents


def requests(rng, batch, exact):
    """(settings, keys, context) of random requests after prefill."""
    options = [random_settings(rng, V, exact) | {"vocabulary": V} for _ in range(batch)]
    prompts = [rng.integers(0, V, rng.integers(1, 8)).tolist() for _ in range(batch)]
    index = np.zeros(batch, np.int32)
    for row, prompt in enumerate(prompts):
        for token in prompt:
            index[row] = hashed(index[row], token)
    tokens, lengths = padded([*prompts, [0] * 8])  # of one width, whatever the prompts are
    history = begin(tokens[:batch], lengths[:batch], V)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), batch)
    return stacked(options), keys, (jnp.asarray(index), lengths[:batch], history)


def run(rng, batch, exact, twice=False):
    """(steps, candidates accepted, tokens that differ) of one set of requests.

    ``twice`` is a fault: the pending token is counted as if the history held it already.
    """
    sampling, keys, context = requests(rng, batch, exact)
    plain, ahead = [], context
    for _ in range(STEPS * (DEPTH + 1) + 1):
        tokens, *ahead = plain_step(sampling, keys, *ahead)
        plain.append(np.asarray(tokens))
    text = np.stack(plain, axis=1)
    done = np.ones(batch, int)  # tokens put out; the last of them is pending
    steps = accepted = wrong = 0
    for _ in range(STEPS):
        drafts = [draft(rng, row[n - 1], row[n:]) for row, n in zip(text, done, strict=True)]
        tree = Tree.from_parents(*zip(*drafts, strict=True), capacity=CAPACITY, max_depth=DEPTH)
        limit = rng.choice([-1, 0, 1, 2, DEPTH, DEPTH], size=batch)
        index, length, history = context
        if twice:
            history = jax.vmap(after)(history, tree.tokens[:, 0])
        emitted, count, context = tree_step(
            tree, jnp.asarray(limit, jnp.int32), sampling, keys, index, length, history
        )
        emitted, count = np.asarray(emitted), np.asarray(count)
        assert ((count == 0) == (limit < 0)).all() and (count <= limit + 1).all()
        for row, (tokens, number) in enumerate(zip(emitted, count, strict=True)):
            wrong += int((tokens[:number] != text[row, done[row] : done[row] + number]).sum())
        if twice:  # only the first step is comparable
            break
        done += count
        steps += int((count > 0).sum())
        accepted += int(np.maximum(count - 1, 0).sum())
    return steps, accepted, wrong


@pytest.mark.parametrize("exact, batch", [(False, 48), (True, 29)], ids=["ties", "exact_k"])
def test_random_tree_steps_equal_plain_drawing_token_for_token(exact, batch, branch):
    """5,000 steps a case: random settings, prompts, trees, packings, padding and budget cuts."""
    rng = np.random.default_rng(batch)
    steps = accepted = 0
    while steps < 5000:
        more, candidates, wrong = run(rng, batch, exact)
        assert wrong == 0
        steps, accepted = steps + more, accepted + candidates
    assert accepted > 0.5 * steps  # many steps really accept candidates


def test_a_pending_token_counted_twice_shows():
    assert run(np.random.default_rng(0), 48, False, twice=True)[2] > 0
