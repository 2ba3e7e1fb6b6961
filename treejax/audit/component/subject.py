"""A policy on its way through the component audit."""

import contextlib
import dataclasses
from typing import Any

from treejax.audit.base import Check, Where
from treejax.audit.component.rig import Rig
from treejax.audit.component.rules import Promise
from treejax.audit.component.tally import AUDIT
from treejax.audit.raised import RAISED, guarded


@dataclasses.dataclass(frozen=True)
class Subject:
    """One policy under audit: its programs, what gates, what has been found."""

    label: str
    rig: Rig
    promise: Promise
    checks: list[Check] = dataclasses.field(default_factory=list)
    protocol: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    controls: dict[str, Any] = dataclasses.field(default_factory=dict)
    digests: list[list[str]] = dataclasses.field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether nothing of it has raised; what has is not run again."""
        return all(check.name != RAISED for check in self.checks)

    def guarded(self, where: Where) -> contextlib.AbstractContextManager[None]:
        """What the policy raises inside is a failed check."""
        return guarded(AUDIT, self.label, where, self.checks)

    def add(self, name: str, where: dict[str, int | str], wrong: float, note: str = "") -> None:
        """A count that must be 0."""
        self.checks.append(Check(AUDIT, self.label, name, where, float(wrong), 0.0, note=note))
