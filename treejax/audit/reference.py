"""Plain decoding with everything recorded: what audits hold an engine against.

One root-only step follows the other under policy ``replay`` in plain JAX, whose published state is
bitwise that of native decoding. Entry i of every record belongs to the state of ``start + i``
tokens. Attention rows are causal: those of the last state serve every position.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax import layers
from treejax.audit.intake import NATIVE, Start, take_in
from treejax.config import ModelConfig
from treejax.drafters import Drafter
from treejax.drafters import Plain as NoDrafter
from treejax.drafters.base import Draft
from treejax.history import History, extend
from treejax.model import Model
from treejax.policies import Policy
from treejax.sampling import Sampling, adjust, noise, per_sequence, process
from treejax.shapes import Array
from treejax.state import State, with_policy
from treejax.steps.publish import publish_path
from treejax.steps.select import select
from treejax.steps.verify import verify_trees
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Plain:
    """What plain decoding left at each of T + 1 positions of B sequences; NumPy arrays.

    Attributes:
      start: [B] lengths of the prompts.
      tokens: [B, T + 1], the first is the one that is pending after the prompt.
      logits: [T + 1, B, V] of which token i was drawn.
      margin: [T + 1, B] by how much the token drawn was ahead of ``second`` [T + 1, B], in what
        was compared: adjusted logits, or with noise added when sampling. Nats if greedy.
      R: [T + 1, Lg, B, Hv, dv, dk]; conv: [T + 1, Lg, B, K - 1, C].
      keys, values: [La, B, S, Hkv, D] of the last state.
      drafter: whose memory was kept up to date without drafting; memory: it, T + 1 entries a leaf.
      state: the state after T tokens, jax arrays.
    """

    start: np.ndarray
    tokens: np.ndarray
    logits: np.ndarray
    margin: np.ndarray
    second: np.ndarray
    R: np.ndarray
    conv: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    drafter: Drafter
    memory: Any
    state: State

    @property
    def batch(self) -> int:
        return len(self.start)

    @property
    def count(self) -> int:
        """T."""
        return self.tokens.shape[1] - 1


def decode(
    model: Model,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sampling: Sampling,
    keys: Array,
    max_length: int,
    policy: Policy = NATIVE,
    drafter: Drafter | None = None,
) -> Plain:
    """``count`` tokens after each prompt, the pending one after the prompt not counted.

    Args:
      sampling: the settings; greedy by ``Sampling()``.
      keys: [B] keys.
      drafter: whose memory is recorded as well; None for none.
    """
    drafter = NoDrafter() if drafter is None else drafter
    start = take_in(model, prompts, drafter, max_length=max_length, sampling=sampling)
    return decode_from(model, start, count, sampling=sampling, keys=keys, policy=policy, by=drafter)


def decode_from(
    model: Model,
    start: Start,
    count: int,
    *,
    sampling: Sampling,
    keys: Array,
    by: Drafter,
    policy: Policy = NATIVE,
) -> Plain:
    """``decode`` after prompts that are in already; ``by`` is the drafter that took them in."""
    config = model.config
    settings = sampling.prepared(config.vocab_size)
    began = with_policy(start.state, policy)
    first = drawn_from(start.logits, settings, keys, began.length, start.history)
    state, recorded = _decode(
        *(config, by, count, model.params, start.draft.weights),
        *(began, start.draft.memory, first[0], start.history, keys, settings),
    )
    lead = (policy.read(began.recurrent), began.conv, start.logits, *first)
    R, conv, logits, tokens, margin, second = (
        np.concatenate([np.asarray(a)[None], np.asarray(b)])
        for a, b in zip(lead, recorded[:-1], strict=True)
    )
    held = jax.tree.map(
        lambda a, b: np.concatenate([np.asarray(a)[None], np.asarray(b)]),
        start.draft.memory,
        recorded[-1],
    )
    return Plain(
        start=np.asarray(start.state.length),
        tokens=tokens.T,
        logits=logits,
        margin=margin,
        second=second,
        R=R,
        conv=conv,
        keys=np.asarray(state.keys[:, :, :-1]),
        values=np.asarray(state.values[:, :, :-1]),
        drafter=by,
        memory=held,
        state=state,
    )


@functools.partial(jax.jit, static_argnames=("config", "drafter", "count"))
def _decode(
    config: ModelConfig,
    drafter: Any,
    count: int,
    params: layers.Params,
    weights: Any,
    state: State,
    memory: Any,
    pending: Array,
    history: History | None,
    keys: Array,
    sampling: Sampling,
) -> tuple[State, tuple[Any, ...]]:
    """``count`` root-only steps, and what each leaves."""

    def one(carry: Any, _: None) -> tuple[Any, Any]:
        state, memory, pending, history = carry
        state, memory, history, logits, pending = plain_step(
            config, drafter, params, weights, state, memory, pending, history, keys, sampling
        )
        token, margin, second = drawn_from(logits, sampling, keys, state.length, history)
        left = (state.policy.read(state.recurrent), state.conv, logits, pending, margin, second)
        return (state, memory, pending, history), (*left, memory)

    carry = state, memory, pending, history
    (state, *_), recorded = jax.lax.scan(one, carry, None, length=count)
    return state, recorded


def plain_step(
    config: ModelConfig,
    drafter: Any,
    params: layers.Params,
    weights: Any,
    state: State,
    memory: Any,
    pending: Array,
    history: History | None,
    keys: Array,
    sampling: Sampling,
    taking_part: Array | None = None,
) -> tuple[State, Any, History | None, Array, Array]:
    """One token a sequence: state, memory, history, logits [B, V], the next pending tokens.

    The drafter rests, and observes the root. Sequences outside ``taking_part`` [B] stay as they
    are.
    """
    own, *_ = per_sequence(state.batch, sampling, keys, state.length, config.vocab_size)
    draft = Draft(weights=weights, memory=memory, config=config, sampling=own)
    draft = drafter.rest(draft, pending)
    tree = Tree.root_only(pending)
    out, scratch = verify_trees(config, params, state, tree)
    choice = select(
        *(tree, out.logits),
        sampling=sampling,
        key=keys,
        position=state.length,
        history=history,
    )
    if taking_part is not None:
        choice = choice.mask(taking_part)
        pending = jnp.where(taking_part, choice.pending, pending)
    else:
        pending = choice.pending
    state = publish_path(state, scratch, choice)
    draft = drafter.observe(draft, tree, choice, out.hidden)
    if history is not None:
        history = extend(history, tree.tokens, choice.length)
    return state, draft.memory, history, out.logits[:, 0], pending


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
