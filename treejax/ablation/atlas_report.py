"""How the atlas is shown: which policy is fastest where, and where pairs of them cross."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from treejax.ablation.base import NOT_RUN, Row
from treejax.ablation.lab_figures import draw_lines, draw_map
from treejax.ablation.lab_run import by_cell, hide_red, leading, pooled, shown

PLACE = ("nodes", "tree", "batch", "published")
COLUMNS = ("depth", "leaves", "branching", "model_mb", "model_ms", "copy_gb_per_s")


class Crossing(NamedTuple):
    """Where the faster of a pair changes along the nodes, at one form of tree, batch and path.

    ``nodes`` is interpolated on logarithms between the two neighbours that were measured.
    """

    first: str
    second: str
    tree: str
    batch: int
    published: str
    nodes: float
    between: tuple[int, int]
    before: str
    after: str


def cells_of(rows: Sequence[Row], longest: Mapping[tuple[int, str], int]) -> list[Row]:
    """One record an arm and place: pooled times, the model's, and whether it is the fastest there.

    ``path`` names the accepted length so that trees of all sizes can be compared: 1, 3, "deepest".

    Args:
      longest: rows of the longest path, by nodes and form of tree.
    """
    made: list[Row] = []
    for (arm, *place), mine in by_cell(hide_red(rows), PLACE).items():
        first = leading(mine)
        line: Row = {"arm": arm} | dict(zip(PLACE, place, strict=True))
        line |= {"gate": first["gate"], "problem": first["problem"]} | pooled(mine, "step_ms")
        line |= {name: first.get(name) for name in COLUMNS}
        made.append(line)
    for line in made:
        deepest = line["published"] == longest[line["nodes"], line["tree"]]
        line["path"] = "deepest" if deepest else str(line["published"])
    for line in made:
        there = [x["step_ms"] for x in made if _place(x) == _place(line) and x["step_ms"]]
        line["fastest"] = bool(there) and line["step_ms"] == min(there)
    return made


def _place(line: Row) -> tuple[Any, ...]:
    return tuple(line[name] for name in PLACE)


def crossings(lines: Sequence[Row]) -> Iterator[Crossing]:
    """All changes of the faster one, pair by pair."""
    arms = list(dict.fromkeys(line["arm"] for line in lines))
    times = {(x["arm"], x["tree"], x["batch"], x["path"], x["nodes"]): x["step_ms"] for x in lines}
    series = dict.fromkeys((x["tree"], x["batch"], x["path"]) for x in lines)
    sizes = sorted({line["nodes"] for line in lines})
    for first, second in combinations(arms, 2):
        for tree, batch, path in series:
            ratios = []
            for n in sizes:
                mine = times.get((first, tree, batch, path, n))
                other = times.get((second, tree, batch, path, n))
                if mine and other:
                    ratios.append((n, math.log(mine / other)))
            for (low, before), (high, after) in pairwise(ratios):
                if before * after >= 0:
                    continue
                part = before / (before - after)
                at = math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
                faster = (first, second) if before < 0 else (second, first)
                yield Crossing(
                    first, second, tree, batch, path, at, (low, high), faster[0], faster[1]
                )


def pair_tables(lines: Sequence[Row]) -> list[Table]:
    """Every pair over all trees, by batch; and the crossing points."""
    pairs = Table(title="times of the first by times of the second: median (range), cells won")
    batches = sorted({line["batch"] for line in lines})
    pairs.add_column("pair")
    for batch in batches:
        pairs.add_column(f"B={batch}", justify="right")
    arms = list(dict.fromkeys(line["arm"] for line in lines))
    times = {(line["arm"], *_place(line)): line["step_ms"] for line in lines}
    for first, second in combinations(arms, 2):
        texts = []
        for batch in batches:
            ratios = [
                value / times[second, *place]
                for (arm, *place), value in times.items()
                if arm == first and place[2] == batch and value and times.get((second, *place))
            ]
            texts.append(_ratios(ratios))
        pairs.add_row(f"{first} / {second}", *texts)
    table = Table(title="crossing points along the nodes")
    for name in ("faster below", "faster above", "tree", "batch", "published", "nodes", "between"):
        table.add_column(name, justify="left" if name[0] in "ft" else "right")
    for x in crossings(lines):
        between = f"{x.between[0]}-{x.between[1]}"
        where = x.tree, str(x.batch), x.published, shown(x.nodes, ".0f"), between
        table.add_row(x.before, x.after, *where)
    return [pairs, table]


def _ratios(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    won = sum(ratio < 1 for ratio in ratios)
    middle = statistics.median(ratios)
    return f"{middle:.2f} ({min(ratios):.2f}-{max(ratios):.2f}) {won}/{len(ratios)}"


def unfit_table(lines: Sequence[Row]) -> Table:
    """What could not run, by reason."""
    table = Table(title="not run")
    for name in ("arm", "nodes", "batch", "why"):
        table.add_column(name)
    unfit = [line for line in lines if line["gate"] == NOT_RUN]
    for arm, nodes, batch, why in dict.fromkeys(
        (line["arm"], line["nodes"], line["batch"], line["problem"]) for line in unfit
    ):
        table.add_row(arm, str(nodes), str(batch), why)
    return table


def draw(lines: Sequence[Row], arms: Sequence[str], out: Path) -> None:
    """The map of the fastest, and measured and modelled times by nodes."""
    best: dict[tuple[str, str], tuple[str, str]] = {}
    sizes, paths = sorted({x["nodes"] for x in lines}), dict.fromkeys(x["path"] for x in lines)
    trees = dict.fromkeys(line["tree"] for line in lines)
    batches = sorted({line["batch"] for line in lines})
    rows = [f"{tree}, publish {path}" for tree in trees for path in paths]
    columns = [f"B={batch}\nN={size}" for batch in batches for size in sizes]
    for line in lines:
        if line["fastest"]:
            row = f"{line['tree']}, publish {line['path']}"
            column = f"B={line['batch']}\nN={line['nodes']}"
            best[row, column] = (line["arm"], f"{line['arm']}\n{line['step_ms']:.3g}")
    rows = [row for row in rows if any(place[0] == row for place in best)]
    title = "fastest policy and its ms a step"
    draw_map(out / "atlas", rows, columns, list(arms), best, title)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        if line["tree"] == _most_common(lines) and line["path"] == "deepest" and line["step_ms"]:
            lines_of = panels.setdefault(f"{line['tree']}, B={line['batch']}: ms", {})
            lines_of.setdefault(line["arm"], []).append((line["nodes"], line["step_ms"]))
            if line["model_ms"]:
                modelled = lines_of.setdefault(f"{line['arm']}, bytes", [])
                modelled.append((line["nodes"], line["model_ms"]))
    draw_lines(out / "atlas_nodes", panels, "nodes")


def _most_common(lines: Sequence[Row]) -> str:
    """The form of tree with the most sizes: the one to show a curve of."""
    sizes: dict[str, set[int]] = {}
    for line in lines:
        sizes.setdefault(line["tree"], set()).add(line["nodes"])
    return max(sizes, key=lambda tree: len(sizes[tree]))
