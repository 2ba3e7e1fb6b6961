"""Kinds of figures that the laboratory's experiments share, drawn with ``figures``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treejax.ablation.figures import can_draw, make_panels, readable, save

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by the name of their line."""

Dots = Mapping[str, Sequence[tuple[float, float, float] | None]]
"""By series, a point for each name: value, low and high of its range; None where there is none."""

INK = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
MARKS = "osD^vPX*"


class Best(NamedTuple):
    """A cell of a map: the name that is best there, by how much (a share), and what is written."""

    name: str
    lead: float
    text: str


class Map(NamedTuple):
    """One panel. ``planned`` are the (row, column) that belong to the map, measured or not, in the
    order of rows."""

    cells: Mapping[tuple[str, str], Best]
    planned: Sequence[tuple[str, str]]


CLOSE = 0.05
"""A lead below this is drawn pale: medians of few samples differ by as much."""


def draw_dots(path: Path, names: Sequence[str], panels: Mapping[str, Dots]) -> None:
    """A row a name, a panel a measure on a log scale, each series a mark with its range.

    The numbers beside a row's last mark are those of the last series.
    """
    if not names or not can_draw():
        return
    figure, axes = make_panels(len(panels), 2.2 + 3.4 * len(panels), 1.5 + 0.26 * len(names))
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        ends = [
            max((point[2] for point in row if point), default=0.0)
            for row in zip(*series.values(), strict=True)
        ]
        for at, (name, points) in enumerate(series.items()):
            there = [(row, *point) for row, point in enumerate(points) if point and point[0] > 0]
            if not there:
                continue
            rows, values, low, high = zip(*there, strict=True)
            axis.hlines(rows, low, high, color=INK[at], lw=3, alpha=0.35)
            last = at == len(series) - 1
            label = f"{name} (number)" if last else name
            axis.plot(values, rows, MARKS[at], color=INK[at], label=label, ms=5)
            if last:
                for row, value, _, _ in there:
                    axis.annotate(
                        readable(value),
                        *((ends[row], row), (6, 0)),
                        textcoords="offset points",
                        va="center",
                        fontsize=7,
                        color="#333333",
                    )
        axis.set(title=title, xscale="log", ylim=(len(names) - 0.5, -0.5))
        axis.margins(x=0.2)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        _plain(axis.xaxis)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07))
    save(figure, path.parent, path.name)


def draw_lines(
    path: Path,
    panels: Mapping[str, Lines],
    x_label: str,
    title: str = "",
    log: tuple[bool, bool] = (True, True),
) -> None:
    """Lines with points, a panel a measure; one legend below.

    A line named "NAME, more" is dashed, in the colour of NAME. Where lines lie on each other, the
    marks of the first ones are larger, so that all of them are seen.
    """
    if not panels or not can_draw():
        return
    figure, axes = make_panels(len(panels), 3.6 * len(panels), 4.2)
    heads = [name.partition(", ")[0] for lines in panels.values() for name in lines]
    names = list(dict.fromkeys(heads))
    keys: dict[str, Any] = {}
    for axis, (measure, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            x, y = zip(*sorted(points), strict=True)
            head, _, more = name.partition(", ")
            at = names.index(head)
            look = {"color": INK[at % len(INK)], "lw": 1.2}
            if more:
                keys.setdefault(more, axis.plot(x, y, "--", **look)[0])
            else:
                mark = f"{MARKS[at % len(MARKS)]}-"
                drawn = axis.plot(x, y, mark, ms=max(3.0, 8.0 - 0.8 * at), **look)
                keys.setdefault(head, drawn[0])
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axis.set(title=measure, xlabel=x_label)
        axis.set_xscale("log" if log[0] else "linear")
        if log[1]:
            axis.set_yscale("log")
            _plain(axis.yaxis)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.tick_params(labelsize=8)
        axis.xaxis.set_minor_locator(_null_locator())
        axis.grid(alpha=0.25)
    dashed = [name for name in keys if name not in names]
    shown = [name for name in names if name in keys] + dashed
    figure.legend(
        *([keys[name] for name in shown], [f"dashed: {n}" if n in dashed else n for n in shown]),
        loc="outside lower center",
        ncols=min(len(shown), 3 * len(panels), 8),
        frameon=False,
        fontsize=8,
    )
    if title:
        figure.suptitle(title, fontsize=11)
    save(figure, path.parent, path.name)


def draw_map(
    path: Path,
    panels: Mapping[str, Map],
    names: Sequence[str],
    labels: tuple[str, str],
    title: str,
) -> None:
    """Which name is best at each (row, column): a colour each, a panel each, two side by side.

    Pale where the lead is below ``CLOSE``; hatched where nothing was measured; white where the
    map has no place. Rows and columns are the same in all panels; columns are numbers, in order.

    Args:
      labels: of columns and of rows.
    """
    if not any(panel.cells for panel in panels.values()) or not can_draw():
        return
    places = dict.fromkeys(place for panel in panels.values() for place in panel.planned)
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = sorted(dict.fromkeys(column for _, column in places), key=float)
    high = -(-len(panels) // 2)
    size = 2 * (0.3 + 0.74 * len(columns)) + 1.4, high * (0.8 + 0.31 * len(rows)) + 0.9
    figure, axes = make_panels(2, *size, rows=high)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for at, (axis, (head, panel)) in enumerate(zip(axes, panels.items(), strict=False)):
        for row, column in panel.planned:
            x, y = columns.index(column), rows.index(row)
            best = panel.cells.get((row, column))
            if best is None:
                axis.add_patch(_square(x, y, fill=False, hatch="////", ec="#cccccc"))
                continue
            colour = INK[list(names).index(best.name) % len(INK)]
            alpha = 0.25 if best.lead < CLOSE else 0.7
            axis.add_patch(_square(x, y, color=colour, alpha=alpha))
            axis.text(x, y, best.text, ha="center", va="center", fontsize=7, linespacing=1.0)
        axis.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axis.set_title(head, fontsize=10)
        axis.set_xlabel(labels[0], fontsize=9)
        axis.set_xticks(range(len(columns)), columns, fontsize=9)
        axis.set_yticks(range(len(rows)), [""] * len(rows) if at % 2 else rows, fontsize=9)
        axis.set_ylabel("" if at % 2 else labels[1], fontsize=9)
    used = [n for n in names if any(b.name == n for p in panels.values() for b in p.cells.values())]
    keys = [_square(0, 0, color=INK[list(names).index(n) % len(INK)], alpha=0.7) for n in used]
    keys += [_square(0, 0, color="#888888", alpha=0.25), _square(0, 0, fill=False, hatch="////")]
    texts = [*used, f"pale: the second is within {CLOSE:.0%}", "not measured"]
    figure.legend(
        keys, texts, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=11)
    save(figure, path.parent, path.name)


def _plain(axis: Any) -> None:
    """Log ticks at 1, 2 and 5, as plain numbers; at the decades alone where there are many, and at
    every digit within one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    wide = high / max(low, 1e-300) > 1e3
    narrow = high / max(low, 1e-300) < 10
    steps = (1.0,) if wide else tuple(range(1, 10)) if narrow else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:.6g}"))
    axis.set_minor_formatter(NullFormatter())


def _null_locator() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _square(x: float, y: float, **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, lw=0, **look)
