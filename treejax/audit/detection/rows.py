"""Logits of every row of a tree by plain decoding along that row's own path.

A row off the accepted path leaves no trace but its logits, and through them the decision. Plain
decoding goes down every leaf's path from the state of plain's own record, one token after the
other; the verify under audit has no part in it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from treejax import layers
from treejax.audit.intake import NATIVE
from treejax.audit.reference import Plain
from treejax.config import ModelConfig
from treejax.model import Model
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import publish_path
from treejax.steps.select import Choice
from treejax.steps.verify import verify_trees
from treejax.tree import Tree

LANES = 128
"""Leaves that are followed side by side."""


def row_logits(
    model: Model, plain: Plain, tokens: np.ndarray, parents: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Logits [T, B, N, V] of all active rows of T steps' trees, 0 elsewhere.

    Args:
      tokens, parents: [T, B, N] of the trees; -1 where inactive.
      offsets: [T, B] tokens that each sequence holds after its prompt before the step.
    """
    logits = np.zeros((*tokens.shape, model.config.vocab_size), np.float32)
    places = [
        (t, b, path)
        for t, b in np.ndindex(tokens.shape[:2])
        for path in _leaves(tokens[t, b], parents[t, b])
    ]
    deepest = max(len(path) for *_, path in places)
    for first in range(0, len(places), LANES):
        lanes = places[first : first + LANES]
        text = np.full((LANES, deepest), -1, np.int32)
        for lane, (t, b, path) in enumerate(lanes):
            text[lane, : len(path)] = tokens[t, b, path]
        at = np.array([(b, offsets[t, b]) for t, b, _ in lanes] + [(0, 0)] * (LANES - len(lanes)))
        state = _state_at(model, plain, at[:, 0], at[:, 1])
        made = np.asarray(_follow(model.config, model.params, state, jnp.asarray(text)))
        for lane, (t, b, path) in enumerate(lanes):
            logits[t, b, path] = made[: len(path), lane]
    return logits


def _leaves(tokens: np.ndarray, parents: np.ndarray) -> list[list[int]]:
    """Paths from the root to every leaf."""
    paths = []
    for row in np.flatnonzero(tokens >= 0):
        if not ((parents == row) & (tokens >= 0)).any():
            path = [int(row)]
            while path[0]:
                path.insert(0, int(parents[path[0]]))
            paths.append(path)
    return paths


def _state_at(model: Model, plain: Plain, rows: np.ndarray, offset: np.ndarray) -> State:
    """The states that plain left of sequences ``rows`` after ``offset`` tokens; keys are causal."""
    spare = ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))
    return State(
        recurrent=jnp.asarray(np.swapaxes(plain.R[offset, :, rows], 0, 1)),
        conv=jnp.asarray(np.swapaxes(plain.conv[offset, :, rows], 0, 1)),
        keys=jnp.asarray(np.pad(plain.keys[:, rows], spare)),
        values=jnp.asarray(np.pad(plain.values[:, rows], spare)),
        length=jnp.asarray(plain.start[rows] + offset, jnp.int32),
        config=model.config,
        policy=NATIVE,
    )


@functools.partial(jax.jit, static_argnames="config")
def _follow(config: ModelConfig, params: layers.Params, state: State, tokens: Array) -> Array:
    """Logits [D, L, V] after each of tokens [L, D]; a lane ends at its first -1."""

    def one(state: State, token: Array) -> tuple[State, Array]:
        tree = Tree.root_only(jnp.maximum(token, 0))
        out, scratch = verify_trees(config, params, state, tree)
        root = jnp.zeros_like(token)
        choice = Choice(path=root[:, None], length=root + 1, pending=root).mask(token >= 0)
        return publish_path(state, scratch, choice), out.logits[:, 0]

    return jax.lax.scan(one, state, tokens.T)[1]
