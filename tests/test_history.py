"""Histories against lists of tokens: what a row has seen, each token once."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_trees import random_parents, random_tokens

from treejax.history import after, along_paths, begin, extend
from treejax.tree import Tree, describe

VOCABULARY = 11


def expected(prompt, output):
    """(prompt mask, output counts, number) of one context, from lists."""
    counts = Counter(output)
    return (
        np.isin(np.arange(VOCABULARY), prompt),
        np.array([counts[token] for token in range(VOCABULARY)]),
        len(output),
    )


def assert_holds(history, prompt, output):
    mask, counts, number = expected(prompt, output)
    np.testing.assert_array_equal(history.prompt, mask)
    np.testing.assert_array_equal(history.output, counts)
    assert int(history.emitted) == number
    dtypes = [history.prompt.dtype, history.output.dtype, history.emitted.dtype]
    assert dtypes == [np.dtype(bool), np.dtype(np.int32), np.dtype(np.int32)]


def row(history, index):
    return jax.tree.map(lambda x: x[index], history)


def padded(rows, width, filler):
    out = np.full((len(rows), width), filler, np.int32)
    for place, tokens in zip(out, rows, strict=True):
        place[: len(tokens)] = tokens
    return jnp.asarray(out), jnp.asarray([len(tokens) for tokens in rows], jnp.int32)


PROMPTS = [[3, 1, 3], [], [10, 0, 5, 5, 2]]


@pytest.mark.parametrize("filler", [-1, 0, VOCABULARY - 1], ids=str)
def test_prompt_and_output_hold_the_real_tokens_whatever_pads_them(filler):
    history = jax.jit(begin, static_argnums=2)(*padded(PROMPTS, 6, filler), VOCABULARY)
    for index, prompt in enumerate(PROMPTS):
        assert_holds(row(history, index), prompt, [])
    outputs: list[list[int]] = [[], [], []]
    for more in ([[1], [4, 4, 4], []], [[1, 1, 7], [], [10, 0]], [[], [9], [10]]):
        history = jax.jit(extend)(history, *padded(more, 4, filler))
        for index, tokens in enumerate(more):
            outputs[index] += tokens
            assert_holds(row(history, index), PROMPTS[index], outputs[index])


def test_the_context_of_a_row_is_its_history_and_its_path_each_token_once():
    """Random trees in any packing, padded, with repeats along a path and between siblings' kin."""
    rng = np.random.default_rng(0)
    capacity = 9
    contexts = jax.jit(lambda h, t, a: jax.vmap(along_paths)(h, t, a))
    for _ in range(20):
        shapes = [random_parents(rng, int(rng.integers(1, capacity + 1))) for _ in PROMPTS]
        tokens = [random_tokens(rng, parents, VOCABULARY) for parents in shapes]
        tree = Tree.from_parents(tokens, shapes, capacity=capacity)
        outputs = [rng.integers(0, VOCABULARY, 6).tolist() for _ in PROMPTS]
        history = extend(begin(*padded(PROMPTS, 6, -1), VOCABULARY), *padded(outputs, 6, -1))
        rows = contexts(history, tree.tokens, describe(tree).ancestors)
        for index, (prompt, parents) in enumerate(zip(PROMPTS, shapes, strict=True)):
            for node in range(capacity):
                path, above = [], node if node < len(parents) else -1
                while above >= 0:
                    path.append(int(tokens[index][above]))
                    above = parents[above]
                assert_holds(row(row(rows, index), node), prompt, outputs[index] + path)


def test_one_more_token_is_the_next_row_of_a_path():
    history = begin(*padded(PROMPTS, 6, -1), VOCABULARY)
    one = row(history, 2)
    walk = jax.jit(after)
    first = walk(one, jnp.int32(10))
    assert_holds(first, PROMPTS[2], [10])
    assert_holds(walk(first, jnp.int32(10)), PROMPTS[2], [10, 10])
    chain = jnp.tril(jnp.ones((3, 3), bool))
    tokens = jnp.asarray([10, 10, 4])
    third = row(along_paths(one, tokens, chain), 2)
    assert_holds(third, PROMPTS[2], [10, 10, 4])
    assert_holds(one, PROMPTS[2], [])


def test_the_filler_of_a_row_without_a_tree_is_no_token():
    """A sequence that takes no part has -1 for a root, which JAX would read as the last token."""
    one = row(begin(*padded(PROMPTS, 6, -1), VOCABULARY), 0)
    np.testing.assert_array_equal(after(one, jnp.int32(-1)).output, one.output)
    rows = along_paths(one, jnp.asarray([-1, -1]), jnp.eye(2, dtype=bool))
    np.testing.assert_array_equal(rows.output, 0)
