"""How the atlas is shown: which policy is fastest where, and where pairs of them cross."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from treejax.ablation.base import NOT_RUN, Row
from treejax.ablation.lab_figures import Best, Map, draw_lines, draw_map
from treejax.ablation.lab_run import by_cell, hide_red, leading, pooled, shown

PLACE = ("nodes", "tree", "batch", "published")
COLUMNS = ("depth", "leaves", "branching", "model_mb", "model_ms", "copy_gb_per_s")
DEEPEST = "deepest"
"""The longest path of a tree, whatever its length."""
MODELLED = "bytes of the model at a copy's bandwidth"


class Place(NamedTuple):
    """Where all arms are compared; ``path`` is the published rows, or ``DEEPEST``."""

    nodes: int
    tree: str
    batch: int
    path: str


class Crossing(NamedTuple):
    """Where the faster of a pair changes along the nodes, at one form of tree, batch and path.

    ``nodes`` is interpolated on logarithms between the two neighbours that were measured, and
    ``ratios`` are the first's time by the second's at these: near 1, the point is not sharp.
    """

    first: str
    second: str
    tree: str
    batch: int
    published: str
    nodes: float
    between: tuple[int, int]
    ratios: tuple[float, float]
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
        line["path"] = path_name(line["published"], longest[line["nodes"], line["tree"]])
    for line in made:
        there = [x["step_ms"] for x in made if _place(x) == _place(line) and x["step_ms"]]
        line["fastest"] = bool(there) and line["step_ms"] == min(there)
    return made


def path_name(published: int, longest: int) -> str:
    return DEEPEST if published == longest else str(published)


def _place(line: Row) -> tuple[Any, ...]:
    return tuple(line[name] for name in PLACE)


def crossings(lines: Sequence[Row]) -> Iterator[Crossing]:
    """All changes of the faster one, by pair and batch."""
    arms = list(dict.fromkeys(line["arm"] for line in lines))
    times = {(x["arm"], x["tree"], x["batch"], x["path"], x["nodes"]): x["step_ms"] for x in lines}
    found = dict.fromkeys((x["tree"], x["batch"], x["path"]) for x in lines)
    series = sorted(found, key=lambda place: place[1])
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
                place = first, second, tree, batch, path, at, (low, high)
                yield Crossing(*place, (math.exp(before), math.exp(after)), *faster)


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
    heads = "faster below|faster above|tree|batch|published|nodes|between|times there"
    for name in heads.split("|"):
        table.add_column(name, justify="left" if name[0] in "ft" else "right")
    for x in crossings(lines):
        between = f"{x.between[0]}-{x.between[1]}"
        ratios = f"{min(x.ratios):.2f}-{max(x.ratios):.2f}"
        where = x.tree, str(x.batch), x.published, shown(x.nodes, ".0f"), between, ratios
        table.add_row(x.before, x.after, *where)
    return [pairs, table, model_table(lines)]


def model_ratios(lines: Sequence[Row]) -> list[Row]:
    """Measured by modelled times of every arm and batch, over its trees: median and range."""
    made: list[Row] = []
    groups: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        if line["step_ms"] and line["model_ms"]:
            ratio = line["step_ms"] / line["model_ms"]
            groups.setdefault((line["arm"], line["batch"]), []).append(ratio)
    for (arm, batch), ratios in sorted(groups.items()):
        span = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        made.append({"arm": arm, "batch": batch} | span | {"places": len(ratios)})
    return made


def model_table(lines: Sequence[Row]) -> Table:
    """How many times what its bytes take at a copy's bandwidth a step takes."""
    table = Table(title="measured by modelled time: median (range)")
    table.add_column("arm")
    batches = sorted({line["batch"] for line in lines})
    for batch in batches:
        table.add_column(f"B={batch}", justify="right")
    found = {(row["arm"], row["batch"]): row for row in model_ratios(lines)}
    for arm in dict.fromkeys(line["arm"] for line in lines):
        mine = [found.get((arm, batch)) for batch in batches]
        texts = [f"{x['median']:.1f} ({x['min']:.1f}-{x['max']:.1f})" if x else "" for x in mine]
        table.add_row(arm, *texts)
    return table


def digest(lines: Sequence[Row]) -> dict[str, list[Row]]:
    """All of the atlas in few bytes: a record a place with the times and the model's times of every
    arm (milliseconds, four digits), crossing points, the model's ratios, and what did not run."""
    places: dict[tuple[Any, ...], Row] = {}
    unfit: dict[tuple[Any, ...], Row] = {}
    for line in lines:
        if line["gate"] == NOT_RUN:
            key = {name: line[name] for name in ("arm", "nodes", "batch", "problem")}
            unfit.setdefault(tuple(key.values()), key)
        if not line["step_ms"]:
            continue
        known = {name: line[name] for name in (*PLACE, "path", "depth", "leaves", "branching")}
        place = places.setdefault(_place(line), known | {"ms": {}, "model_ms": {}})
        place["ms"][line["arm"]] = _digits(line["step_ms"])
        if line["model_ms"]:
            place["model_ms"][line["arm"]] = _digits(line["model_ms"])
    found = [
        x._asdict() | {"nodes": _digits(x.nodes, 3), "ratios": [_digits(r) for r in x.ratios]}
        for x in crossings(lines)
    ]
    ratios = [
        row | {name: _digits(row[name], 3) for name in ("median", "min", "max")}
        for row in model_ratios(lines)
    ]
    return {
        "places": list(places.values()),
        "crossings": found,
        "measured_by_model": ratios,
        "not_run": list(unfit.values()),
    }


def write_digest(lines: Sequence[Row], out: Path) -> None:
    """``atlas.json``, a record a line."""
    parts = []
    for name, records in digest(lines).items():
        text = ",\n".join(f" {json.dumps(record)}" for record in records)
        parts.append(f"{json.dumps(name)}: [\n{text}\n]")
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    (out / "atlas.json").write_text(text, encoding="utf-8")


def _digits(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


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


def draw(lines: Sequence[Row], planned: Sequence[Place], arms: Sequence[str], out: Path) -> None:
    """The map of the fastest, and measured and modelled times by nodes."""
    maps = {}
    for batch in sorted({place.batch for place in planned}):
        mine = [line for line in lines if line["batch"] == batch]
        cells = {}
        for line in mine:
            if line["fastest"]:
                there = [x for x in mine if _place(x) == _place(line) and x["step_ms"]]
                cells[_row(line["tree"], line["path"]), str(line["nodes"])] = _best(there)
        places = [(_row(p.tree, p.path), str(p.nodes)) for p in planned if p.batch == batch]
        plural = "sequence" if batch == 1 else "sequences"
        maps[f"{batch} {plural}{_unfit_note(mine)}"] = Map(cells, places)
    title = "Fastest policy by tree and batch: its ms a step, and how much longer the second takes"
    labels = "nodes of the tree", "form of tree, rows published"
    draw_map(out / "atlas", maps, list(arms), labels, title)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    form = _most_common(lines)
    for line in lines:
        if line["tree"] == form and line["path"] == DEEPEST and line["step_ms"]:
            lines_of = panels.setdefault(f"ms a step, batch {line['batch']}", {})
            lines_of.setdefault(line["arm"], []).append((line["nodes"], line["step_ms"]))
            if line["model_ms"]:
                modelled = lines_of.setdefault(f"{line['arm']}, {MODELLED}", [])
                modelled.append((line["nodes"], line["model_ms"]))
    draw_lines(out / "atlas_nodes", panels, f"nodes of a {form!r} tree, deepest path published")


def _row(tree: str, path: str) -> str:
    rows = {"1": "1 row", DEEPEST: DEEPEST}.get(path, f"{path} rows")
    return f"{tree}, {rows}"


def _best(there: Sequence[Row]) -> Best:
    """The fastest of a place's lines, and the second."""
    ranked = sorted(there, key=lambda line: line["step_ms"])
    first = ranked[0]
    if len(ranked) == 1:
        return Best(first["arm"], math.inf, f"{first['step_ms']:.3g}\nalone")
    lead = ranked[1]["step_ms"] / first["step_ms"] - 1
    text = f"{first['step_ms']:.3g}\n{ranked[1]['arm']} +{100 * lead:.0f}%"
    return Best(first["arm"], lead, text)


def _unfit_note(lines: Sequence[Row]) -> str:
    """From how many nodes on an arm could not run at this batch."""
    least: dict[str, int] = {}
    for line in lines:
        if line["gate"] == NOT_RUN:
            least[line["arm"]] = min(line["nodes"], least.get(line["arm"], line["nodes"]))
    return "".join(f"; {arm} not run from {nodes} nodes on" for arm, nodes in least.items())


def _most_common(lines: Sequence[Row]) -> str:
    """The form of tree with the most sizes: the one to show a curve of."""
    sizes: dict[str, set[int]] = {}
    for line in lines:
        sizes.setdefault(line["tree"], set()).add(line["nodes"])
    return max(sizes, key=lambda tree: len(sizes[tree]))
