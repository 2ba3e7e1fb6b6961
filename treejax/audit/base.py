"""What every audit gives: checks with their bounds, gathered in a report.

A check is one number that was held against one bound. A report is green if all its checks are; it
keeps what it was made with, so that it can be read without the run that made it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Where = Mapping[str, int | str]


@dataclasses.dataclass(frozen=True)
class Check:
    """One number held against its bound.

    Attributes:
      audit: "component", "continuation" or "sampler".
      subject: what was audited, e.g. "wy/mtp:chain3".
      name: what was measured, e.g. "R" or "joint G-test".
      where: place of the number: layer, cycle, prefix, seed; whatever applies.
      value, bound: the number, and what it may be at most (``at_least`` false) or at least.
      note: what a reader should know, in one line.
    """

    audit: str
    subject: str
    name: str
    where: Where
    value: float
    bound: float
    at_least: bool = False
    note: str = ""

    @property
    def green(self) -> bool:
        """A number that is not finite never passes."""
        passes = self.value >= self.bound if self.at_least else self.value <= self.bound
        return bool(passes) and abs(self.value) != float("inf")

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value}" for name, value in self.where.items())
        sign = "at least" if self.at_least else "at most"
        note = f" ({self.note})" if self.note else ""
        text = f"{self.audit} {self.subject}: {self.name} {self.value:.3g}, {sign} {self.bound:.3g}"
        return f"{text} [{place}]{note}" if place else text + note


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """Checks of one or more audits.

    Attributes:
      checks: in the order in which they were made.
      tables: what a reader looks at first: a title, and rows of equal columns.
      facts: settings, environment, where the envelope came from; JSON-able.
    """

    checks: tuple[Check, ...]
    tables: tuple[tuple[str, tuple[Mapping[str, Any], ...]], ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def green(self) -> bool:
        """Whether every check passed; a report without checks proves nothing and is red."""
        return bool(self.checks) and all(check.green for check in self.checks)

    @property
    def red(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if not check.green]

    @classmethod
    def joined(cls, reports: Iterable["Report"]) -> "Report":
        """Several reports as one."""
        reports = tuple(reports)
        facts: dict[str, Any] = {}
        for report in reports:
            facts |= report.facts
        return cls(
            checks=tuple(check for report in reports for check in report.checks),
            tables=tuple(table for report in reports for table in report.tables),
            facts=facts,
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {
            "green": self.green,
            "checks": [{**dataclasses.asdict(c), "green": c.green} for c in self.checks],
            "tables": [{"title": title, "rows": list(rows)} for title, rows in self.tables],
            "facts": dict(self.facts),
        }

    def save(self, folder: str | Path) -> None:
        """Write report.txt, report.json and report.html into a folder, which is made."""
        from treejax.audit import page, text  # both read this module

        text.save(self, folder, page.page(self))

    def __str__(self) -> str:
        """The report as text."""
        from treejax.audit import text

        return text.as_text(self)

    def __repr__(self) -> str:
        """One line: a report may hold thousands of checks."""
        from treejax.audit import report

        return f"<{report.verdict(self)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict and a short table."""
        from treejax.audit import page

        return page.short(self)
