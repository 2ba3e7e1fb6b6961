"""What takes in a prompt: the programs that the loop runs before its first step.

They are cut so that few are compiled: the model's part knows neither drafter nor sampling, and, as
prompts are taken in under one policy, not the one that will decode either. ``adopt`` hands over.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treejax import layers
from treejax.config import ModelConfig
from treejax.drafters.base import Draft
from treejax.history import History
from treejax.model import prefill_block
from treejax.policies import Policy, make_policy
from treejax.sampling import Sampling, sample
from treejax.shapes import Array
from treejax.state import State, with_policy

PROMPT_POLICY = make_policy("replay", "xla")
"""Its carry is R itself, which is all that the chunked rule needs; no scan of it is run."""


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("state", "logits"))
def absorb(
    config: ModelConfig,
    params: layers.Params,
    state: State,
    logits: Array,
    tokens: Array,
    count: Array,
) -> tuple[State, Array, Array]:
    """One block of prompt [B, T], ``count`` [B] real tokens, into a state of ``PROMPT_POLICY``.

    Returns the state, hidden rows [B, T, H], and ``logits`` [B, V] after each last real token.
    """
    out, state = prefill_block(config, params, state, tokens, count)
    return state, out.hidden, jnp.where((count > 0)[:, None], out.logits, logits)


@functools.partial(jax.jit, static_argnames=("config", "drafter"), donate_argnames="memory")
def prime(
    config: ModelConfig,
    drafter: Any,
    weights: Any,
    memory: Any,
    hidden: Array,
    tokens: Array,
    count: Array,
) -> Any:
    """The same block into the drafter's memory."""
    draft = Draft(weights=weights, memory=memory, config=config)
    return drafter.prime(draft, hidden, tokens, count).memory


@functools.partial(jax.jit, static_argnames="policy", donate_argnames="state")
def adopt(state: State, policy: Policy) -> State:
    """``with_policy`` as a program: what takes in the prompt hands over to what decodes."""
    return with_policy(state, policy)


@jax.jit
def first_token(
    logits: Array,
    sampling: Sampling,
    keys: Array,
    position: Array,
    history: History | None,
    want_logprobs: Array,
) -> tuple[Array, Array]:
    """The token after the prompt [B] and its log-probability, 0 unless asked for."""
    token = sample(logits, sampling=sampling, key=keys, position=position, history=history)
    logp = lax.cond(
        want_logprobs,
        lambda: jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0],
        lambda: jnp.zeros(token.shape),
    )
    return token, logp


@dataclasses.dataclass(frozen=True)
class Intake:
    """Takes in prompts of any drafter.

    ``taken`` is what goes from block to block: state, drafter's memory, logits [B, V] after the
    last token. A block is tokens [B, T] and how many of each sequence are real [B].
    """

    config: ModelConfig
    params: Any
    drafter: Any
    weights: Any

    def __call__(self, taken: Any, blocks: Iterable[tuple[np.ndarray, ...]]) -> Any:
        state, memory, logits = taken
        for tokens, count in blocks:
            state, hidden, logits = absorb(
                *(self.config, self.params, state, logits, tokens, count)
            )
            memory = prime(
                *(self.config, self.drafter, self.weights, memory, hidden, tokens, count)
            )
        return state, memory, logits

    def programs(
        self, taken: Any, blocks: Iterable[tuple[np.ndarray, ...]]
    ) -> Iterator[Callable[[], Any]]:
        """What lowers the programs that the blocks need, one by one."""
        state, memory, logits = taken
        for tokens, count in variants(blocks):
            shape = (*tokens.shape, self.config.hidden_size)
            hidden = jax.ShapeDtypeStruct(shape, self.params["embed"].dtype)
            model, drafter = (self.config, self.params), (self.config, self.drafter, self.weights)
            yield functools.partial(absorb.lower, *model, state, logits, tokens, count)
            yield functools.partial(prime.lower, *drafter, memory, hidden, tokens, count)


def variants(blocks: Iterable[tuple[np.ndarray, ...]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """A block of each width that occurs, with no real token in it: one for each program."""
    by_width = {tokens.shape[1]: (tokens, np.zeros_like(count)) for tokens, count in blocks}
    return list(by_width.values())
