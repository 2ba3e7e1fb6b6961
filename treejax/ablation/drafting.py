"""Drafters by budget: what is accepted, how many nodes it takes, how long a step is.

A request replay (``requests``) whose arms fill trees of growing size; the tables turn arms into
rows by drafter and columns by budget. Every generation is held against plain decoding, so that a
figure is never that of a broken state.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from treejax.ablation.base import Row
from treejax.ablation.lab_figures import draw_lines
from treejax.ablation.requests import Requests
from treejax.ablation.requests_report import summarise
from treejax.ablation.serving import PLAIN

BUDGETS = (3, 7, 15, 27, 63)
"""Candidates a step at most, the columns of the tables: the largest tree at or below each."""

TABLES = (
    ("acceptance length", "acceptance_length", ".2f"),
    ("nodes a step", "nodes_a_step", ".3g"),
    ("ms a step", "ms_a_step", ".3g"),
    ("times plain's tokens a second", "times_plain", ".2f"),
)


class Drafting(Requests):
    """The experiment ``drafting``."""

    name: ClassVar[str] = "drafting"

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Records of ``requests``, with what a step took and proposed, and the drafter's label."""
        made = []
        for record in summarise(rows, [arm.name for arm in self.arms()]):
            group = record["corpus"], record["mode"], record["arm"]
            mine = [r for r in rows if (r["corpus"], r["mode"], r["arm"]) == group]
            mine = [r for r in mine if r.get("steps")]
            if record.get("steps"):
                seconds = sorted(r["decode_s"] / r["steps"] for r in mine)
                proposed, steps = (sum(r[name] for r in mine) for name in ("proposed", "steps"))
                record["ms_a_step"] = 1e3 * seconds[len(seconds) // 2]
                record["nodes_a_step"] = proposed / steps  # of all repeats: they may differ
            made.append(record | {"label": label_of(record["arm"])})
        return made

    def tables(self, rows: Sequence[Row]) -> list[Any]:
        records = self.summary(rows)
        made = list(super().tables(rows))
        for corpus, mode in dict.fromkeys((r["corpus"], r["mode"]) for r in records):
            mine = [r for r in records if (r["corpus"], r["mode"]) == (corpus, mode)]
            made += [_table(mine, f"{title}: {corpus}, {mode}", *how) for title, *how in TABLES]
        return made

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        super().figures(rows, out)
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for record in self.summary(rows):
            for title, name, _ in (TABLES[0], TABLES[3]):
                if record.get(name) is not None and record["nodes"]:
                    lines = panels.setdefault(f"{title}, {record['mode']}", {})
                    lines.setdefault(record["label"], []).append((record["nodes"], record[name]))
        draw_lines(out / "drafting", panels, "candidates", log=(True, False))


def label_of(arm: str) -> str:
    """What arms of one drafter share: its name and settings, and the form of its trees."""
    if arm == PLAIN:
        return PLAIN
    _, _, draft = arm.partition("/")
    drafter, _, tree = draft.partition(":")
    named = re.match("[a-z]+", tree)
    form = named[0] if named else "widths"
    return f"{drafter} {form}" if tree else drafter


def column_of(nodes: int) -> int | None:
    """The smallest budget that ``nodes`` candidates stay within."""
    return next((budget for budget in BUDGETS if nodes <= budget), None)


def _table(records: Sequence[Row], title: str, name: str, form: str) -> Table:
    table = Table(title=title)
    table.add_column("drafter", no_wrap=True)
    for budget in BUDGETS:
        table.add_column(str(budget), justify="right")
    for label in dict.fromkeys(r["label"] for r in records if r["label"] != PLAIN):
        cells = {b: "-" for b in BUDGETS}
        of_label = [r for r in records if r["label"] == label and r["nodes"]]
        for record in sorted(of_label, key=lambda r: r["nodes"]):  # of a column the largest stays
            column = column_of(record["nodes"])
            if column is not None and record.get(name) is not None:
                other = "" if record["nodes"] == column else f" ({record['nodes']})"
                cells[column] = format(record[name], form) + other
        table.add_row(label, *cells.values())
    return table
