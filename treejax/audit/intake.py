"""Prompts taken in, from which plain decoding and every engine under audit go on.

The model's part is ``model.prefill_block``, one program whatever the drafter. Nothing is donated: a
start is used more than once.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.step import Engine, Subject
from treejax.config import ModelConfig
from treejax.drafters import Drafter
from treejax.drafters.base import Draft
from treejax.history import History
from treejax.history import begin as begin_history
from treejax.model import Model, check_prompt, prefill_block, prompt_blocks
from treejax.policies import Policy, make_policy
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.state import State, init_state, with_policy
from treejax.steps.select import Choice

NATIVE: Policy = make_policy("replay", "xla")
"""The policy of plain decoding, and under which prompts are taken in."""


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
    tokens, lengths = padded(prompts)
    if onto is None:
        state = init_state(config, batch, max_length, model.dtype, NATIVE)
        draft = drafter.init(model, batch, max_length)
        logits = jnp.zeros((batch, config.vocab_size), jnp.float32)
        history = history_of(prompts, config, sampling)
    else:
        state, draft, logits, history = onto.state, onto.draft, onto.logits, onto.history
        state = with_policy(state, NATIVE)
    check_prompt(config, state, tokens, lengths)
    memory = draft.memory
    for block, count in prompt_blocks(tokens, lengths):
        out, state = prefill_block(config, model.params, state, block, count)
        memory = _prime(config, drafter, draft.weights, memory, out.hidden, block, count)
        logits = jnp.where((count > 0)[:, None], out.logits, logits)
    return Start(state, draft.replace(memory=memory), logits, history)


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] int32, right-padded, and lengths [B]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def history_of(
    prompts: Sequence[Sequence[int]], config: ModelConfig, sampling: Sampling | None
) -> History | None:
    """What penalties count of the prompts; None where ``sampling`` asks for none."""
    if sampling is None or not sampling.needs_history:
        return None
    tokens, lengths = padded(prompts)
    return begin_history(jnp.asarray(tokens), jnp.asarray(lengths), config.vocab_size)


@functools.partial(jax.jit, static_argnames=("config", "drafter"))
def _prime(
    config: ModelConfig,
    drafter: Any,
    weights: Any,
    memory: Any,
    hidden: Array,
    tokens: Array,
    count: Array,
) -> Any:
    """One block of prompt into the drafter's memory: ``steps.prompt.prime`` without donating."""
    draft = Draft(weights=weights, memory=memory, config=config)
    return drafter.prime(draft, hidden, tokens, count).memory


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
