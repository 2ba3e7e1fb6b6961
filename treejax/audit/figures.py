"""Figures of a report as SVG for a page that is read in light and in dark.

Lines and letters that only frame a figure take the colour of the text around them. Each figure is
one narrow panel, so that a phone shows it at a size that can be read.
"""

import dataclasses
import io
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from treejax.ablation.figures import can_draw, make_panels
from treejax.audit.base import Check, Report
from treejax.audit.report import used

COLOURS = ("#3b7dd8", "#d9822b", "#2a9d6f", "#b8569f", "#c94a4a", "#7a8794", "#8a6fd1", "#a8892c")
_MARKS = "osD^vPX*"
_INK = "#010203"  # what becomes the colour of the page's text
_LETTERS = 60  # that fit side by side below a figure
_FLOOR = 1e-4  # of a bound: less is drawn here


LONG = "long"  # the schedule whose cycles are counted in thousands


@dataclasses.dataclass(frozen=True)
class Figure:
    """A panel: its title, one sentence below it, and the SVG."""

    title: str
    caption: str
    svg: str


def figures(report: Report) -> list[Figure]:
    """All that the checks give; none without matplotlib."""
    if not can_draw():
        return []
    short = [check for check in report.checks if check.where.get("schedule") != LONG]
    long = [check for check in report.checks if check.where.get("schedule") == LONG]
    made = [
        by_place(short, "continuation", "cycle"),
        by_place(short, "continuation", "layer"),
        by_place(long, "continuation", "cycle", "of the long run"),
        by_place(short, "component", "layer"),
        p_values(report.checks),
    ]
    return [figure for figure in made if figure is not None]


def by_place(
    checks: Iterable[Check], audit: str, axis: str, what: str = "against its bound"
) -> Figure | None:
    """The largest share of its bound that each measure used up, by cycle or by layer.

    What must be exactly 0 has no share and is left out.
    """
    lines: dict[str, dict[int, float]] = {}
    for check in checks:
        where = check.where.get(axis)
        if check.audit == audit and check.bound > 0 and isinstance(where, int):
            line = lines.setdefault(check.name, {})
            line[where] = max(line.get(where, 0.0), used(check))
    if not lines:
        return None
    figure, axes = _panel()
    axes.axhline(1.0, color=_INK, lw=1.2, ls="--")
    axes.annotate(
        *("bound", (1.0, 1.0), (0, 2)),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=_INK,
    )
    top = max((v for line in lines.values() for v in line.values() if math.isfinite(v)), default=1)
    for at, (name, line) in enumerate(lines.items()):
        colour, mark = _look(at)
        x = sorted(line)
        y = [min(max(line[each], _FLOOR), 10 * max(top, 1.0)) for each in x]
        axes.plot(x, y, mark + "-", color=colour, ms=3.5, lw=1.2, label=name)
    axes.set(yscale="log", xlabel=axis, ylabel="error / bound")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.05), max(high, 3.0))
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    caption = "The worst of all subjects and prefixes"
    caption += f"; errors below {_FLOOR:g} of the bound are drawn there, 0 among them."
    title = f"Error {what} by {axis}, {audit}"
    return Figure(title, caption, _svg(figure, title))


def p_values(checks: Iterable[Check]) -> Figure | None:
    """p-values of the G-tests in order, against those of as many tests of a right sampler."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        if "G-test" in check.name and math.isfinite(check.value):
            groups.setdefault(check.name, []).append(check)
    if not groups:
        return None
    figure, axes = _panel()
    fewest = 0.5 / max(len(group) for group in groups.values())
    axes.plot([fewest / 2, 1], [fewest / 2, 1], color=_INK, lw=0.8, ls=":")
    for at, (name, group) in enumerate(groups.items()):
        colour, mark = _look(at)
        p = sorted(max(check.value, 1e-12) for check in group)
        expected = [(rank + 0.5) / len(p) for rank in range(len(p))]
        axes.plot(expected, p, mark, color=colour, ms=3.5, label=f"{name} ({len(p)})")
        axes.axhline(min(check.bound for check in group), color=colour, lw=1.0, ls="--")
    axes.set(xscale="log", yscale="log", xlabel="expected p", ylabel="p")
    _legend(figure, axes)
    caption = "Dotted: where a right sampler's p-values lie. Dashed: below it a test rejects."
    return Figure("p-values of the G-tests", caption, _svg(figure, "p-values"))


def _look(at: int) -> tuple[str, str]:
    return COLOURS[at % len(COLOURS)], _MARKS[at % len(_MARKS)]


def _panel() -> tuple[Any, Any]:
    figure, (axes,) = make_panels(1, 4.4, 3.4)
    axes.tick_params(colors=_INK, which="both", labelsize=8)
    axes.grid(color=_INK, alpha=0.12, lw=0.6)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=_INK, fontsize=9)
    return figure, axes


def _legend(figure: Any, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    columns = min(len(names), 3, max(1, _LETTERS // (6 + max(map(len, names)))))
    place: Mapping[str, Any] = {"loc": "outside lower center", "ncols": columns}
    figure.legend(handles, names, frameon=False, fontsize=8, labelcolor=_INK, **place)


def _svg(figure: Any, salt: str) -> str:
    """The drawing without what belongs to a file; the same bytes for the same numbers."""
    import matplotlib

    settings: Any = {"svg.hashsalt": salt, "svg.fonttype": "none"}  # ids that no other figure has
    buffer = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the same names in every figure, and no use
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return text[text.index("<svg") :].replace(_INK, "currentColor")
