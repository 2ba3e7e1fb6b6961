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
from treejax.audit.step import Engine, Subject
from treejax.config import ModelConfig
from treejax.drafters import Drafter
from treejax.drafters import Plain as NoDrafter
from treejax.drafters.base import Draft
from treejax.history import History, extend
from treejax.history import begin as begin_history
from treejax.model import Model, check_prompt, prefill_block, prompt_blocks
from treejax.policies import Policy, make_policy
from treejax.sampling import Sampling, adjust, noise, per_sequence, process
from treejax.shapes import Array
from treejax.state import State, init_state, with_policy
from treejax.steps.publish import publish_path
from treejax.steps.select import Choice, select
from treejax.steps.verify import verify_trees
from treejax.tree import Tree

NATIVE: Policy = make_policy("replay", "xla")
"""The policy of plain decoding."""


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


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Prompts taken in: state, draft (weights and memory), logits [B, V], history or None."""

    state: State
    draft: Draft
    logits: Array
    history: History | None


def take_in(
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    *,
    max_length: int,
    sampling: Sampling | None = None,
    onto: Start | None = None,
) -> Start:
    """States and drafter after ``prompts``, on top of ``onto`` or of nothing.

    The prompt is computed under ``NATIVE``; what continues under another policy is handed over by
    ``with_policy``, which is how any policy takes in a prompt.
    """
    config, batch = model.config, len(prompts)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((batch, lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    history = None
    if onto is None:
        state = init_state(config, batch, max_length, model.dtype, NATIVE)
        draft = drafter.init(model, batch, max_length)
        logits = jnp.zeros((batch, config.vocab_size), jnp.float32)
        if sampling is not None and sampling.needs_history:
            history = begin_history(jnp.asarray(tokens), jnp.asarray(lengths), config.vocab_size)
    else:
        state, draft, logits, history = onto.state, onto.draft, onto.logits, onto.history
        state = with_policy(state, NATIVE)
    check_prompt(config, state, tokens, lengths)
    for block, count in prompt_blocks(tokens, lengths):
        state, memory, logits = _block(
            config, drafter, model.params, draft.weights, state, draft.memory, logits, block, count
        )
        draft = draft.replace(memory=memory)
    return Start(state, draft, logits, history)


@functools.partial(jax.jit, static_argnames=("config", "drafter"))
def _block(
    config: ModelConfig,
    drafter: Any,
    params: layers.Params,
    weights: Any,
    state: State,
    memory: Any,
    logits: Array,
    tokens: Array,
    count: Array,
) -> tuple[State, Any, Array]:
    """``steps.together.absorb`` without donating: a start is used more than once."""
    out, state = prefill_block(config, params, state, tokens, count)
    draft = Draft(weights=weights, memory=memory, config=config)
    draft = drafter.prime(draft, out.hidden, tokens, count)
    return state, draft.memory, jnp.where((count > 0)[:, None], out.logits, logits)


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


def begin(
    model: Model,
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    plain: Plain,
    *,
    sampling: Sampling,
    max_length: int,
    rows: np.ndarray | None = None,
) -> tuple[Engine, Any]:
    """The engine of ``subject`` after the prompts, and its drafter's weights.

    ``rows`` [B]: which sequence of ``plain`` each prompt is; None where they are the same.
    """
    start = take_in(model, prompts, subject.drafter, max_length=max_length, sampling=sampling)
    rows = np.arange(len(prompts)) if rows is None else rows
    return engine_of(subject, start, plain.tokens[rows, 0]), start.draft.weights


def engine_of(subject: Subject, start: Start, pending: Any) -> Engine:
    """The engine of ``subject`` that goes on from ``start`` with pending tokens [B]."""
    token = jnp.asarray(pending, jnp.int32)
    path = jnp.full((len(token), subject.drafter.max_depth + 1), -1, jnp.int32)
    return Engine(
        state=with_policy(start.state, subject.policy),
        memory=start.draft.memory,
        pending=token,
        history=start.history,
        before=Choice(path=path, length=jnp.zeros_like(token), pending=token),
    )
