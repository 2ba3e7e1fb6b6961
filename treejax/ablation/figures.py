"""Figures of experiments: PNG to look at, SVG to print; matplotlib is optional."""

import importlib.util
import io
from pathlib import Path
from typing import Any

HINT = "no figures: matplotlib is not installed (pip install 'treejax[notebooks]')"


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def make_panels(columns: int, width: float, height: float, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure (inches) and its axes row by row. Nothing of pyplot: no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_ranges(
    axes: Any,
    names: list[str],
    values: list[float],
    ranges: list[tuple[float, float]],
    label: str,
) -> None:
    """Horizontal bars with their ranges, the first name on top, the number at each bar."""
    low = [value - span[0] for value, span in zip(values, ranges, strict=True)]
    high = [span[1] - value for value, span in zip(values, ranges, strict=True)]
    places = range(len(names))
    axes.barh(places, values, xerr=(low, high), color="#4269d0", height=0.65, ecolor="#555555")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    for place, value, span in zip(places, values, ranges, strict=True):
        axes.text(span[1], place, f" {readable(value)}", va="center", fontsize=8)
    axes.margins(x=0.12)


def readable(value: float) -> str:
    """Three digits, and large numbers whole."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def save(figure: Any, out: Path, name: str) -> None:
    """``name``.png and ``name``.svg, the same bytes for the same numbers.

    The PNG has a palette: flat colours and text need no more, and it is a third as large.
    """
    import matplotlib
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    image = Image.open(buffer).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(out / f"{name}.png", optimize=True)
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(out / f"{name}.svg", metadata={"Date": None})
