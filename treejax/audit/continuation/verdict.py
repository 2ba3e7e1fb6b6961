"""Measured steps become checks, and what is rounding is told from what is not.

A token that is not plain's is rounding only if it is plain's second choice and plain's margin is
within what the controls' logits allow; a proposal only if a perturbation of the size of the bound
changes plain's own. Both are counted. A sequence whose text went another way is not compared from
there on.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from treejax.audit.base import Check
from treejax.audit.continuation.lengths import deepest
from treejax.audit.envelope import LUMOTREE, Envelope
from treejax.audit.raised import guarded
from treejax.audit.reference import Plain
from treejax.audit.step import Cycle, Subject
from treejax.audit.surfaces import EXACT, LAYERED, SURFACES, Measured
from treejax.model import Model

LONG = "long"
"""The schedule of the long run, whose bounds come from a control as long as it."""

WORDS = {
    "tokens": "tokens that are not plain's",
    "length": "tokens by which a length is wrong",
    "old rows": "old attention rows that changed",
    "narrow vectors": "float32 vectors that hold numbers of bfloat16",
    "proposal": "proposed nodes that differ",
}


class Tally:
    """The checks of one subject.

    Attributes:
      checks: made so far.
      facts: counts for the report.
      drift: rows of the long run's table.
      left_out: rows that say what could not be done, and why.
    """

    def __init__(self, model: Model, subject: Subject, envelope: Envelope):
        self.checks: list[Check] = []
        self.drift: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {
            "steps": 0,
            "tokens": 0,
            "near ties": 0,
            "proposals at a near tie": 0,
        }
        self.envelope, self.name = envelope, subject.name
        self._most_rows = deepest(subject.drafter) + 1
        self._published: set[int] = set()
        self._config = model.config
        self._worst: dict[tuple[str, bool], tuple[float, float, float]] = {}

    def bounds_at(self, where: Mapping[str, int | str]) -> Envelope:
        """The envelope that holds in a schedule: long runs have bounds of their own."""
        return self.envelope.over_long_runs() if where["schedule"] == LONG else self.envelope

    def record(
        self,
        step: Measured,
        shown: Cycle,
        plain: Plain,
        offset: np.ndarray,
        alive: np.ndarray,
        where: Mapping[str, int | str],
        fragile: Callable[[], np.ndarray],
    ) -> np.ndarray:
        """Check one step of all sequences that are ``alive`` [B]; who is still comparable after it.

        ``offset`` [B] is where the step began; ``fragile`` tells whose proposal hangs on rounding.
        """
        near = self._near_ties(step, shown, plain, offset, self.bounds_at(where).margin) & alive
        after, compared = alive & ~near, alive & ~near
        self.facts["near ties"] += int(near.sum())
        self.facts["steps"] += int(alive.sum())
        self.facts["tokens"] += int((step.offset - offset)[alive].sum())
        self._published.update((step.offset - offset)[alive].tolist())
        if not compared.any():
            return after
        for name in SURFACES:
            self._held(name, step.distances[name], compared, where)
        proposal = np.where(compared, step.counts["proposal"], 0)
        if proposal.any():
            shaky = fragile() & compared
            self.facts["proposals at a near tie"] += int((shaky & (proposal > 0)).sum())
            proposal = np.where(shaky, 0, proposal)
        for name in EXACT:
            counts = proposal if name == "proposal" else np.where(compared, step.counts[name], 0)
            self.exact(WORDS[name], int(counts.sum()), {**where, "prefix": int(counts.argmax())})
        return after & (step.counts["tokens"] == 0)

    def exact(self, name: str, count: int, where: Mapping[str, int | str], note: str = "") -> None:
        """A count that must be 0."""
        self.checks.append(Check("continuation", self.name, name, dict(where), count, 0, note=note))

    def guarded(self, where: Mapping[str, int | str]) -> contextlib.AbstractContextManager[None]:
        """What the subject raises inside is a failed check."""
        return guarded("continuation", self.name, where, self.checks)

    def never_published(self) -> list[int]:
        """Lengths of path, the root counted, that no step of a sequence published."""
        return [rows for rows in range(1, self._most_rows + 1) if rows not in self._published]

    def rows(self) -> list[dict[str, Any]]:
        """By surface the step that came nearest to its bound, or went furthest past it; the long
        run's apart."""
        rows = []
        for (name, long), (ratio, value, bound) in self._worst.items():
            unit = "nats" if name == "divergence" else "relative"
            rows.append(
                {
                    "subject": self.name,
                    "surface": f"{name}, long run" if long else name,
                    "distance": value,
                    "bound": bound,
                    "of the bound": ratio,
                    "LumoTree's bound": LUMOTREE[unit],
                }
            )
        return rows

    def _held(
        self, name: str, values: np.ndarray, alive: np.ndarray, where: Mapping[str, int | str]
    ) -> None:
        """A check a layer: the largest distance of any sequence that is compared."""
        bounds, long = self.bounds_at(where).bounds[name], where["schedule"] == LONG
        layers = {"R": self._config.linear_layers, "C": self._config.linear_layers}
        numbers = layers.get(name, self._config.full_layers)
        mine = np.where(alive.reshape(-1, *[1] * (values.ndim - 1)), values, 0.0)
        for i, bound in enumerate(bounds):
            layer = mine[:, i] if name in LAYERED else mine
            place = np.unravel_index(int(np.argmax(layer)), layer.shape)
            there = {**where, "prefix": int(place[0])}
            if name in LAYERED:
                there["layer"] = numbers[i]
            if name in ("R", "row logits"):
                there["head" if name == "R" else "row"] = int(place[1])
            value = float(layer[place])
            self.checks.append(Check("continuation", self.name, name, there, value, bound))
            ratio = value / bound
            if not ratio <= self._worst.get((name, long), (-1.0, 0.0, 0.0))[0]:
                self._worst[name, long] = (ratio, value, bound)

    def _near_ties(
        self, step: Measured, shown: Cycle, plain: Plain, offset: np.ndarray, margin: float
    ) -> np.ndarray:
        """[B] whether the first token that is not plain's may be rounding's doing."""
        tokens, count = np.asarray(shown.tokens), np.asarray(shown.count)
        near = np.zeros(len(offset), bool)
        for b in np.flatnonzero(step.counts["tokens"]):
            got = tokens[b, : count[b]]
            want = plain.tokens[b, offset[b] + 1 : offset[b] + 1 + len(got)]
            differ = np.flatnonzero(got != want)
            if not len(differ):
                continue  # the right tokens, but too few or too many
            place = offset[b] + 1 + differ[0]
            second = plain.second[place, b] == got[differ[0]]
            near[b] = second and plain.margin[place, b] <= margin
        return near
