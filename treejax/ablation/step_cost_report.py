"""Tables, summary and figures of ``step_cost``."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from treejax.ablation.base import GREEN, Row
from treejax.ablation.lab_figures import draw_dots, draw_lines
from treejax.ablation.lab_run import by_cell, hide_red, leading, pooled, shown
from treejax.ablation.step_cost_arms import PLAIN, SWITCHES
from treejax.ablation.step_cost_model import ModelSizes
from treejax.ablation.step_cost_peer import PEER
from treejax.ablation.step_cost_rows import medians
from treejax.ablation.step_cost_timing import PHASES

ERRORS = (
    *("logits_error", "stranger_error", "argmax_margin", "native_error"),
    *("state_error", "conv_error", "kv_error"),
)
KEYS = ("batch", "context", "rows")
_HIDDEN = {*KEYS, "arm", "repeat", "gate", "problem"}


def summary(rows: Sequence[Row]) -> list[Row]:
    """A record an arm and place: medians over repeats, and what its break-even is."""
    made = []
    for (arm, *place), mine in by_cell(hide_red(rows), KEYS).items():
        first = leading(mine)
        line: Row = {"arm": arm, **dict(zip(KEYS, place, strict=True))}
        line |= {"gate": first["gate"], "problem": first["problem"]}
        line |= pooled(mine, "step_ms")
        names = [name for name in first if name not in _HIDDEN]
        found = medians(mine, names)
        line |= {
            name: first[name] if found[name] is None else found[name]
            for name in names
            if name != "step_ms"
        }
        made.append(line)
    for line in made:
        line["break_even_length"] = line.get("times_plain")
        line["break_even_with_head"] = _with_head(line, made)
    return made


def _with_head(line: Row, lines: Sequence[Row]) -> float | None:
    """Tokens a step at which a scripted arm breaks even once the MTP head drafts its tree.

    The head's own time is the draft phase of the arm "POLICY TREE mtp..." of the same place, the
    first that was measured.
    """
    words = line["arm"].split()
    if len(words) != 2 or line["gate"] != GREEN:
        return None
    for other in lines:
        name = other["arm"].split()
        same = all(other[key] == line[key] for key in KEYS) and name[1:2] == words[1:]
        if same and len(name) == 3 and name[2].startswith("mtp") and other.get("draft_ms"):
            whole = line["step_ms"] - (line.get("draft_ms") or 0.0) + other["draft_ms"]
            return whole / line["plain_step_ms"]
    return None


def tables(rows: Sequence[Row], sizes: ModelSizes) -> list[Table]:
    lines = summary(rows)
    title = (
        f"{sizes.layers} layers, hidden {sizes.hidden_size}, vocabulary {sizes.vocabulary:,}, "
        f"{sizes.dtype}, random weights"
    )
    others = _facts(lines), _gates(lines), _decoding(lines), _switches(lines), _peer(lines)
    return [_steps(lines, title), *(table for table in others if table.row_count)]


def _steps(lines: Sequence[Row], title: str) -> Table:
    heads = "step ms|p10-p90|times plain|draft|verify|select|publish|host".split("|")
    table = _table(title, "arm|batch|context|rows", heads)
    for line in lines:
        place = [line["arm"], *(shown(line[key], ",d") for key in KEYS)]
        if line["gate"] != GREEN:
            table.add_row(*place, f"{line['gate']}: {line['problem']}")
            continue
        spread = f"{line['step_ms_p10']:.4g}-{line['step_ms_p90']:.4g}"
        phases = [shown(line.get(f"{part}_ms")) for part in (*PHASES, "host")]
        ratio = shown(line.get("times_plain"), ".3f")
        table.add_row(*place, shown(line["step_ms"], ".4g"), spread, ratio, *phases)
    return table


def _facts(lines: Sequence[Row]) -> Table:
    heads = (
        *("GB read", "ms for it", "step / it", "weights ms", "step / it"),
        *("state MiB", "temporary MiB", "peak GiB", "compile s", "of phases"),
    )
    table = _table("What must be read, and what it takes", "arm|batch|context|rows", heads)
    for line in _green(lines):
        if line["arm"] == PEER:
            continue
        parts = ("weights", "states", "conv", "kv")
        table.add_row(
            line["arm"],
            *(shown(line[key], ",d") for key in KEYS),
            shown(sum(line[f"{part}_mb"] for part in parts) / 1e3, ".4g"),
            shown(line["read_ms"], ".4g"),
            shown(line["step_ms"] / line["read_ms"], ".3f"),
            shown(line["weights_ms"], ".4g"),
            shown(line["step_ms"] / line["weights_ms"], ".3f"),
            *(shown(line[name], ",.0f") for name in ("state_mib", "temporary_mib")),
            shown(line["peak_gib"], ".1f"),
            *(shown(line[name], ".0f") for name in ("compile_s", "phases_compile_s")),
        )
    return table


def _gates(lines: Sequence[Row]) -> Table:
    heads = [name.replace("_", " ") for name in ERRORS]
    table = _table("Beside plain decoding", "arm|batch|context|rows", [*heads, "bitwise"])
    seen = set()
    for line in lines:  # the gate is at the shortest context
        place = line["arm"], line["batch"], line["rows"]
        if place not in seen and any(name in line for name in ERRORS):
            seen.add(place)
            bits = line.get("bitwise")
            table.add_row(
                *(line["arm"], *(shown(line[key], ",d") for key in KEYS)),
                *(shown(line.get(name), ".1e") for name in ERRORS),
                "" if bits is None else ("yes" if bits else "no"),
            )
    return table


def _decoding(lines: Sequence[Row]) -> Table:
    """Whole decoding at every acceptance length."""
    lengths = _lengths(lines)
    heads = ["best tokens/s", *(f"x plain at {n} a step" for n in lengths)]
    heads += ["breaks even at", "with the head's draft", "the host"]
    table = _table("Whole decoding against plain", "arm|batch|context|rows", heads)
    for line in _green(lines):
        if _undoes(line):
            continue
        rates = [line.get(f"tokens_per_s_at_{n}") for n in (1, *lengths)]
        rate = line.get("tokens_per_s_as_drafted") or line.get("tokens_per_s")
        best = max((x for x in rates if x), default=rate)
        table.add_row(
            *(line["arm"], *(shown(line[key], ",d") for key in KEYS)),
            shown(best, ".1f"),
            *(shown(line.get(f"speedup_at_{n}"), ".2f") for n in lengths),
            *(shown(line.get(f"break_even_{x}"), ".2f") for x in ("length", "with_head")),
            str(line.get("decoding") or ""),
        )
    return table


def _switches(lines: Sequence[Row]) -> Table:
    """The step with each integration change undone, beside the one that has all."""
    heads = ("step ms", "visit ms", "visit / with all", "temporary MiB")
    table = _table("With one integration change undone", "arm|batch|context|rows", heads)
    for line in lines:
        if not _undoes(line):
            continue
        words = line["arm"].split()
        place = [line["arm"], *(shown(line[key], ",d") for key in KEYS)]
        if line["gate"] != GREEN:
            table.add_row(*place, f"{line['gate']}: {line['problem']}")
            continue
        whole = _line(lines, " ".join(words[:2]), line)
        ratio = whole and line["visit_ms"] / whole["visit_ms"]
        times = (shown(line[name], ".4g") for name in ("step_ms", "visit_ms"))
        table.add_row(*place, *times, shown(ratio, ".3f"), shown(line["temporary_mib"], ",.0f"))
    return table


def _peer(lines: Sequence[Row]) -> Table:
    """Plain decoding beside the peer's at the same batch and context."""
    heads = ("ms a token", "plain ms", "times faster", "GiB", "recurrent kernels", "versions")
    table = _table("Plain decoding beside generate", "arm|batch|context", heads)
    for line in lines:
        if line["arm"] != PEER:
            continue
        place = [PEER, *(shown(line[key], ",d") for key in ("batch", "context"))]
        if line["gate"] != GREEN:
            table.add_row(*place, f"{line['gate']}: {line['problem']}")
            continue
        same = [x for x in _green(lines) if x["arm"] == PLAIN]
        same = [x for x in same if all(x[key] == line[key] for key in ("batch", "context"))]
        own = min(same, key=lambda x: x["rows"], default=None)
        # As decoding runs it, where that was timed.
        times = line["visit_ms"], own and (own.get("loop_ms") or own["visit_ms"])
        ratio = own and times[0] / times[1]
        times = (shown(x, ".4g") for x in times)
        said = str(line.get("fast_path")), str(line.get("versions"))
        table.add_row(*place, *times, shown(ratio, ".2f"), shown(line.get("memory_gib")), *said)
    return table


def figures(rows: Sequence[Row], out: Path) -> None:
    """``step_cost``: a step of every arm beside plain; ``step_cost_decoding``: the rates over the
    acceptance length, a panel a place; ``step_cost_rows``: steps over the rows of a tree."""
    lines = [line for line in _green(summary(rows)) if line["arm"] != PEER]
    names = [_label(line, lines) for line in lines]
    points = [(x["step_ms"], x["step_ms_min"], x["step_ms_max"]) for x in lines]
    ratios = [(x["times_plain"],) * 3 for x in lines]
    panels: dict[str, Mapping[str, Any]] = {
        "ms a step": {"whole step": points},
        "times plain": {"breaks even at so many tokens a step": ratios},
    }
    draw_dots(out / "step_cost", names, panels)
    rates: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        found = [
            (float(n), line[f"speedup_at_{n}"])
            for n in _lengths(lines)
            if line.get(f"speedup_at_{n}") is not None
        ]
        if len(found) > 1 and len(line["arm"].split()) == 2:
            panel = f"batch {line['batch']}, {line['context']:,} of {line['rows']:,} rows"
            rates.setdefault(panel, {})[line["arm"]] = found
    if rates:
        even = {"plain": [(float(n), 1.0) for n in _lengths(lines)]}
        panels_of = {panel: even | arms for panel, arms in list(rates.items())[:4]}
        title = "whole decoding: tokens/s over plain's"
        figure = out / "step_cost_decoding"
        draw_lines(figure, panels_of, "tokens a step", title, log=(False, False))
    sweep: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        words = line["arm"].split()
        if len(words) == 2 and words[1].startswith("rows"):
            name = f"{words[0]} B={line['batch']} {line['context']:,}"
            sweep.setdefault(name, []).append((line["nodes"] + 1.0, line["times_plain"]))
    sweep = {name: found for name, found in sweep.items() if len(found) > 1}
    if sweep:
        draw_lines(out / "step_cost_rows", {"times plain": sweep}, "rows", log=(False, False))


def _lengths(lines: Iterable[Row]) -> list[int]:
    prefix = "speedup_at_"
    found = {int(name[len(prefix) :]) for x in lines for name in x if name.startswith(prefix)}
    return sorted(found - {1})


def _green(lines: Iterable[Row]) -> list[Row]:
    return [line for line in lines if line["gate"] == GREEN]


def _line(lines: Iterable[Row], arm: str, beside: Row) -> Row | None:
    """The green line of an arm at the place of another."""
    for line in _green(lines):
        if line["arm"] == arm and all(line[key] == beside[key] for key in KEYS):
            return line
    return None


def _undoes(line: Row) -> bool:
    """Whether an arm has a change undone."""
    words = line["arm"].split()
    return len(words) == 3 and words[2].removeprefix("no_") in SWITCHES


def _label(line: Row, lines: Sequence[Row]) -> str:
    """Arm and context, and what else tells it from the others."""
    label = f"{line['arm']}, {line['context']:,}"
    names = "arm", "batch", "context"
    if sum(all(other[name] == line[name] for name in names) for other in lines) > 1:
        label += f" of {line['rows']:,}"
    return label if line["batch"] == 1 else f"{label}, B={line['batch']}"


def _table(title: str, names: str, heads: Iterable[str]) -> Table:
    table = Table(title=title)
    for head in (*names.split("|"), *heads):
        named = head == "arm"
        table.add_column(head, justify="left" if named else "right", no_wrap=named)
    return table
