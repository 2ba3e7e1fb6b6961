"""What a report says first, as data; ``text`` and ``page`` show it.

Nothing here decides anything: a verdict is the report's own, and every number was a check's.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from treejax.audit.base import Check, Report

POWER = "detection power"  # what checks of planted faults measure
MOST_SHOWN = 20  # failed checks of a kind that are shown one by one; report.json has them all
_MOST_COLUMNS = 10


@dataclasses.dataclass(frozen=True)
class Line:
    """All checks of one audit that measured the same thing.

    Attributes:
      audit, name: theirs.
      count, failed: how many there are, and how many are red.
      worst: the one that is nearest to its bound, or furthest past it.
    """

    audit: str
    name: str
    count: int
    failed: int
    worst: Check

    def row(self) -> dict[str, Any]:
        worst = self.worst
        sign = "at least" if worst.at_least else "at most"
        return {
            "audit": self.audit,
            "what": self.name,
            "checks": self.count,
            "failed": self.failed,
            "worst": worst.value,
            "bound": f"{sign} {show(worst.bound)}",
            "of its bound": part_of_bound(worst),
            "of": worst.subject,
            "where": place(worst),
        }


def used(check: Check) -> float:
    """How much of its bound a check uses up: 0 nothing, 1 all of it, above 1 it failed.

    A number that is not finite has used infinitely much.
    """
    value, bound = check.value, check.bound
    if not math.isfinite(value):
        return math.inf
    if check.at_least:
        if value >= bound and bound <= 0:
            return 0.0
        return bound / value if value > 0 else math.inf
    if value <= 0 <= bound:
        return 0.0
    return value / bound if bound > 0 else math.inf


def part_of_bound(check: Check) -> str:
    """How near a number came to its bound, where there is nearer and further."""
    if not check.green:
        return share(used(check))
    if check.at_least:
        return ""  # a share or a p-value, which says it by itself
    return "exact" if check.bound == 0 else share(used(check))


def nearest(checks: Iterable[Check]) -> Check:
    """The check to worry about: one that failed, else the one that has used most of its bound.

    Those that are exact, and shares that cannot be larger, come last.
    """
    return max(checks, key=lambda c: (not c.green, not c.at_least or c.bound < 0.5, used(c)))


def tightness(report: Report) -> tuple[str, float] | None:
    """The surface on which the envelope is least tight, and how many times its largest bound fits
    into LumoTree's; None without an envelope."""
    titles = "envelope", "envelope of long runs"
    rows = [row for title, table in report.tables if title in titles for row in table]
    ratios = {
        str(row["surface"]): float(row["LumoTree"]) / float(row["largest bound"])
        for row in rows
        if row.get("LumoTree") and row.get("largest bound")
    }
    return min(ratios.items(), key=lambda pair: pair[1]) if ratios else None


def lines(report: Report) -> list[Line]:
    """One line for everything that was measured, in the order of the checks."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in report.checks:
        groups.setdefault((check.audit, check.name), []).append(check)
    return [
        Line(audit, name, len(checks), sum(not c.green for c in checks), max(checks, key=_badness))
        for (audit, name), checks in groups.items()
    ]


def _badness(check: Check) -> tuple[bool, float]:
    return not check.green, used(check)


@dataclasses.dataclass(frozen=True)
class Planted:
    """A row of the fault matrix: in how many of the places where it struck a fault was caught.

    Attributes:
      fault: its name; says: what goes wrong.
      caught: by what it was planted in, the share of seeds.
    """

    fault: str
    says: str
    caught: dict[str, Check]


def fault_matrix(report: Report) -> list[Planted]:
    """Detection power of every planted fault, in the order of the checks.

    What a fault was planted in is the part of a check's subject before " with ", the fault the
    part after it; a subject without that is the fault itself.
    """
    rows: dict[str, Planted] = {}
    for check in report.checks:
        if check.name == POWER:
            where, joint, fault = check.subject.partition(" with ")
            fault, where = (fault, where) if joint else (where, check.audit)
            rows.setdefault(fault, Planted(fault, check.note, {})).caught[where] = check
    return list(rows.values())


def verdict(report: Report) -> str:
    """One line: green or red, of how many checks."""
    if not report.checks:
        return "RED: nothing was checked, and that proves nothing"
    audits = ", ".join(dict.fromkeys(check.audit for check in report.checks))
    count, failed = f"{len(report.checks):,}", len(report.red)
    if report.green:
        return f"GREEN: all {count} checks of {audits} passed"
    return f"RED: {failed:,} of {count} checks of {audits} failed"


def headline(report: Report) -> str:
    """``verdict``, and how near to its bound the nearest check came or which is the worst."""
    said = verdict(report)
    if not report.checks:
        return said
    worst = nearest(report.checks)
    if not worst.green:
        return f"{said}, the worst: {worst.name} ({worst.subject})"
    part = used(worst)
    return f"{said}, the nearest at {share(part)} of its bound" if part else f"{said}, all exactly"


def failed_kinds(report: Report) -> list[list[Check]]:
    """Failed checks that measured the same of the same subject, the worst first."""
    kinds: dict[tuple[str, str, str], list[Check]] = {}
    for check in report.red:
        kinds.setdefault((check.audit, check.subject, check.name), []).append(check)
    return [sorted(checks, key=used, reverse=True) for checks in kinds.values()]


def place(check: Check) -> str:
    """Where a check's number comes from."""
    return ", ".join(f"{name} {value}" for name, value in check.where.items())


def show(value: Any) -> str:
    """One cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return f"{value:.3g}" if abs(value) < 1000 or not math.isfinite(value) else f"{value:.3e}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {show(each)}" for name, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(show(each) for each in value)
    return str(value)


def share(part: float) -> str:
    """A part of a bound."""
    if not math.isfinite(part):
        return "beyond"
    if 0 < part < 0.01:
        return "< 1 %"
    return f"{100 * part:.0f} %" if part < 10 else f"{part:.3g} x"


def tight_text(surface: str, times: float) -> str:
    return f"bounds at least {times:,.0f} times below LumoTree's (least on {surface})"


def is_number(value: Any) -> bool:
    """Whether a cell stands to the right."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def shaped(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Few rows of many columns as many rows of few columns: a screen is narrow."""
    names = list(rows[0])[1:]
    if len(names) < _MOST_COLUMNS or len(rows) >= len(names):
        return [dict(row) for row in rows]
    return turned(rows)


def turned(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as columns, under what the first column says of each."""
    first, *names = rows[0]
    heads = [show(row[first]) for row in rows]
    if len(set(heads)) < len(heads):
        heads = [f"{head} ({at})" for at, head in enumerate(heads, 1)]
    cells = [[row[name] for row in rows] for name in names]
    return [
        {first: name, **dict(zip(heads, line, strict=True))}
        for name, line in zip(names, cells, strict=True)
    ]


def as_json(report: Report) -> str:
    """The report as JSON of the standard: numbers that are not finite are texts."""
    return json.dumps(_plain(report.as_json()), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence | set | frozenset):
        return [_plain(each) for each in value]
    return str(value)
