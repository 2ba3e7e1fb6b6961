"""Rows with every option at once against the float64 law, and FC-15's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import padded, stacked
from sampling_oracle import SETTINGS, law, random_settings

from treejax.history import after, along_paths, begin, extend
from treejax.processing import threshold_by_digits, threshold_by_halves
from treejax.sampling import Sampling, process, sample

ROWS = 400


def random_rows(seed, vocabulary, exact):
    """(logits, prompts, outputs, settings) of ROWS rows; every other one rounded, so with ties."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS, vocabulary)) * 2
    logits[::2] = np.round(logits[::2])
    prompts = [rng.integers(0, vocabulary, rng.integers(0, 6)).tolist() for _ in range(ROWS)]
    outputs = [rng.integers(0, vocabulary, rng.integers(0, 12)).tolist() for _ in range(ROWS)]
    options = [random_settings(rng, vocabulary, exact) for _ in range(ROWS)]
    return logits.astype(np.float32), prompts, outputs, options


def weights_of(logits, prompts, outputs, options):
    history = extend(begin(*padded(prompts), logits.shape[1]), *padded(outputs))
    sampling = stacked([o | {"vocabulary": logits.shape[1]} for o in options])
    return np.asarray(_process_rows(jnp.asarray(logits), sampling, history))


_process_rows = jax.jit(jax.vmap(process))


@pytest.mark.parametrize("exact", [False, True], ids=["ties", "exact_k"])
@pytest.mark.parametrize("vocabulary", [5, 17])
def test_all_options_at_once_agree_with_float64(vocabulary, exact, branch):
    rows = random_rows(vocabulary, vocabulary, exact)
    z = weights_of(*rows)
    compared, ties = 0, 0
    for logits, prompt, output, options, weights in zip(*rows, z, strict=True):
        expected, margin = law(logits, prompt, output, **options)
        if margin < 1e-5:  # nearer to a cut, float32 (1e-7 a term, 17 terms) may fall either side
            continue
        p = np.exp(weights.astype(np.float64))
        p /= p.sum()
        np.testing.assert_array_equal(p > 0, expected > 0)
        np.testing.assert_allclose(p, expected, rtol=1e-5)  # z / T up to 60, 2^-24 each
        compared += 1
        ties += len(set(expected[expected > 0])) < (expected > 0).sum()
    assert compared > 0.8 * ROWS and ties > 3


def test_the_order_of_tokens_never_matters():
    """Settings, logits and contexts renamed alike: the same weights, renamed; ties included."""
    vocabulary = 17
    logits, prompts, outputs, options = random_rows(3, vocabulary, exact=False)
    for o in options:  # at temperature 0 ties do go by id
        o["temperature"] = o["temperature"] or 1.0
    names = np.random.default_rng(0).permutation(vocabulary)  # token t is called names[t] now
    renamed = np.empty_like(logits)
    renamed[:, names] = logits

    def rename(tokens):
        return None if tokens is None else [int(names[t]) for t in tokens]

    others = [
        o
        | {name: rename(o[name]) for name in ("allowed_tokens", "banned_tokens", "end_tokens")}
        | {"logit_bias": {int(names[t]): b for t, b in o["logit_bias"].items()}}
        for o in options
    ]
    z = weights_of(logits, prompts, outputs, options)
    moved = weights_of(renamed, [rename(p) for p in prompts], [rename(o) for o in outputs], others)[
        :, names
    ]
    # A sum in another order may differ in its last bits, which only a cut of top-p can show.
    near = [law(*row[:3], **row[3])[1] < 1e-5 for row in zip(logits, prompts, outputs, options,
                                                             strict=True)]  # fmt: skip
    assert np.mean(near) < 0.2
    np.testing.assert_array_equal(z[~np.array(near)], moved[~np.array(near)])


def test_exactly_k_takes_the_lowest_ids_of_a_tie():
    logits = jnp.asarray([[1.0, 3.0, 1.0, 2.0, 1.0, 1.0], [0.0, -0.0, 0.0, 0.0, 0.0, 0.0]])
    for k in range(1, 8):
        exact = process(logits, Sampling(1.0, top_k=k, exact_top_k=True).prepared())
        np.testing.assert_array_equal(np.isfinite(exact).sum(axis=1), min(k, 6))
        order = np.array([1, 3, 0, 2, 4, 5])[:k]
        np.testing.assert_array_equal(np.flatnonzero(np.isfinite(exact[0])), np.sort(order))
        np.testing.assert_array_equal(np.flatnonzero(np.isfinite(exact[1])), np.arange(min(k, 6)))
        kept = process(logits, Sampling(1.0, top_k=k).prepared())
        assert np.isfinite(kept).sum(axis=1).tolist() == [k if k < 3 else 6, 6]


def test_fc15_history_at_a_node_counts_every_token_once():
    """FC-15: committed text, the pending token and the node's ancestors, each counted once."""
    penalty = Sampling(1.0, frequency_penalty=0.5).prepared()
    logits = jnp.asarray([2.0, 0.0, 0.0])
    nothing = begin(jnp.asarray([[1]]), jnp.ones(1, jnp.int32), 3)
    row = jax.tree.map(lambda x: x[0], nothing)

    def gap(history):  # of logits 0 and 2; token 2 is never put out
        z = process(logits, penalty, history)
        return float(z[0] - z[2])

    assert gap(row) == 2.0  # what only the prompt holds is not counted
    seen = after(row, jnp.int32(0))
    assert gap(seen) == 1.5  # 1.0 would mean: counted twice
    committed = jax.tree.map(lambda x: x[0], extend(nothing, jnp.asarray([[0]]), jnp.asarray([1])))
    assert gap(committed) == 1.5
    # A pending 0 with a 0 below and a 1 beside it: rows of one tree.
    tree = jnp.asarray([[True, False, False], [True, True, False], [True, False, True]])
    rows = along_paths(row, jnp.asarray([0, 0, 1]), tree)
    z = process(jnp.tile(logits, (3, 1)), penalty, rows)
    np.testing.assert_array_equal(z[:, 0] - z[:, 2], [1.5, 1.0, 1.5])
    np.testing.assert_array_equal(z[:, 1] - z[:, 2], [0.0, 0.0, -0.5])


def test_fc15_a_token_of_bias_minus_100_is_never_drawn():
    """FC-15: logit bias -100, a ban, and an end token before ``min_tokens``, with mixed rows."""
    logits = jnp.tile(jnp.asarray([[9.0, 0.0, 1.0]]), (3000, 1))
    temperature = np.tile([0.0, 1.0, 2.0], 1000)
    keys = jax.random.split(jax.random.key(1), 3000)
    history = begin(jnp.zeros((3000, 1), jnp.int32), jnp.ones(3000, jnp.int32), 3)
    options: list[dict[str, Any]] = [
        {"logit_bias": {0: -100.0}},
        {"banned_tokens": [0]},
        {"allowed_tokens": [1, 2]},
        {"min_tokens": 1, "end_tokens": [0]},
    ]
    how = {}
    for option in options:
        how = {"sampling": Sampling(temperature, **option), "key": keys, "position": 3}
        tokens = np.asarray(sample(logits, **how, history=history))
        assert set(tokens[temperature == 0]) == {2} and set(tokens) == {1, 2}
    late = jax.vmap(after)(history, jnp.ones(3000, jnp.int32))
    assert 0 in np.asarray(sample(logits, **how, history=late))


def test_settings_left_out_are_those_of_the_oracle():
    assert set(SETTINGS) == set(Sampling.__dataclass_fields__)


@pytest.mark.parametrize("size", [2, 7, 300])
def test_both_searches_keep_the_same_values(size):
    """Ties, infinities, both zeros, small and huge numbers; weights whose sums are exact."""
    rng = np.random.default_rng(size)
    values = np.round(rng.standard_normal((64, size)), 1) * 10.0 ** rng.integers(-30, 37, (64, 1))
    values[rng.random(values.shape) < 0.1] = -np.inf
    values[rng.random(values.shape) < 0.05] = -0.0
    values[0], values[1, 0] = -np.inf, np.finfo(np.float32).max
    weight = rng.integers(0, 5, values.shape).astype(np.float32)
    values = jnp.asarray(values, jnp.float32)
    for share in (0.0, 0.001, 0.3, 0.8, 1.0):
        need = np.ceil(share * weight.sum(axis=1, keepdims=True))
        halves, digits = (
            jax.jit(lambda need, search=search: search(values, weight, need))(need)
            for search in (threshold_by_halves, threshold_by_digits)
        )
        # A CPU reads numbers below 1.2e-38 as 0, so that the thresholds themselves may differ.
        np.testing.assert_array_equal(values >= halves, values >= digits)
        least, most = np.asarray(digits), np.asarray(values.max(axis=1, keepdims=True))
        assert (np.where(values >= least, weight, 0).sum(axis=1, keepdims=True) >= need).all()
        above = np.where(values > least, weight, 0).sum(axis=1, keepdims=True)
        assert ((above < need) | (least == most)).all()


def test_an_accelerator_searches_without_a_loop():
    """Between the turns of a loop it waits for the host: 64 turns a token were most of a step."""
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9).prepared(9)
    traced = jax.jit(lambda rows: process(rows, sampling)).trace(jnp.zeros((2, 9)))
    on_gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" not in on_gpu and "while" in traced.lower().as_text()
