"""How far an engine's step left each surface from plain decoding's, and what must be equal.

Everything is measured where plain decoding says that the step should have ended: the proposed tree
is walked along plain's own tokens. What the engine claims (lengths, tokens, the path) is held
against that exactly.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.memories import compare_drafters, relative, worst_row
from treejax.audit.reference import Plain
from treejax.audit.rows import RowLogits
from treejax.audit.step import Cycle, Engine, Subject
from treejax.model import Model
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.state import State
from treejax.tree import Tree

LAYERED = ("R", "C", "new K", "old K")
"""Surfaces of which every layer has a distance, and a bound."""

SURFACES = (*LAYERED, "divergence", "row logits", "drafter")
"""What is measured. Relative L2 distances, but for ``divergence``, which is nats."""

EXACT = ("tokens", "length", "old rows", "narrow vectors", "proposal")
"""What is counted, and must be 0: emitted tokens that are not plain's, tokens by which the state's
length is wrong, old attention rows whose bytes changed, vectors of the recurrent carry that were
rounded to bfloat16, nodes that the drafter proposes otherwise."""


class Measured(NamedTuple):
    """One step of B sequences.

    Attributes:
      offset: [B] tokens after the prompt that the state should hold now.
      distances: by name of ``SURFACES``: R [B, Lg, Hv]; C [B, Lg]; new K and old K [B, La, 2, Hkv],
        keys and values; divergence [B], along the right path; row logits [B, N], of all rows of the
        tree, also those that were rejected; drafter [B]; and ``logits`` [B], the largest change of
        one logit, by which near ties are judged.
      counts: by name of ``EXACT``: [B] int.
    """

    offset: np.ndarray
    distances: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]


def measure(
    model: Model,
    subject: Subject,
    weights: Any,
    before: Engine,
    after: Engine,
    shown: Cycle,
    expected: RowLogits,
    offset: np.ndarray,
    *,
    keys: Array,
    sampling: Sampling,
    rows: np.ndarray | None = None,
    limit: np.ndarray | None = None,
) -> Measured:
    """All surfaces after one step that began where ``offset`` [B] tokens followed the prompts.

    Args:
      before, after, shown: the step's input and outputs.
      expected: plain decoding, and what it says at rows of trees.
      rows: [B] which sequence of ``plain`` each one follows; None where they are the same.
      limit: [B] how deep the step could go: -1 where a sequence took no part. None: no limit.

    Raises:
      ValueError: ``plain`` is too short.
    """
    plain = expected.plain
    rows = np.arange(before.state.batch) if rows is None else rows
    path = right_path(shown.tree, plain, offset, rows, limit)
    there = offset + (path >= 0).sum(axis=1)
    distances = distances_of(after.state, plain, there, since=offset, rows=rows)
    length = np.asarray(after.state.length)
    counts = {
        "tokens": _wrong_tokens(shown, after, plain, offset, there, rows),
        "length": np.abs(length - (plain.start[rows] + there)),
        "old rows": _changed(before.state, after.state, plain.start[rows] + offset),
        "narrow vectors": np.asarray(narrow_vectors(after.state.recurrent)),
    }
    distances |= compare_logits(shown, path, plain, offset, rows)
    distances["row logits"] = expected.distances(shown.tree, shown.logits, offset, rows, limit)
    near, other = compare_drafters(
        *(model, subject, weights, after.memory, plain, there),
        keys=keys,
        sampling=sampling,
        rows=rows,
    )
    distances["drafter"], counts["proposal"] = near, other
    return Measured(there, distances, counts)


def right_path(
    tree: Tree, plain: Plain, offset: np.ndarray, rows: np.ndarray, limit: np.ndarray | None = None
) -> np.ndarray:
    """Rows [B, P] of the proposed trees along plain's tokens from the root down, -1 padded."""
    tokens, parent, size = (np.asarray(x) for x in (tree.tokens, tree.parent, tree.size))
    path = np.full((len(rows), tree.max_depth + 1), -1, np.int64)
    if (offset + tree.max_depth + 1).max() > plain.count:
        raise ValueError(
            f"plain has {plain.count} tokens and a step may need "
            f"{int((offset + tree.max_depth + 1).max())}: decode more"
        )
    for b, row in enumerate(rows):
        most = tree.max_depth if limit is None else int(limit[b])
        node = 0
        for depth in range(most + 1):
            path[b, depth] = node
            wanted = plain.tokens[row, offset[b] + depth + 1]
            children = np.flatnonzero((parent[b] == node) & (tokens[b] == wanted))
            children = children[(children < size[b]) & (children > 0)]
            if not len(children):
                break
            node = children[0]
    return path


def distances_of(
    state: State,
    plain: Plain,
    offset: np.ndarray,
    *,
    since: np.ndarray,
    rows: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """R, C, new K and old K of a state that should hold ``offset`` [B] tokens after its prompt.

    ``since`` [B]: how many it held before the step: attention rows from there on are new.
    """
    rows = np.arange(state.batch) if rows is None else rows
    R, conv, keys, values = (np.asarray(x) for x in _arrays(state))
    want = np.swapaxes(plain.R[offset, :, rows], 0, 1)  # [Lg, B, ...]
    made = {"R": relative(R, want, axes=(3, 4)).swapaxes(0, 1)}
    want = np.swapaxes(plain.conv[offset, :, rows], 0, 1)
    made["C"] = relative(conv, want, axes=(2, 3)).swapaxes(0, 1)

    batch, layers, heads = state.batch, keys.shape[0], keys.shape[3]
    new, old = (np.zeros((batch, layers, 2, heads)) for _ in range(2))
    for b, row in enumerate(rows):
        first, end = int(plain.start[row] + since[b]), int(plain.start[row] + offset[b])
        pairs = (keys, plain.keys), (values, plain.values)
        for which, (mine, theirs) in enumerate(pairs):
            a, c = mine[:, b, :end], theirs[:, row, :end]
            new[b, :, which] = worst_row(a[:, first:], c[:, first:])
            old[b, :, which] = worst_row(a[:, :first], c[:, :first])
    return made | {"new K": new, "old K": old}


@jax.jit
def _arrays(state: State) -> tuple[Array, ...]:
    R = state.policy.read(state.recurrent)
    return R, state.conv, state.keys[:, :, :-1], state.values[:, :, :-1]


def compare_logits(
    shown: Cycle, path: np.ndarray, plain: Plain, offset: np.ndarray, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """The largest over the nodes of the right path, 0 without one: ``divergence`` [B], KL(plain ||
    engine) in nats, and ``logits`` [B], the change of one logit."""
    batch = np.arange(len(rows))[:, None]
    mine = np.asarray(shown.logits)[batch, np.maximum(path, 0)]
    place = offset[:, None] + 1 + np.arange(path.shape[1])[None, :]
    theirs = plain.logits[np.minimum(place, plain.count), rows[:, None]]
    real = path >= 0
    change = np.abs(mine - theirs).max(axis=-1)
    return {
        "divergence": np.where(real, kl(theirs, mine), 0.0).max(axis=1),
        "logits": np.where(real, change, 0.0).max(axis=1),
    }


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats of softmaxed logits [..., V], float64; infinite if q is not finite."""
    logp, logq = (_log_softmax(np.asarray(x, np.float64)) for x in (p, q))
    value = np.sum(np.exp(logp) * (logp - logq), axis=-1)
    return np.where(np.isfinite(value), np.maximum(value, 0.0), np.inf)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        z = logits - logits.max(axis=-1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def _wrong_tokens(
    shown: Cycle,
    after: Engine,
    plain: Plain,
    offset: np.ndarray,
    there: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    """[B] emitted tokens that are not plain's, missing or surplus ones, and a wrong pending one."""
    tokens, count = np.asarray(shown.tokens), np.asarray(shown.count)
    pending, wrong = np.asarray(after.pending), np.zeros(len(rows), np.int64)
    for b, row in enumerate(rows):
        want = plain.tokens[row, offset[b] + 1 : there[b] + 1].tolist()
        got = tokens[b, : count[b]].tolist()
        both = sum(a != c for a, c in zip(got, want, strict=False))
        wrong[b] = both + abs(len(got) - len(want))
        wrong[b] += int(pending[b] != plain.tokens[row, there[b]])
    return wrong


def _changed(before: State, after: State, length: np.ndarray) -> np.ndarray:
    """[B] rows below ``length`` whose keys or values are not the bytes that they were."""
    changed = np.zeros(len(length), np.int64)
    for old, new in ((before.keys, after.keys), (before.values, after.values)):
        differ = _bytes_differ(old, new)
        inside = np.arange(differ.shape[1])[None, :] < length[:, None]
        changed += (np.asarray(differ) & inside).sum(axis=1)
    return changed


@jax.jit
def _bytes_differ(old: Array, new: Array) -> Array:
    """[B, S] whether any byte of a row [La, B, S + 1, Hkv, D] differs."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[old.dtype.itemsize]
    a, b = (jax.lax.bitcast_convert_type(x[:, :, :-1], unsigned) for x in (old, new))
    return (a != b).any(axis=(0, 3, 4))


@jax.jit
def narrow_vectors(carry: Any) -> Array:
    """[B] float32 vectors of a policy's carry that look as if they had been bfloat16.

    A vector counts if it has eight numbers or more that are not whole, and the low half of every
    number is 0: by chance that happens once in 2^128.
    """
    total = jnp.zeros((), jnp.int32)
    for leaf in jax.tree.leaves(carry):
        if leaf.dtype == jnp.float32 and leaf.ndim > 3:
            bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
            there = (leaf != jnp.round(leaf)).sum(axis=-1) >= 8
            narrow = there & (bits & jnp.uint32(0xFFFF) == 0).all(axis=-1)
            axes = tuple(axis for axis in range(narrow.ndim) if axis != 1)
            total = total + narrow.sum(axis=axes, dtype=jnp.int32)
    return total
