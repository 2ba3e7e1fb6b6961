"""Texts with made-up hidden rows, and drafters driven along them as a target would."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from treejax.steps.select import Choice

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
