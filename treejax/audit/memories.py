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
from treejax.tree import Tree


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


def worst_row(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """[L, H] the largest distance of a row of [L, T, H, D], in units of the rows' RMS norm; 0
    without rows. One wrong row shows at its full size however many are right."""
    if not mine.shape[1]:
        return np.zeros((mine.shape[0], mine.shape[2]))
    a, b = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.square(a - b, dtype=np.float64).sum(axis=3).max(axis=1)
        size = np.square(b, dtype=np.float64).sum(axis=3).mean(axis=1)
    ratio = np.sqrt(difference / np.where(size > 0, size, 1.0))
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
    prefix, so the caches are compared afterwards; without one the distance is 0, and infinite for
    one that stands for another number of tokens. What a drafter
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
    theirs = _as_roomy(_with_experience(memory_at(plain, offset, rows), memory), memory)
    pending, length = plain.tokens[rows, offset], plain.start[rows] + offset
    how = model.config, subject.drafter, weights
    settings = sampling.prepared(model.config.vocab_size)
    rest = jnp.asarray(length, jnp.int32), jnp.asarray(pending), keys, settings
    proposed, mine = propose(*how, memory, *rest)
    expected, want = propose(*how, theirs, *rest)
    other = _different(proposed, expected)
    near = np.zeros(len(rows))
    for a, b in zip(heads(mine), heads(want), strict=True):
        near = np.maximum(near, cache_distance(a, b, length))
        near = np.where(np.asarray(a.rows + a.count) == length, near, np.inf)
    return near, other


def memory_at(plain: Plain, offset: np.ndarray, rows: np.ndarray) -> Any:
    """The drafter's memory that plain had after ``offset`` [B] tokens of its sequences ``rows``."""
    return jax.tree.map(lambda leaf: _at(leaf, offset, rows), plain.memory)


def _at(leaf: np.ndarray, offset: np.ndarray, rows: np.ndarray) -> Array:
    """Leaf [T + 1, B, ...] at each sequence's position; of a counter [T + 1] the latest."""
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


def _as_roomy(plain: Any, mine: Any) -> Any:
    """Plain's memory with caches as long as those of ``mine``: one program then proposes of both.

    Rows past a cache's end are never read.
    """

    def widen(theirs: Any, own: Any) -> Any:
        more = np.subtract(own.shape, theirs.shape)
        if not (more > 0).any():
            return theirs
        return jnp.pad(theirs, [(0, max(n, 0)) for n in more.tolist()])

    return jax.tree.map(widen, plain, mine)


@functools.partial(jax.jit, static_argnames=("config", "drafter"))
def propose(
    config: ModelConfig,
    drafter: Any,
    weights: Any,
    memory: Any,
    length: Array,
    pending: Array,
    keys: Array,
    sampling: Sampling,
) -> tuple[Tree, Any]:
    """The trees that a drafter proposes after ``length`` [B] tokens, and its memory then.

    Args:
      pending: [B] tokens, the roots; keys: [B] of the sequences.
      sampling: the target's settings, prepared.
    """
    own, *_ = per_sequence(len(length), sampling, keys, length, config.vocab_size)
    draft = Draft(weights=weights, memory=memory, config=config, sampling=own)
    tree, _, draft = drafter.propose(draft, _Prefix(length), pending, keys)
    return tree, draft.memory


class _Prefix(NamedTuple):
    """What drafters read of a state."""

    length: Array


def _different(tree: Tree, other: Tree) -> np.ndarray:
    """[B] tokens, parents and sizes in which two trees differ."""
    count = np.zeros(tree.batch, np.int64)
    for name in ("tokens", "parent", "size"):
        differ = np.asarray(getattr(tree, name)) != np.asarray(getattr(other, name))
        count += differ.reshape(tree.batch, -1).sum(axis=1)
    return count


def heads(memory: Any) -> list[HeadMemory]:
    nodes = jax.tree.leaves(memory, is_leaf=lambda node: isinstance(node, HeadMemory))
    return [node for node in nodes if isinstance(node, HeadMemory)]


def cache_distance(mine: HeadMemory, theirs: HeadMemory, length: np.ndarray) -> np.ndarray:
    """[B] largest relative distance of a head's first ``length`` [B] rows, of keys or values."""
    worst = np.zeros(len(length))
    for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
        a, b = np.asarray(a), np.asarray(b)
        for row, end in enumerate(length):
            far = worst_row(a[None, row, :end], b[None, row, :end]).max()
            worst[row] = np.maximum(worst[row], far)  # not a number stays so
    return worst


def fragile(
    model: Model,
    subject: Subject,
    weights: Any,
    memory: Any,
    plain: Plain,
    offset: np.ndarray,
    *,
    size: float,
    keys: Array,
    sampling: Sampling,
    tries: int = 8,
) -> np.ndarray:
    """[B] whose proposal hangs on rounding: noise of relative ``size`` in plain's own head cache
    and waiting rows changes it, in one of ``tries``."""
    rows = np.arange(len(offset))
    theirs = _with_experience(memory_at(plain, offset, rows), memory)
    length = jnp.asarray(plain.start[rows] + offset, jnp.int32)
    settings = sampling.prepared(model.config.vocab_size)
    rest = length, jnp.asarray(plain.tokens[rows, offset]), keys, settings
    how = model.config, subject.drafter, weights
    random = np.random.default_rng(0)

    def shaken(head: Any) -> Any:
        if not isinstance(head, HeadMemory):
            return head
        noisy = {}
        for name in ("keys", "values", "waiting"):
            leaf = getattr(head, name)
            noise = 1.0 + size * random.uniform(-1.0, 1.0, leaf.shape)
            noisy[name] = jnp.asarray(np.asarray(leaf, np.float64) * noise, leaf.dtype)
        return head.replace(**noisy)

    expected, _ = propose(*how, theirs, *rest)
    found = np.zeros(len(offset), bool)
    for _ in range(tries):
        moved = jax.tree.map(shaken, theirs, is_leaf=lambda node: isinstance(node, HeadMemory))
        proposed, _ = propose(*how, moved, *rest)
        found |= _different(proposed, expected) > 0
    return found
