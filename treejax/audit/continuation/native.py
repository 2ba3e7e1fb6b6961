"""Plain decoding beside a long run: brought as far as what it is compared with, piece by piece."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from treejax.audit.decoding import STRIDE, Going, decode_stride, drawn_from, follow_stride
from treejax.audit.intake import Start
from treejax.drafters import Drafter
from treejax.model import Model
from treejax.sampling import Sampling
from treejax.shapes import Array


class Native(NamedTuple):
    """Plain decoding so far: a start to go on from, and the pending tokens [B]."""

    start: Start
    pending: Array


class Drawn(NamedTuple):
    """What plain drew, one token after the other: [B, T] tokens, by how much each was ahead of the
    ``second``, and that one."""

    tokens: np.ndarray
    margin: np.ndarray
    second: np.ndarray


def begin(model: Model, start: Start, keys: Array, sampling: Sampling) -> Native:
    """Plain decoding that has drawn one token after the prompts."""
    settings = sampling.prepared(model.config.vocab_size)
    first, *_ = drawn_from(start.logits, settings, keys, start.state.length, start.history)
    return Native(start, first)


def ahead(
    model: Model,
    drafter: Drafter,
    native: Native,
    counts: np.ndarray,
    *,
    keys: Array,
    sampling: Sampling,
) -> tuple[Native, Drawn]:
    """``counts`` [B] tokens further, the drafter's memory too; T is the largest of them."""
    start, settings = native.start, sampling.prepared(model.config.vocab_size)
    going = Going(start.state, native.pending, start.logits, start.history)
    memory, free = start.draft.memory, jnp.full((STRIDE, len(counts)), -1, jnp.int32)
    drawn = [np.zeros((3, 0, len(counts)))]
    for done in range(0, int(counts.max()), STRIDE):
        more = jnp.asarray(np.clip(counts - done, 0, STRIDE), jnp.int32)
        going, left = decode_stride(
            *(model.config, model.params, going, keys, settings, more, free),
        )
        memory, _ = follow_stride(
            *(model.config, drafter, False, start.draft.weights, memory, settings, keys),
            (left.tree, left.choice, left.hidden),
        )
        drawn.append(np.stack([left.token, left.margin, left.second]))
    tokens, margin, second = np.concatenate(drawn, axis=1).swapaxes(1, 2)
    draft: Any = start.draft.replace(memory=memory)
    reached = Native(Start(going.state, draft, going.logits, going.history), going.pending)
    return reached, Drawn(tokens.astype(np.int64), margin, second.astype(np.int64))
