"""A report as text: the verdict first and last, what failed in full, what passed in few lines.

A line of ``report.txt`` has at most 100 columns.
"""

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from treejax.audit.base import Report
from treejax.audit.report import (
    MOST_SHOWN,
    Line,
    as_json,
    failed_kinds,
    headline,
    is_number,
    lines,
    nearest,
    part_of_bound,
    show,
    tight_text,
    tightness,
    turned,
)

WIDTH = 100
_MOST_ROWS = 60  # of a table; report.json has them all
_WIDE = 10_000  # columns that any table fits into
_WORD = 14  # a word of so many columns is not folded

Rows = Sequence[Mapping[str, Any]]


def write_text(report: Report, console: Console) -> None:
    """The whole report: verdict, what failed, who was audited, worst numbers, tables, what is not
    covered, and the verdict again."""

    def say(text: str = "", indent: int = 0) -> None:
        made = textwrap.wrap(
            *(text, console.width),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in made or [""]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    say(headline(report), indent=2)
    for text in _failed(report):
        say(text, indent=8)
    say()
    for name, value in _facts(report):
        say(f"{name + ':':<16}{value}", indent=16)
    tables = [("checks", checks_table(lines(report))), *report.tables]
    for title, rows in tables:
        if rows:
            caption, kept = lifted(rows)
            say()
            say(f"{title} ({caption})" if caption else title)
            console.print(fitting(kept[:_MOST_ROWS], console))
            if len(kept) > _MOST_ROWS:
                say(f"and {len(kept) - _MOST_ROWS:,} rows more, all of which report.json has")
    missing = report.facts.get("not audited", ())
    say()
    if missing:
        say("Not audited:")
    for line in missing:
        say(f"  {line}", indent=4)
    say(headline(report), indent=2)


def _failed(report: Report) -> Iterable[str]:
    """Every kind of failure, its checks in full."""
    for checks in failed_kinds(report):
        yield from (f"failed: {check}" for check in checks[:MOST_SHOWN])
        if len(checks) > MOST_SHOWN:
            more = len(checks) - MOST_SHOWN
            yield f"and {more:,} more of this kind, all of which report.json names"


def _facts(report: Report) -> Iterable[tuple[str, str]]:
    """What a reader wants to know first: name and text."""
    for name, value in report.facts.get("audited", {}).items():
        yield name, show(value)
    tight = tightness(report)
    if tight is not None:
        yield "envelope", tight_text(*tight)
    if report.green:
        yield "nearest", str(nearest(report.checks))


def checks_table(found: Sequence[Line]) -> list[dict[str, Any]]:
    """A row for everything that was measured; for what is equally green one row together."""
    groups: dict[Any, list[Line]] = {}
    for at, line in enumerate(found):
        worst = line.worst
        key: Any = at  # by itself
        if not line.failed:
            key = line.audit, worst.value, worst.bound, worst.at_least
        groups.setdefault(key, []).append(line)
    failed = any(line.failed for line in found)
    return [_checks_row(group, failed) for group in groups.values()]


def _checks_row(group: Sequence[Line], failed: bool) -> dict[str, Any]:
    worst = group[0].worst
    row = {
        "audit": worst.audit,
        "what": _together([line.name for line in group]),
        "checks": sum(line.count for line in group),
    }
    if failed:
        row["failed"] = sum(line.failed for line in group)
    return row | {
        "worst": worst.value,
        "bound": f"at {'least' if worst.at_least else 'most'} {show(worst.bound)}",
        "of its bound": part_of_bound(worst),
    }


def _together(names: Sequence[str]) -> str:
    """Names in one line; what stands before a colon is said once."""
    heads: dict[str, list[str]] = {}
    for name in names:
        head, _, rest = name.partition(": ")
        heads.setdefault(head, []).append(rest)
    return "; ".join(
        f"{head}: {', '.join(rests)}" if any(rests) else head for head, rests in heads.items()
    )


def lifted(rows: Rows) -> tuple[str, Rows]:
    """What is the same in all rows, as one text, and the rows without it."""
    first, names = rows[0], dict.fromkeys(name for row in rows for name in row)
    same = [name for name in names if len({show(row.get(name)) for row in rows}) == 1]
    kept = [name for name in names if name not in same]
    if len(rows) < 2 or len(kept) < 2:
        return "", [{name: row.get(name) for name in names} for row in rows]
    said = ", ".join(f"{name} {show(first[name])}" for name in same if show(first[name]))
    return said, [{name: row.get(name) for name in kept} for row in rows]


def fitting(rows: Rows, console: Console) -> Table:
    """The table; turned, if that makes it fit the width."""
    table = make_table(rows)
    if len(rows) < len(rows[0]) and _natural(table, console) > console.width:
        other = make_table(turned(rows))
        return other if _natural(other, console) <= console.width else table
    return table


def _natural(table: Table, console: Console) -> int:
    """Columns that a table takes where nothing is folded."""
    return Measurement.get(console, console.options.update(max_width=_WIDE), table).maximum


def make_table(rows: Rows) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, value in rows[0].items():
        side = "right" if is_number(value) else "left"
        words = " ".join([name, *(show(row[name]) for row in rows)]).split()
        longest = min(max(map(len, words), default=0), _WORD)
        table.add_column(name, justify=side, overflow="fold", min_width=longest)
    for row in rows:
        table.add_row(*(show(value) for value in row.values()))
    return table


def as_text(report: Report) -> str:
    """The report as it stands in report.txt."""
    file = io.StringIO()
    write_text(report, Console(file=file, width=WIDTH))
    return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


def save(report: Report, folder: str | Path, page: str) -> None:
    """report.txt, report.json and report.html (``page``) in a folder, which is made."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"report.txt": as_text(report), "report.json": as_json(report), "report.html": page}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
