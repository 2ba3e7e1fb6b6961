"""What a comparison reports: a row a generation, a summary line an arm, a table and a figure.

Same numbers everywhere. An arm that does not agree with plain decoding has no rate.
"""

import csv
import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.table import Table

from treejax.cli.arms import MODES, Arm, Rate, Row
from treejax.cli.versions import installed_version


@dataclasses.dataclass(frozen=True)
class Summary:
    """One arm over all cases.

    Attributes:
      greedy, sampled: generations equal to plain decoding, of how many.
      near_ties: generations that part from plain at a near tie, neither equal nor wrong.
      acceptance_length, node_use, steps: pooled over the greedy generations.
      largest_distance: of a state surface from plain's, over all that were compared.
      rate: None if not timed.
    """

    arm: str
    ok: bool
    greedy: tuple[int, int]
    sampled: tuple[int, int]
    near_ties: int
    acceptance_length: float
    node_use: float
    steps: int
    largest_distance: float
    rate: Rate | None = None

    def flat(self) -> dict[str, Any]:
        """For CSV and JSON."""
        made = dataclasses.asdict(self) | {
            "greedy": f"{self.greedy[0]}/{self.greedy[1]}",
            "sampled": f"{self.sampled[0]}/{self.sampled[1]}",
        }
        del made["rate"]
        for name in ("tokens_per_s", "ratio"):
            low, high = getattr(self.rate, f"{name}_range") if self.rate else (None, None)
            value = getattr(self.rate, name) if self.rate else None
            made |= {name: value, f"{name}_min": low, f"{name}_max": high}
        return made


def summarise(arm: Arm, rows: Sequence[Row]) -> Summary:
    """Pool the rows of one arm."""
    mine = [row for row in rows if row.arm == arm]
    greedy = [row.stats for row in mine if row.case.mode == "greedy"]
    drafts = sum(stats.num_drafts for stats in greedy)
    nodes = sum(stats.num_draft_tokens for stats in greedy)
    accepted = sum(stats.num_accepted_tokens for stats in greedy)
    equal = {}
    for mode in MODES:
        agreed = [row.agreement for row in mine if row.case.mode == mode]
        equal[mode] = sum(a.pair is None and a.ok for a in agreed), len(agreed)
    return Summary(
        arm=arm.name,
        ok=all(row.agreement.ok for row in mine),
        greedy=equal["greedy"],
        sampled=equal["sampled"],
        near_ties=sum(row.agreement.near_tie for row in mine),
        acceptance_length=1 + accepted / drafts if drafts else 1.0,
        node_use=accepted / nodes if nodes else 0.0,
        steps=sum(stats.steps for stats in greedy),
        largest_distance=max((d for r in mine for d in r.agreement.surfaces.values()), default=0.0),
    )


def row_json(row: Row, prompt: str) -> str:
    """One line of ``rows.jsonl``."""
    where = {"arm": row.arm.name, "mode": row.case.mode, "prompt": prompt}
    return json.dumps(where | row.agreement.as_dict() | {"stats": row.stats.as_dict()})


def environment(config: Any) -> dict[str, Any]:
    """What the numbers were made with."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "treejax": installed_version("treejax"),
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
        "options": config,
    }


def write_csv(summaries: Sequence[Summary], file: TextIO) -> None:
    rows = [summary.flat() for summary in summaries]
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


def make_table(
    summaries: Sequence[Summary], plain: Rate | None, title: str, caption: str | None = None
) -> Table:
    """The table that is printed; "-" where an arm has no rate."""
    table = Table(title=title, caption=caption)
    table.add_column("policy/drafter:tree")
    for name in ("greedy", "sampled", "near ties", "state", "accept", "node use", "steps"):
        table.add_column(name, justify="right")
    if plain is not None:
        table.add_column("tok/s", justify="right")
        table.add_column("ratio (range)", justify="right")
        low, high = plain.tokens_per_s_range
        speed = f"{plain.tokens_per_s:.1f} ({low:.1f}-{high:.1f})"
        table.add_row("plain", "", "", "", "", "", "", "", speed, "1")
    for s in summaries:
        cells = [
            s.arm if s.ok else f"{s.arm} DIFFERS",
            f"{s.greedy[0]}/{s.greedy[1]}",
            f"{s.sampled[0]}/{s.sampled[1]}",
            str(s.near_ties),
            f"{s.largest_distance:.0e}",
            f"{s.acceptance_length:.2f}",
            f"{100 * s.node_use:.1f} %",
            str(s.steps),
        ]
        if plain is not None:
            cells += _rate_cells(s.rate)
        table.add_row(*cells)
    return table


def _rate_cells(rate: Rate | None) -> list[str]:
    if rate is None:
        return ["-", "-"]
    (slow, fast), (low, high) = rate.tokens_per_s_range, rate.ratio_range
    return [
        f"{rate.tokens_per_s:.1f} ({slow:.1f}-{fast:.1f})",
        f"{rate.ratio:.2f} ({low:.2f}-{high:.2f})",
    ]


def draw_figure(summaries: Sequence[Summary], path: Path) -> bool:
    """Acceptance length by arm, and speed beside plain where timed; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    timed = [s for s in summaries if s.rate is not None]
    figure = Figure(figsize=(9, 1 + 0.3 * len(summaries)), layout="constrained")
    axes = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    shown = [s for s in summaries if s.ok]
    axes[0].barh([s.arm for s in shown], [s.acceptance_length for s in shown])
    axes[0].set_xlabel("acceptance length (tokens a draft)")
    axes[0].invert_yaxis()
    if timed:
        ratios = [s.rate.ratio for s in timed if s.rate]
        spans = [s.rate.ratio_range for s in timed if s.rate]
        low = [r - span[0] for r, span in zip(ratios, spans, strict=True)]
        high = [span[1] - r for r, span in zip(ratios, spans, strict=True)]
        axes[1].barh([s.arm for s in timed], ratios, xerr=(low, high))
        axes[1].axvline(1.0, color="black", linewidth=0.8)
        axes[1].set_xlabel("decoding speed, plain = 1 (bars: range)")
        axes[1].invert_yaxis()
    figure.savefig(path, dpi=120)
    return True
