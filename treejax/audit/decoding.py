"""Plain decoding in short strides: the one program by which audits decode.

The model's part knows neither drafter nor how many tokens are wanted, so that it is compiled once
for a batch and size of state; a drafter follows in a small program of its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treejax import layers
from treejax.config import ModelConfig
from treejax.drafters.base import Draft
from treejax.history import History, extend
from treejax.sampling import Sampling, adjust, noise, per_sequence, process
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import publish_path
from treejax.steps.select import Choice, select
from treejax.steps.verify import verify_trees
from treejax.tree import Tree

STRIDE = 4
"""Tokens that one call decodes."""


class Going(NamedTuple):
    """What goes from stride to stride: state, pending tokens [B], the logits [B, V] that they were
    drawn from, and what penalties count, or None."""

    state: State
    pending: Array
    logits: Array
    history: History | None


class Left(NamedTuple):
    """What each of D = ``STRIDE`` steps left, a leading axis D.

    Attributes:
      R, conv: of the state after it; logits: [D, B, V].
      token, margin, second: [D, B] what ``drawn_from`` says of these logits.
      tree, choice, hidden: what a drafter is shown of the step.
    """

    R: Array
    conv: Array
    logits: Array
    token: Array
    margin: Array
    second: Array
    tree: Tree
    choice: Choice
    hidden: Array


@functools.partial(jax.jit, static_argnames="config")
def decode_stride(
    config: ModelConfig,
    params: layers.Params,
    going: Going,
    keys: Array,
    sampling: Sampling,
    counts: Array,
    forced: Array,
) -> tuple[Going, Left]:
    """The first ``counts`` [B] of ``STRIDE`` root-only steps; a sequence then stays as it is.

    ``forced`` [D, B]: tokens to take in, or -1 for the pending ones.
    """

    def one(going: Going, step: tuple[Array, Array]) -> tuple[Going, Left]:
        index, token = step
        state, pending, logits, history = going
        part = index < counts
        tree = Tree.root_only(jnp.where(token >= 0, token, pending))
        out, scratch = verify_trees(config, params, state, tree)
        choice = select(
            *(tree, out.logits),
            sampling=sampling,
            key=keys,
            position=state.length,
            history=history,
        ).mask(part)
        state = publish_path(state, scratch, choice)
        if history is not None:
            history = extend(history, tree.tokens, choice.length)
        pending = jnp.where(part, choice.pending, pending)
        logits = jnp.where(part[:, None], out.logits[:, 0], logits)
        drawn = drawn_from(logits, sampling, keys, state.length, history)
        R = state.policy.read(state.recurrent)
        left = Left(R, state.conv, logits, *drawn, tree=tree, choice=choice, hidden=out.hidden)
        return Going(state, pending, logits, history), left

    return jax.lax.scan(one, going, (jnp.arange(STRIDE), forced))


@functools.partial(jax.jit, static_argnames=("config", "drafter", "record"))
def follow_stride(
    config: ModelConfig,
    drafter: Any,
    record: bool,
    weights: Any,
    memory: Any,
    sampling: Sampling,
    keys: Array,
    left: tuple[Tree, Choice, Array],
) -> tuple[Any, Any]:
    """The memory of a drafter that rested during a stride and observed every root.

    Returns it after the stride and, if ``record``, after each step: a leading axis D.
    """
    batch = left[1].length.shape[1]
    own, *_ = per_sequence(batch, sampling, keys, left[1].length[0], config.vocab_size)

    def one(memory: Any, step: tuple[Tree, Choice, Array]) -> tuple[Any, Any]:
        tree, choice, hidden = step
        draft = Draft(weights=weights, memory=memory, config=config, sampling=own)
        draft = drafter.rest(draft, tree.tokens[:, 0])
        memory = drafter.observe(draft, tree, choice, hidden).memory
        return memory, memory if record else None

    return jax.lax.scan(one, memory, left)


@jax.jit
def drawn_from(
    logits: Array, sampling: Sampling, keys: Array, position: Array, history: History | None
) -> tuple[Array, Array, Array]:
    """The token that is drawn from logits [B, V], by how much, and which comes next: [B] each."""
    vocabulary = logits.shape[-1]
    settings, rows, at = per_sequence(len(logits), sampling, keys, position, vocabulary)
    if rows is None or at is None:
        scores = jax.vmap(adjust)(logits, settings, history)
    else:
        drawn = jax.vmap(lambda key, place: noise(key, place, vocabulary))(rows, at)
        scores = jax.vmap(process)(logits, settings, history) + drawn
    values, tokens = jax.lax.top_k(scores, 2)
    tokens = tokens.astype(jnp.int32)
    return tokens[:, 0], values[:, 0] - values[:, 1], tokens[:, 1]
