"""What was found of one policy: cells of every place, made into checks and rows of tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treejax.audit.base import Check
from treejax.audit.component.rules import CONTRACT, Promise
from treejax.audit.component.truth import STRICT, Errors, Rule
from treejax.policies import Policy, policy_title

AUDIT = "component"
KINDS = ("outputs", "states")
PAPER = "LumoTree (arXiv 2609.23900, as printed)"


@dataclasses.dataclass(frozen=True)
class Cells:
    """Cells of one kind at one place: the policy's errors, the native ones, and how many of them
    have the native bits."""

    kind: str
    made: Errors
    decoded: Errors
    bits: int

    @property
    def count(self) -> int:
        return self.made.rms.size

    @property
    def strict(self) -> int:
        """Cells that pass LumoTree's rule."""
        return int(STRICT.passes(self.made, self.decoded).sum())

    @property
    def relative(self) -> float:
        """The largest relative RMS of a cell."""
        return _most(self.made.rms / np.maximum(self.made.scale, 2.0**-149))

    def worst(self, rule: Rule) -> tuple[float, float]:
        """The largest RMS and the largest error over what the rule allows."""
        rms, largest = rule.ratios(self.made, self.decoded)
        return _most(rms), _most(largest)

    def of_layer(self, axis: int, layer: int) -> "Cells":
        """Those of one layer; the count of bits stays that of all."""
        made, decoded = (
            Errors(*(np.take(x, layer, axis) for x in part)) for part in (self.made, self.decoded)
        )
        return dataclasses.replace(self, made=made, decoded=decoded)

    @classmethod
    def joined(cls, parts: Sequence["Cells"]) -> "Cells":
        """All of one kind together."""
        made, decoded = (
            Errors(*(np.concatenate([x.ravel() for x in leaf]) for leaf in zip(*part, strict=True)))
            for part in ([p.made for p in parts], [p.decoded for p in parts])
        )
        return cls(parts[0].kind, made, decoded, sum(part.bits for part in parts))


def label_of(policy: Policy) -> str:
    """A policy's title, with the settings that are not its class's own: ring@length=3."""
    settings: Any = policy
    if not dataclasses.is_dataclass(settings):
        return policy_title(policy)
    other = [
        f"{field.name}={getattr(settings, field.name)}"
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    ]
    return "@".join([policy_title(policy), *([",".join(other)] if other else [])])


def rules_of(promise: Promise) -> dict[str, Rule]:
    return {"outputs": promise.outputs, "states": promise.states}


def check_cells(
    subject: str, promise: Promise, cells: Cells, where: Mapping[str, int | str]
) -> list[Check]:
    """RMS and largest error over what the gating rule allows, the worst cell of each."""
    rule = rules_of(promise)[cells.kind]
    note = f"{cells.count:,} cells by the rule {rule.name!r}"
    return [
        Check(AUDIT, subject, f"{cells.kind}, {what} over allowed", where, value, 1.0, note=note)
        for what, value in zip(("RMS", "largest"), cells.worst(rule), strict=True)
    ]


def check_whole(
    subject: str, promise: Promise, cells: Cells, where: Mapping[str, int | str]
) -> list[Check]:
    """The design's contract, and the bits where they are promised."""
    checks = []
    if promise.exact or (promise.bitwise and cells.kind == "states"):
        name = f"{cells.kind}, relative RMS"
        checks.append(Check(AUDIT, subject, name, where, cells.relative, CONTRACT))
    if promise.bitwise and cells.kind == "states":
        note = f"{cells.bits:,} of {cells.count:,} are the bits of single-token decoding"
        off = float(cells.count - cells.bits)
        checks.append(
            Check(AUDIT, subject, "states not bitwise native", where, off, 0.0, note=note)
        )
    return checks


def protocol_row(
    subject: str, split: str, promise: Promise, outputs: Cells, states: Cells
) -> dict[str, Any]:
    """One line of the table that stands beside LumoTree's."""
    rules = rules_of(promise)
    passed, cells = outputs.strict + states.strict, outputs.count + states.count
    return {
        "policy": subject,
        "split": split,
        "outputs bitwise": f"{outputs.bits:,} of {outputs.count:,}",
        "states bitwise": f"{states.bits:,} of {states.count:,}",
        "1.10 E_native rule": f"{passed:,} of {cells:,}",
        "gated by": " / ".join(rules[kind].name for kind in KINDS),
        "worst over gate": f"{max(outputs.worst(rules['outputs'])):.2f} / "
        f"{max(states.worst(rules['states'])):.2f}",
        "relative RMS": f"{outputs.relative:.1e} / {states.relative:.1e}",
    }


def paper_row() -> dict[str, Any]:
    """LumoTree's own counts."""
    return {
        "policy": PAPER,
        "split": "both",
        "outputs bitwise": "3,004 and 3,018 of 3,072",
        "states bitwise": "2,688 of 2,688 each",
        "1.10 E_native rule": "5,760 of 5,760 each",
        "gated by": "native / native",
        "worst over gate": "not printed",
        "relative RMS": "not printed",
    }


def _most(x: np.ndarray) -> float:
    """The largest, infinite if any is no number."""
    return float(np.where(np.isnan(x), np.inf, x).max())
