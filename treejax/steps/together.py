"""Propose, verify, select and publish together: one step of the loop.

``step`` is the whole line from proposal to durable state in one program. It donates what goes
around the loop, ``Carry``, and nothing else; ``steps.prompt`` holds what comes before, and
``steps.many``, which the loop runs, makes many such steps in one program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax import layers
from treejax.config import ModelConfig
from treejax.drafters.base import Draft, path_tokens
from treejax.history import History, extend
from treejax.sampling import Sampling, per_sequence
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import publish_path
from treejax.steps.rules.base import Rule
from treejax.steps.select import Choice, select
from treejax.steps.verify import verify_trees
from treejax.tree import Tree


class Emission(struct.PyTreeNode):
    """What one step gives the host.

    Attributes:
      tokens: [B, max_depth + 1] int32, accepted candidates and then the new pending token.
      count: [B] int32 how many of them are real.
      proposed: [B] int32 candidates in the verified tree.
      logprobs: [B, max_depth + 1] log-probabilities of ``tokens``, zeros unless asked for.
    """

    tokens: Array
    count: Array
    proposed: Array
    logprobs: Array


class Carry(struct.PyTreeNode):
    """What goes around the loop: the state, the drafter's memory, the pending tokens [B].

    ``history`` is there if a setting of the sampling reads it.
    """

    state: State
    memory: Any
    pending: Array
    history: History | None = None


def advance(
    config: ModelConfig,
    drafter: Any,
    rule: Rule,
    params: layers.Params,
    weights: Any,
    carry: Carry,
    limit: Array,
    keys: Array,
    sampling: Sampling,
    want_logprobs: Array,
) -> tuple[Carry, Emission]:
    """One step of every sequence, for use inside jit.

    limit: [B] how deep a candidate may lie; 0 leaves the root, -1 leaves the sequence out: no row
      of its tree is active, and kernels pass over it.
    """
    state, history, taking_part = carry.state, carry.history, limit >= 0
    own, *_ = per_sequence(state.batch, sampling, keys, state.length, config.vocab_size)
    draft = Draft(weights=weights, memory=carry.memory, config=config, sampling=own)

    tree, q, draft = drafter.propose(draft, state, carry.pending, keys)
    tree, q = _trim(tree, q, limit)
    out, scratch = verify_trees(config, params, state, tree)
    choice = select(
        *(tree, out.logits),
        sampling=sampling,
        key=keys,
        position=state.length,
        history=history,
        rule=rule,
        q=q if rule.needs_q else None,
    )
    choice = choice.mask(taking_part)
    state = publish_path(state, scratch, choice)
    draft = drafter.observe(draft, tree, choice, out.hidden)
    if history is not None:
        history = extend(history, path_tokens(tree, choice.path), choice.length)

    tokens, count = choice.emitted(tree)
    emission = Emission(
        tokens=tokens,
        count=count,
        proposed=jnp.where(taking_part, tree.size - 1, 0),
        logprobs=_logprobs(want_logprobs, out.logits, choice, tokens),
    )
    pending = jnp.where(taking_part, choice.pending, carry.pending)
    carry = Carry(state=state, memory=draft.memory, pending=pending, history=history)
    return carry, emission


step = functools.partial(
    jax.jit, static_argnames=("config", "drafter", "rule"), donate_argnames="carry"
)(advance)
"""``advance`` as a program of its own; ``carry`` is donated."""


def _trim(tree: Tree, q: Array | None, limit: Array) -> tuple[Tree, Array | None]:
    """``tree.trim``, and the rows of q [B, N, V] where the tree's went."""
    tree, order = tree.trim_with_order(limit)
    return tree, None if q is None else jnp.take_along_axis(q, order[:, :, None], axis=1)


def _logprobs(wanted: Array, logits: Array, choice: Choice, tokens: Array) -> Array:
    """``path_logprobs``, or zeros; whether they are wanted is data, so one program serves both."""

    def if_wanted() -> Array:
        return lax.cond(
            wanted, lambda: path_logprobs(logits, choice, tokens), lambda: jnp.zeros(tokens.shape)
        )

    def always() -> Array:  # a GPU has them sooner than the host has told it which way to go
        return jnp.where(wanted, path_logprobs(logits, choice, tokens), 0.0)

    return lax.platform_dependent(cpu=if_wanted, default=always)


def path_logprobs(logits: Array, choice: Choice, tokens: Array) -> Array:
    """Log-probabilities [B, P] under the unprocessed model of the tokens drawn along each path."""
    nodes = jnp.maximum(choice.path, 0)[:, :, None]
    logp = jax.nn.log_softmax(jnp.take_along_axis(logits, nodes, axis=1), axis=-1)
    return jnp.take_along_axis(logp, jnp.maximum(tokens, 0)[:, :, None], axis=2)[:, :, 0]
