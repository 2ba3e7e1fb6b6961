"""Kinds of figures that the laboratory's experiments share, drawn with ``figures``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treejax.ablation.figures import can_draw, make_panels, save

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by the name of their line."""

INK = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")


def draw_bars(path: Path, names: Sequence[str], panels: Mapping[str, Sequence[float]]) -> None:
    """Horizontal bars on log scales, a panel a measure, the number at each bar."""
    if not names or not can_draw():
        return
    figure, axes = make_panels(len(panels), 4.6 * len(panels), 0.9 + 0.28 * len(names))
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        low = min(value for value in values if value > 0)
        rows = range(len(names))
        axis.barh(rows, values, color=INK[0], left=0, height=0.65)
        axis.set(xscale="log", title=title, xlim=(low / 2, max(values) * 4))
        axis.set_yticks(rows, names)
        axis.invert_yaxis()
        for row, value in zip(rows, values, strict=True):
            axis.text(value, row, f" {value:.3g}", va="center", fontsize=8)
    save(figure, path.parent, path.name)


def draw_lines(
    path: Path, panels: Mapping[str, Lines], x_label: str, log: tuple[bool, bool] = (True, True)
) -> None:
    """Lines with points, a panel a measure; one legend.

    A line named "NAME, more" is dashed, in the colour of NAME.
    """
    if not panels or not can_draw():
        return
    figure, axes = make_panels(len(panels), 4.6 * len(panels), 3.6)
    heads = [name.partition(", ")[0] for lines in panels.values() for name in lines]
    names = list(dict.fromkeys(heads))
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            x, y = zip(*sorted(points), strict=True)
            head, _, more = name.partition(", ")
            colour, style = INK[names.index(head) % len(INK)], "--" if more else "o-"
            axis.plot(x, y, style, color=colour, label=name, ms=4)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axis.set(title=title, xlabel=x_label)
        axis.set_xscale("log" if log[0] else "linear")
        axis.set_yscale("log" if log[1] else "linear")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.xaxis.set_minor_locator(_null_locator())
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, path.parent, path.name)


def draw_map(
    path: Path,
    rows: Sequence[str],
    columns: Sequence[str],
    names: Sequence[str],
    best: Mapping[tuple[str, str], tuple[str, str]],
    title: str,
) -> None:
    """Which name is best in each (row, column): a colour each, with a short text in the cell."""
    if not best or not can_draw():
        return
    figure, (axis,) = make_panels(1, 1.6 + 0.95 * len(columns), 1.2 + 0.3 * len(rows))
    for (row, column), (name, text) in best.items():
        x, y = columns.index(column), rows.index(row)
        colour = INK[list(names).index(name) % len(INK)]
        axis.add_patch(_square(x, y, colour))
        axis.text(x, y, text, ha="center", va="center", fontsize=7)
    axis.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), title=title)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    save(figure, path.parent, path.name)


def _null_locator() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _square(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, alpha=0.55, lw=0)
