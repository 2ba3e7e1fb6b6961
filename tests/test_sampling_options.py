"""20,000 draws for every option alone, through chains and trees, against the float64 law."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import stacked
from sampling_oracle import SETTINGS, law
from scipy import stats
from toy_target import Target

from treejax.history import begin, extend
from treejax.sampling import Sampling, process
from treejax.steps.select import select
from treejax.tree import Tree

# Draws through trees. Row 0 is the pending token; every row of logits follows from its whole path.
V, DRAWS, PLACES = 5, 20_000, 4
PROMPT, PENDING, POSITION = [3, 1], 2, 40
TARGET = Target(seed=4, vocabulary=V)
SHAPES = {"chain": [-1, 0, 1, 2], "tree": [-1, 0, 0, 0, 1, 1, 2, 4]}
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature_0.5": {"temperature": 0.5},
    "temperature_1": {"temperature": 1.0},
    "temperature_2": {"temperature": 2.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.125},
    "repetition_penalty": {"repetition_penalty": 1.75},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.75},
    "logit_bias": {"logit_bias": {1: 1.5, 4: -100.0}},
    "allowed_tokens": {"allowed_tokens": [0, 2, 3]},
    "banned_tokens": {"banned_tokens": [2]},
    "min_tokens": {"min_tokens": 3, "end_tokens": [0, 3]},
    "exact_top_k": {"top_k": 2, "exact_top_k": True},
}
PERMUTED = jnp.asarray(
    np.random.default_rng(7).permuted(np.tile(np.arange(V), (997, 1)), axis=1), jnp.int32
)


def table(ties):
    """The target's logits by hash of the context; on a coarse grid where ties are to show."""
    logits = TARGET.table / 2
    return (np.round(logits) if ties else logits).astype(np.float32)


def hashed(index, token):
    return (index * 31 + token + 1) % 997  # as toy_target does


class Draws:
    """Draws through trees of one shape, by as few compiled programs as there are static options."""

    def __init__(self, parents):
        self.parents = np.array(parents, np.int32)
        self.rank = np.array(
            [np.sum(self.parents[:v] == p) for v, p in enumerate(parents)], np.int32
        )
        self.step = jax.jit(self._step)

    def _step(self, logits, sampling, keys, index, pending, length, history):
        """One tree a sequence: candidates are a fixed function of the context."""
        at, tokens = [hashed(index, pending)], [pending]
        for above, order in zip(self.parents[1:], self.rank[1:], strict=True):
            tokens.append(PERMUTED[at[above], order])
            at.append(hashed(at[above], tokens[-1]))
        tree = Tree(
            tokens=jnp.stack(tokens, axis=1),
            parent=jnp.tile(self.parents, (DRAWS, 1)),
            rank=jnp.tile(self.rank, (DRAWS, 1)),
            size=jnp.full(DRAWS, len(self.parents), jnp.int32),
            max_depth=3,
        )
        how = {"sampling": sampling, "key": keys, "position": length, "history": history}
        choice = select(tree, logits[jnp.stack(at, axis=1)], **how)
        emitted, count = choice.emitted(tree)
        below = jnp.concatenate([pending[:, None], emitted[:, :-1]], axis=1)
        for place in range(emitted.shape[1]):
            index = jnp.where(place < count, hashed(index, below[:, place]), index)
        history = extend(history, below, count)
        return emitted, count, index, choice.pending, length + count, history

    def __call__(self, logits, options, seed):
        """[DRAWS, PLACES] tokens that follow the pending one, through as many trees as needed."""
        sampling = stacked([SETTINGS | {"top_k": V, "vocabulary": V} | options])
        sampling = jax.tree.map(lambda x: x[0], sampling)
        index = 0
        for token in PROMPT:
            index = hashed(index, token)
        history = begin(jnp.tile(jnp.asarray(PROMPT), (DRAWS, 1)), jnp.full(DRAWS, 2), V)
        carry = [jnp.full(DRAWS, value) for value in (index, PENDING, POSITION)] + [history]
        keys = jax.random.split(jax.random.key(seed), DRAWS)
        text, place, steps = np.full((DRAWS, 2 * PLACES), -1), np.zeros(DRAWS, int), 0
        while place.min() < PLACES:
            emitted, count, *carry = self.step(jnp.asarray(logits), sampling, keys, *carry)
            emitted, count, active = np.asarray(emitted), np.asarray(count), place < PLACES
            for i in range(emitted.shape[1]):
                real = active & (i < count)
                text[real, place[real] + i] = emitted[real, i]
            steps += active.sum()
            place += np.where(active, count, 0)
        return text[:, :PLACES], place.sum() / steps


@pytest.fixture(scope="module", params=SHAPES)
def draws(request):
    return Draws(SHAPES[request.param])


def expected_law(logits, options):
    """[V] * PLACES: the joint law of the first tokens after the pending one, by enumeration."""
    joint = np.ones((V,) * PLACES)
    for place in range(PLACES):
        for before in itertools.product(range(V), repeat=place):
            index = 0
            for token in [*PROMPT, PENDING, *before]:
                index = hashed(index, token)
            p, _ = law(logits[index], PROMPT, [PENDING, *before], **options)
            joint[before] *= p.reshape(-1, *[1] * (PLACES - place - 1))
    return joint


def chi_square(counts, expected):
    """p-value; outcomes of probability 0 must not occur, those below 5 expected are pooled."""
    counts, expected = np.ravel(counts), np.ravel(expected) * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    counts = np.array([*counts[~rare], counts[rare].sum()])
    expected = np.array([*expected[~rare], expected[rare].sum()])
    counts, expected = counts[expected > 0], expected[expected > 0]
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("name", OPTIONS)
def test_fc15_draws_follow_the_law_at_positions_1_to_4(name, draws):
    """FC-15: 20,000 sequences, each option alone, through chains and trees, against float64."""
    options = OPTIONS[name]
    logits = table(ties="top_k" in name)
    text, mean = draws(logits, options, seed=11)
    assert 1.1 < mean < 4  # some candidates were accepted and some refused
    joint = expected_law(logits, options)
    assert abs(joint.sum() - 1) < 1e-12
    for place in range(PLACES):
        others = tuple(i for i in range(PLACES) if i != place)
        counts = np.bincount(text[:, place], minlength=V)
        assert chi_square(counts, joint.sum(axis=others)) > 0.001
    codes = np.bincount(text @ V ** np.arange(PLACES)[::-1], minlength=V**PLACES)
    assert chi_square(codes, joint) > 0.001
    # The counts can tell: they refuse the law without the option, or at another temperature.
    other = {"temperature_1": {"temperature": 1.2}, "exact_top_k": {"top_k": 2}}.get(name, {})
    wrong = expected_law(logits, other)
    possible = wrong.ravel() > 0
    assert chi_square(codes[possible], wrong.ravel()[possible]) < 1e-6


def test_an_option_alone_is_the_same_as_with_the_others_switched_off():
    """Present options are static: programs without a stage must agree with a neutral stage."""
    logits, compiled = jnp.asarray(table(ties=False)[:50]), jax.jit(process)
    history = extend(
        begin(jnp.tile(jnp.asarray(PROMPT), (50, 1)), jnp.full(50, 2), V),
        jnp.tile(jnp.asarray([PENDING, 0, 0]), (50, 1)),
        jnp.asarray(np.arange(50) % 4),
    )
    for options in OPTIONS.values():
        sampling = Sampling(**({"temperature": 1.0} | options)).prepared(V)
        alone = compiled(logits, sampling, history)
        others = stacked([SETTINGS | {"top_k": V, "vocabulary": V} | options])
        z = compiled(logits, jax.tree.map(lambda x: x[0], others), history)
        np.testing.assert_array_equal(z, alone)
