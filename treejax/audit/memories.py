"""What a drafter's memory would propose, and its head's cache, against plain decoding's own."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.reference import Plain
from treejax.audit.step import Subject
from treejax.config import ModelConfig
from treejax.drafters.adaptive import MixMemory
from treejax.drafters.base import Draft
from treejax.drafters.head_cache import HeadMemory
from treejax.drafters.scripted import Script
from treejax.model import Model
from treejax.sampling import Sampling, per_sequence
from treejax.shapes import Array


def relative(mine: np.ndarray, theirs: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Relative L2 distance over ``axes``: 0 where equal, infinite where only ``theirs`` is 0.

    Differences are taken before anything is rounded; what is not finite stays so.
    """
    a, b = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.sqrt(np.square(a - b, dtype=np.float64).sum(axis=axes))
        size = np.sqrt(np.square(b, dtype=np.float64).sum(axis=axes))
    ratio = difference / np.where(size > 0, size, 1.0)
    return np.where((size == 0) & (difference > 0), np.inf, ratio)


def compare_drafters(
    model: Model,
    subject: Subject,
    weights: Any,
    memory: Any,
    plain: Plain,
    offset: np.ndarray,
    *,
    keys: Array,
    sampling: Sampling,
    rows: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """([B] distance, [B] nodes that differ) of proposals from ``memory`` and from plain's.

    Both are given plain's pending token. Proposing completes what a head's cache holds of the
    prefix, so the caches are compared afterwards; without one the distance is 0. What a drafter
    learns from how its own proposals fared is not a matter of the prefix and is taken from
    ``memory`` on both sides.

    Raises:
      ValueError: ``plain`` was not recorded with this drafter.
    """
    if plain.drafter != subject.drafter:
        raise ValueError(
            f"plain was recorded with drafter {plain.drafter.name!r}, expected the subject's, "
            f"{subject.drafter.name!r}: decode with drafter="
        )
    rows = np.arange(len(offset)) if rows is None else rows
    theirs = jax.tree.map(lambda leaf: _at(leaf, offset, rows), plain.memory)
    theirs = _with_experience(theirs, memory)
    pending, length = plain.tokens[rows, offset], plain.start[rows] + offset
    state = plain.state.replace(length=jnp.asarray(length, jnp.int32), recurrent=())
    how = model.config, subject.drafter, weights
    rest = jnp.asarray(pending), keys, sampling.prepared(model.config.vocab_size)
    mine, proposed = _propose(*how, memory, state.length, *rest)
    want, expected = _propose(*how, theirs, state.length, *rest)
    other = np.zeros(len(rows), np.int64)
    for a, b in zip(proposed, expected, strict=True):
        other += (np.asarray(a) != np.asarray(b)).reshape(len(rows), -1).sum(axis=1)
    near = np.zeros(len(rows))
    for a, b in zip(_heads(mine), _heads(want), strict=True):
        near = np.maximum(near, _cache_distance(a, b, length))
    return near, other


def _at(leaf: np.ndarray, offset: np.ndarray, rows: np.ndarray) -> Array:
    """Leaf [T + 1, B, ...] at each sequence's position; counters of the whole batch: any."""
    if leaf.ndim < 2:
        return jnp.asarray(leaf[offset.max()])
    return jnp.asarray(leaf[offset, rows])


def _with_experience(plain: Any, mine: Any) -> Any:
    """Plain's memory with what ``mine`` learnt from its own proposals."""

    def choose(theirs: Any, own: Any) -> Any:
        if isinstance(theirs, MixMemory):
            return own
        if isinstance(theirs, Script):
            return theirs.replace(step=own.step)
        return theirs

    kinds = MixMemory, Script
    return jax.tree.map(choose, plain, mine, is_leaf=lambda node: isinstance(node, kinds))


@functools.partial(jax.jit, static_argnames=("config", "drafter"))
def _propose(
    config: ModelConfig,
    drafter: Any,
    weights: Any,
    memory: Any,
    length: Array,
    pending: Array,
    keys: Array,
    sampling: Sampling,
) -> tuple[Any, tuple[Array, ...]]:
    """The drafter's memory after proposing, and tokens, parents and sizes."""
    own, *_ = per_sequence(len(length), sampling, keys, length, config.vocab_size)
    draft = Draft(weights=weights, memory=memory, config=config, sampling=own)
    tree, _, draft = drafter.propose(draft, _Prefix(length), pending, keys)
    return draft.memory, (tree.tokens, tree.parent, tree.size)


class _Prefix(NamedTuple):
    """What drafters read of a state."""

    length: Array


def _heads(memory: Any) -> list[HeadMemory]:
    nodes = jax.tree.leaves(memory, is_leaf=lambda node: isinstance(node, HeadMemory))
    return [node for node in nodes if isinstance(node, HeadMemory)]


def _cache_distance(mine: HeadMemory, theirs: HeadMemory, length: np.ndarray) -> np.ndarray:
    """[B] largest relative distance over heads, keys and values of the first ``length`` rows.

    A cache that counts another number of rows stands for another prefix: infinite.
    """
    worst = np.zeros(len(length))
    counted = np.asarray(mine.rows + mine.count)
    for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
        a, b = np.asarray(a), np.asarray(b)
        for row, end in enumerate(length):
            far = relative(a[row, :end], b[row, :end], axes=(0, 2)).max()
            worst[row] = max(worst[row], far)
    return np.where(counted == length, worst, np.inf)
