"""How tight an envelope is: the smallest planted perturbation of each surface that it catches."""

from collections.abc import Callable
from typing import Any

import numpy as np

from treejax.audit.continuation.schedules import End
from treejax.audit.envelope import LUMOTREE, Envelope
from treejax.audit.intake import NATIVE
from treejax.audit.memories import cache_distance, heads, memory_at
from treejax.audit.reference import Plain
from treejax.audit.rows import RowLogits
from treejax.audit.step import Subject
from treejax.audit.surfaces import distances_of, kl
from treejax.model import Model
from treejax.state import with_policy

SPAN = 1e-9, 10.0
"""Sizes between which is searched, relative to what is perturbed."""

HALVINGS = 24


def smallest_caught(
    model: Model,
    subject: Subject,
    expected: RowLogits,
    envelope: Envelope,
    end: End,
    note: str = "",
) -> list[dict[str, Any]]:
    """A table: what was perturbed, then ``note``, the smallest relative size caught, and LumoTree's
    bounds.

    A perturbation of size e adds noise of e times the norm of what it strikes: one head of R, one
    layer's convolution history in a block of channels, one row of one head of K or V, a row of
    logits, one row of the drafter's cache. It strikes one sequence after the audit's last step, in
    the first layer of its kind.
    """
    left = np.flatnonzero(end.alive)
    if not len(left):
        return []  # every text went another way at a near tie: nothing is comparable
    b, offset, plain = int(left[0]), end.offset, expected.plain
    state, random = with_policy(end.engine.state, NATIVE), np.random.default_rng(0)
    length = int(plain.start[b] + offset[b])
    block = max(1, model.config.conv_channels // 8)
    places = {
        "R: one head": ("R", "recurrent", np.s_[0, b, 0]),
        "C: one block of channels": ("C", "conv", np.s_[0, b, :, :block]),
        "new K: one row of one head": ("new K", "keys", np.s_[0, b, length - 1, 0]),
        "new V: one row of one head": ("new K", "values", np.s_[0, b, length - 1, 0]),
        "old K: one row of one head": ("old K", "keys", np.s_[0, b, length // 2, 0]),
        "old V: one row of one head": ("old K", "values", np.s_[0, b, length // 2, 0]),
    }
    rows = []
    for name, (surface, field, place) in places.items():
        array = np.asarray(getattr(state, field))
        if not array[place].size:
            continue
        struck = noise(array[place], random)

        def caught(size: float, how: Any = (surface, field, place, array, struck)) -> bool:
            surface, field, place, array, struck = how
            moved = array.copy()
            moved[place] = (array[place].astype(np.float64) + size * struck).astype(array.dtype)
            far = distances_of(state.replace(**{field: moved}), plain, offset, since=end.before)
            bounds = np.asarray(envelope.bounds[surface])
            return not bool((far[surface][b].reshape(len(bounds), -1).max(axis=1) <= bounds).all())

        rows.append(_row(subject, name, surface, caught))
    rows.append(_logits(subject, plain.logits[offset[b], b], envelope, random))
    rows.append(_row_logits(subject, expected, envelope, end, b, random))
    rows += _drafter(subject, plain, envelope, end, b, random)
    return [row | {"perturbed": f"{row['perturbed']}{note}"} for row in rows]


def noise(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Noise of the array's own norm, float64."""
    made = random.standard_normal(array.shape)
    return made * np.linalg.norm(array.astype(np.float64)) / np.linalg.norm(made)


def search(caught: Callable[[float], bool]) -> float:
    """The smallest size that is caught, by bisection of its logarithm; NaN if none is."""
    low, high = np.log(SPAN)
    if not caught(float(np.exp(high))):
        return float("nan")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if caught(float(np.exp(middle))):
            high = middle
        else:
            low = middle
    return float(np.exp(high))


def _row(
    subject: Subject, name: str, surface: str, caught: Callable[[float], bool]
) -> dict[str, Any]:
    unit = "nats" if surface == "divergence" else "relative"
    return {
        "subject": subject.name,
        "perturbed": name,
        "smallest caught": search(caught),
        "LumoTree's bound": f"{LUMOTREE[unit]} {unit}",
    }


def _logits(
    subject: Subject, row: np.ndarray, envelope: Envelope, random: np.random.Generator
) -> dict[str, Any]:
    """A row of logits [V]: the perturbation, and the divergence that it makes."""
    struck = noise(row - row.mean(), random)  # a shift of all of them says nothing

    def nats(size: float) -> float:
        return float(kl(row, row + size * struck))

    bound = envelope.bounds["divergence"][0]
    made = _row(subject, "logits: one row", "divergence", lambda size: not nats(size) <= bound)
    return made | {"its nats": nats(made["smallest caught"])}


def _row_logits(
    subject: Subject,
    expected: RowLogits,
    envelope: Envelope,
    end: End,
    b: int,
    random: np.random.Generator,
) -> dict[str, Any]:
    """The root's logits among those of the last step's tree, of which no other row is known."""
    logits = np.asarray(end.shown.logits)
    struck = noise(logits[b, 0], random)

    def caught(size: float) -> bool:
        moved = logits.copy()
        moved[b, 0] += (size * struck).astype(logits.dtype)
        everyone, root = np.arange(len(logits)), np.zeros(len(logits), int)
        far = expected.distances(end.shown.tree, moved, end.before, everyone, root)
        return not bool(far[b, 0] <= envelope.bounds["row logits"][0])

    return _row(subject, "logits: one row of a tree", "row logits", caught)


def _drafter(
    subject: Subject,
    plain: Plain,
    envelope: Envelope,
    end: End,
    b: int,
    random: np.random.Generator,
) -> list[dict[str, Any]]:
    """One cached row of the head; nothing for drafters that keep none."""
    mine = heads(end.engine.memory)
    if not mine:
        return []
    theirs = heads(memory_at(plain, end.offset, np.arange(plain.batch)))[0]
    cache, keys = mine[0], np.asarray(mine[0].keys)
    length = np.minimum(np.asarray(cache.rows), np.asarray(theirs.rows))
    place = np.s_[b, int(length[b]) // 2]
    struck = noise(keys[place], random)

    def caught(size: float) -> bool:
        moved = keys.copy()
        moved[place] = (keys[place].astype(np.float64) + size * struck).astype(keys.dtype)
        far = cache_distance(cache.replace(keys=moved), theirs, length)
        return not bool(far[b] <= envelope.bounds["drafter"][0])

    return [_row(subject, "drafter: one row of the head's keys", "drafter", caught)]
