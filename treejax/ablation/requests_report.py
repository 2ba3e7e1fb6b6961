"""What a request replay shows: pooled rates with ranges, a line a request, figures.

A rate is the sum of tokens after the first by the sum of their seconds, over one arm's requests in
one repeat; of the repeats the median is shown, and the range. "Times plain" divides by plain's rate
on the same requests in the same repeat. An arm with any red row has no figures at all: a broken
state can make text loop, and loops are easy to draft.
"""

import csv
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from treejax.ablation.base import GREEN, NEAR_TIE, NOT_RUN, RED, Row
from treejax.ablation.figures import can_draw, draw_ranges, make_panels, readable, save
from treejax.ablation.serving import PLAIN

MIB = 2**20
_ABOUT = ("policy", "drafter", "tree", "nodes", "width", "depth", "implementation")
_COUNTS = ("tokens", "steps", "drafts", "proposed", "accepted")


def summarise(rows: Sequence[Row], arms: Sequence[str]) -> list[Row]:
    """One record a corpus, mode and arm, in the order of ``arms``.

    Counts are those of the first whole repeat; acceptance is that of all whole repeats together,
    since a drafter that chooses by the clock drafts otherwise in each.
    """
    made = []
    for group in dict.fromkeys(_group(row) for row in rows):
        grouped = [row for row in rows if _group(row) == group]
        plain = [row for row in grouped if row["arm"] == PLAIN]
        there = {row["arm"] for row in grouped}
        for arm in (arm for arm in arms if arm in there):
            made.append(_record(arm, group, rows, plain))
    return made


def _group(row: Row) -> tuple[str, str]:
    return row["corpus"], row["mode"]


def _record(arm: str, group: tuple[str, str], rows: Sequence[Row], plain: Sequence[Row]) -> Row:
    whole = [row for row in rows if row["arm"] == arm]
    mine = [row for row in whole if _group(row) == group]
    red = [row for row in whole if row["gate"] == RED]
    ran = [row for row in mine if row["gate"] != NOT_RUN]
    ties = len({row["prompt"] for row in mine if row["gate"] == NEAR_TIE})
    gate = RED if red else NOT_RUN if not ran else NEAR_TIE if ties else GREEN
    first = next(iter(red or [row for row in mine if row["gate"] == NOT_RUN]), None)
    problem = f"{first['prompt']}, {first['mode']}: {first['problem']}" if first else None
    repeats = _complete_repeats(ran or mine)
    record: Row = {"corpus": group[0], "mode": group[1], "arm": arm}
    record |= {name: mine[0].get(name) for name in _ABOUT}
    record |= {"requests": len(repeats[0]), "repeats": len(repeats)}
    record |= {"gate": gate, "near_ties": ties, "problem": problem}
    if red or not ran:
        return record
    counts = {name: sum(row[name] for row in repeats[0]) for name in _COUNTS}
    every = [row for each in repeats for row in each]
    by_depth = accepted_by_depth(every)
    drafts, proposed, accepted = (sum(r[n] for r in every) for n in _COUNTS[2:])
    record |= counts | {
        "first_accepted": by_depth[0] if by_depth else None,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "node_use": accepted / proposed if drafts else None,
    }
    record |= _spread("tokens_per_s", [pooled_rate(each) for each in repeats])
    record |= _spread("times_plain", [_times_plain(each, plain) for each in repeats])
    record |= {
        "prefill_s": statistics.median(sum(row["prefill_s"] for row in each) for each in repeats),
        "compile_s": sum(row["compile_s"] for row in ran),
        "scratch_mib": max(row["scratch_bytes"] for row in ran) / MIB,
        "state_mib": max(row["state_bytes"] for row in ran) / MIB,
    }
    return record


def pooled_rate(rows: Sequence[Row]) -> float | None:
    """Tokens after the first by the seconds after it, sums over the rows."""
    seconds = sum(row["decode_s"] for row in rows)
    return sum(max(row["tokens"] - 1, 0) for row in rows) / seconds if seconds else None


def accepted_by_depth(rows: Sequence[Row]) -> list[float]:
    """Share of all drafts that had a candidate accepted at depth d + 1."""
    drafts = sum(row["drafts"] for row in rows)
    deepest = max((len(row["accepted_per_pos"]) for row in rows), default=0)
    sums = [
        sum(row["accepted_per_pos"][d] for row in rows if d < len(row["accepted_per_pos"]))
        for d in range(deepest)
    ]
    return [count / drafts for count in sums]


def make_table(records: Sequence[Row], notice: str | None) -> Table:
    """The table that is printed; "-" where an arm has no figure."""
    caption = [notice] if notice else []
    for record in records:
        name = f"{record['arm']}, {record['corpus']}, {record['mode']}"
        if record["problem"] is not None:
            caption.append(f"{name}: {record['problem']}")
        elif record["arm"] != PLAIN and not record["proposed"]:
            caption.append(f"{name}: the drafter proposed nothing in any step")
    table = Table(
        title="request replay (requests x repeats; nodes, width and depth of the tree)",
        caption="\n".join(caption) or None,
    )
    table.add_column("arm", no_wrap=True)
    for head in ("corpus", "mode", "gate"):
        table.add_column(head)
    heads = "n x r|n/w/d|steps|proposed|accepted|emitted|first|length"
    for head in (*heads.split("|"), "tok/s (range)", "times plain (range)", "scratch MiB"):
        table.add_column(head, justify="right", no_wrap=head.endswith("(range)"))
    for record in records:
        table.add_row(*_cells(record))
    return table


def _cells(record: Row) -> list[str]:
    near = f" ({record['near_ties']})" if record["near_ties"] else ""
    cells = [record["arm"], record["corpus"], record["mode"], f"{record['gate']}{near}"]
    cells.append(f"{record['requests']} x {record['repeats']}")
    shape = (record[name] for name in ("nodes", "width", "depth"))
    cells.append("/".join("-" if value is None else str(value) for value in shape))
    for name in ("steps", "proposed", "accepted", "tokens"):
        cells.append(_shown(record, name, ",d"))
    cells += [_shown(record, "first_accepted", ".2f"), _shown(record, "acceptance_length", ".2f")]
    cells += [_ranged(record, "tokens_per_s", readable), _ranged(record, "times_plain", ".2f")]
    return [*cells, _shown(record, "scratch_mib", ",.1f")]


def _shown(record: Row, name: str, form: str | Callable[[Any], str]) -> str:
    value = record.get(name)
    if value is None:
        return "-"
    return format(value, form) if isinstance(form, str) else form(value)


def _ranged(record: Row, name: str, form: str | Callable[[Any], str]) -> str:
    if record.get(name) is None:
        return "-"
    low, high = (_shown(record, f"{name}_{end}", form) for end in ("min", "max"))
    return f"{_shown(record, name, form)} ({low}-{high})"


def write_requests(rows: Sequence[Row], path: Path) -> None:
    """A line a request and mode: its length, and every arm's rate (median) and acceptance.

    Lengths and acceptance are those of the first repeat.
    """
    wrong = {row["arm"] for row in rows if row["gate"] == RED}
    rows = [row for row in rows if row["gate"] != NOT_RUN]
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm not in wrong]
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for arm in arms:
        for (prompt, mode), mine in _by_request(rows, arm).items():
            head = {"corpus": mine[0]["corpus"], "prompt": prompt, "mode": mode}
            line = lines.setdefault((prompt, mode), head)
            line |= {name: mine[0][name] for name in ("prompt_tokens", "budget", "tokens")}
            rates = [row["tokens_per_s"] for row in mine if row["tokens_per_s"] is not None]
            line[f"{arm} tokens_per_s"] = statistics.median(rates) if rates else ""
            line[f"{arm} acceptance_length"] = mine[0]["acceptance_length"]
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(lines.values())


def draw(records: Sequence[Row], rows: Sequence[Row], out: Path) -> None:
    """Rates by arm, and acceptance by depth of the arms that serve all requests; a panel a
    corpus and mode.

    Nothing without matplotlib.
    """
    groups = list(dict.fromkeys(_group(record) for record in records))
    timed = [record for record in records if record.get("tokens_per_s") is not None]
    if not can_draw() or not timed:
        return
    figure, panels = make_panels(len(groups), 6 * len(groups), 1.2 + 0.3 * len(timed) / len(groups))
    for axes, group in zip(panels, groups, strict=True):
        mine = [record for record in timed if _group(record) == group]
        names = [f"{r['arm']} ({r['requests']})" for r in mine]
        spans = [(r["tokens_per_s_min"], r["tokens_per_s_max"]) for r in mine]
        rates = [record["tokens_per_s"] for record in mine]
        draw_ranges(axes, names, rates, spans, f"{', '.join(group)}: tokens/s (range)")
    save(figure, out, "rates")
    figure, panels = make_panels(len(groups), 5 * len(groups), 3.6)
    for axes, group in zip(panels, groups, strict=True):
        grouped = [record for record in timed if _group(record) == group]
        most = max((record["requests"] for record in grouped), default=0)
        for record in grouped:
            if record["proposed"] and record["requests"] == most:
                mine = [
                    row
                    for row in rows
                    if row["arm"] == record["arm"]
                    and _group(row) == group
                    and row["gate"] != NOT_RUN
                ]
                whole = _complete_repeats(mine)
                shares = accepted_by_depth([row for each in whole for row in each])
                axes.plot(range(1, len(shares) + 1), shares, "o-", ms=3, label=record["arm"])
        axes.set(
            title=", ".join(group), xlabel="depth", ylabel="share of drafts accepted", ylim=(0, 1)
        )
        if axes.lines:
            axes.legend(frameon=False, fontsize=7)
    save(figure, out, "acceptance")


def _by_request(rows: Sequence[Row], arm: str) -> dict[tuple[str, str], list[Row]]:
    made: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["arm"] == arm:
            made.setdefault((row["prompt"], row["mode"]), []).append(row)
    return made


def _complete_repeats(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by repeat, of those repeats that have all requests that any repeat has."""
    repeats: dict[int, list[Row]] = {}
    for row in rows:
        repeats.setdefault(row["repeat"], []).append(row)
    most = max(map(len, repeats.values()))
    return [repeats[r] for r in sorted(repeats) if len(repeats[r]) == most]


def _times_plain(rows: Sequence[Row], plain: Sequence[Row]) -> float | None:
    """This repeat's rate by plain's, over the requests that both have."""
    repeat = rows[0]["repeat"]
    agrees = [row for row in plain if row["repeat"] == repeat and row["gate"] in (GREEN, NEAR_TIE)]
    beside = {row["prompt"]: row for row in agrees}
    both = [row for row in rows if row["prompt"] in beside]
    mine, other = pooled_rate(both), pooled_rate([beside[row["prompt"]] for row in both])
    return mine / other if mine and other else None


def _spread(name: str, values: Sequence[float | None]) -> Row:
    """Median and range of the repeats."""
    known = [value for value in values if value is not None]
    if not known:
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    middle = statistics.median(known)
    return {name: middle, f"{name}_min": min(known), f"{name}_max": max(known)}
