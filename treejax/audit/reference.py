"""Plain decoding with everything recorded: what audits hold an engine against.

One root-only step follows the other under policy ``replay`` in plain JAX, whose published state is
bitwise that of native decoding. Entry i of every record belongs to the state of ``start + i``
tokens. Attention rows are causal: those of the last state serve every position.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.decoding import STRIDE, Going, decode_stride, drawn_from, follow_stride
from treejax.audit.intake import NATIVE, Start, take_in
from treejax.drafters import Drafter
from treejax.drafters import Plain as NoDrafter
from treejax.model import Model
from treejax.policies import Policy
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.state import State, with_policy


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
    settings = sampling.prepared(model.config.vocab_size)
    began = with_policy(start.state, policy)
    first = drawn_from(start.logits, settings, keys, began.length, start.history)
    going = Going(began, first[0], start.logits, start.history)
    memory, drawing = start.draft.memory, (keys, settings)
    lead = (policy.read(began.recurrent), began.conv, start.logits, *first)
    records, memories = [_host(lead)], [_host(memory)]
    free = jnp.full((STRIDE, began.batch), -1, jnp.int32)
    for done in range(0, count, STRIDE):
        more = min(STRIDE, count - done)
        counts = jnp.full(began.batch, more, jnp.int32)
        going, left = decode_stride(model.config, model.params, going, *drawing, counts, free)
        memory, held = follow_stride(
            *(model.config, by, True, start.draft.weights, memory, settings, keys),
            (left.tree, left.choice, left.hidden),
        )
        records.append(_host(left[: len(lead)], more))
        memories.append(_host(held, more))
    R, conv, logits, tokens, margin, second = _joined(records)
    state = going.state
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
        memory=_joined(memories),
        state=state,
    )


def _host(tree: Any, count: int | None = None) -> Any:
    """Leaves as NumPy arrays: the first ``count`` entries; without it, one entry more of each."""
    if count is None:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], tree)


def _joined(parts: list[Any]) -> Any:
    """Trees of one form, leaves one after the other."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
