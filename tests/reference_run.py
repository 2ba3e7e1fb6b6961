"""Four sequences decoded plainly, and what their states were at every length.

The field cases ask for states and streams equal to what plain decoding has at the same length. All
of them share this one small model with both kinds of layers (value heads twice the key heads, value
width unlike key width), one batch of four sequences and one tree capacity, so that few programs
are compiled.
"""

import dataclasses
import functools

import numpy as np
import tiny
from jax import random
from stepping import Surfaces, assert_consistent, decode

from treejax import parameters
from treejax.config import FULL, LINEAR
from treejax.model import Model, prefill
from treejax.state import init_state, with_policy

BATCH, CAPACITY, MAX_DEPTH = 4, 7, 4  # seven rows: no power of two, more than any tree below has
ROWS = 256
CONFIG = dataclasses.replace(
    tiny.CONFIG, layer_types=(LINEAR, FULL, LINEAR), linear_value_head_dim=6
)
PROMPTS = (3, 9, 17, 5)  # lengths

# Float32: another order of summation (a tree of 7 rows, a batch of 4 or 1) moves a state by 1e-7 to
# 1e-6 in relative RMS; the field cases allow 1e-5.
TOLERANCE = 1e-5


@functools.cache
def model():
    """Random parameters, scaled up so that the logits of different tokens are far apart."""
    params = parameters.init(CONFIG, random.key(8))
    params["embed"], params["lm_head"] = 20.0 * params["embed"], 50.0 * params["lm_head"]
    return Model(params, CONFIG)


@functools.cache
def prompts():
    rng = np.random.default_rng(21)
    return [rng.integers(0, CONFIG.vocab_size, length) for length in PROMPTS]


def padded(rows):
    """(tokens, lengths) of right-padded prompts, an empty one included."""
    lengths = [len(row) for row in rows]
    tokens = np.zeros((len(rows), max(1, *lengths)), np.int32)
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array(lengths)


@functools.cache
def _prefilled():
    return prefill(model(), init_state(CONFIG, BATCH, ROWS), *padded(prompts()))


def prefilled(policy):
    """The four prompts in one state: (out, state). The prompts run once, under one policy."""
    out, state = _prefilled()
    return out, with_policy(state, policy)


class Reference:
    """Plain decoding of the four sequences, ``count`` tokens each.

    ``tokens[t]`` [B] is what was fed at step t, ``logits[t]`` the scores from which it was chosen
    (t = 0: those of the prompt). ``check(state, steps)`` compares with the states after ``steps``.
    """

    def __init__(self, count, greedy):
        out, state = prefilled("replay")
        rng = np.random.default_rng(22)
        logits, self.tokens, self.logits, self.recurrent = out.logits, [], [], []
        for _ in range(count):
            self.logits.append(np.asarray(logits))
            random_tokens = rng.integers(0, CONFIG.vocab_size, BATCH)
            self.tokens.append(np.argmax(self.logits[-1], -1) if greedy else random_tokens)
            self.recurrent.append(Surfaces(state, attention=False))
            logits, state = decode(model(), state, self.tokens[-1])
        self.tokens = np.array(self.tokens)
        self.final = Surfaces(state)

    def row(self, b, steps):
        """Every surface of sequence ``b`` after ``steps`` tokens."""
        made = self.recurrent[steps].row(b)
        length = PROMPTS[b] + steps  # attention rows never change once written
        for name in ("K", "V"):
            made |= {f"{name}{i}": a[b, :length] for i, a in getattr(self.final, name).items()}
        return made

    def check(self, state, steps):
        surfaces = Surfaces(state)
        for b in range(BATCH):
            assert surfaces.length[b] == PROMPTS[b] + steps[b]
            assert_consistent(surfaces.row(b), self.row(b, steps[b]), TOLERANCE)


@functools.cache
def random_reference():
    """The tokens are random: each state differs from all others, and a wrong token shows."""
    return Reference(228, greedy=False)


@functools.cache
def greedy_reference():
    """The tokens are the most likely ones."""
    reference = Reference(70, greedy=True)
    for b in range(BATCH):  # a stream that repeats itself would hide lost tokens
        assert len(set(reference.tokens[:, b])) >= 25
        sorted_scores = np.sort([row[b] for row in reference.logits], -1)
        assert (sorted_scores[:, -1] - sorted_scores[:, -2]).min() > 1e-3  # no near ties
    return reference
