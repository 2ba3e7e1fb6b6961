"""The grid: for each cell operands, gate, rounds, and rows of the table."""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from pallas_kernels.bench.attention.cases import Case, Cell, make_case, make_cell
from pallas_kernels.bench.attention.programs import (
    CUDNN,
    KERNEL,
    XLA,
    Step,
    cudnn_program,
    kernel_program,
    xla_program,
)
from pallas_kernels.bench.attention.settings import Settings
from pallas_kernels.bench.guard import INTERRUPTED, RED, one_line, say
from pallas_kernels.bench.report import environment
from pallas_kernels.bench.run import TABLE_WIDTH, Clock, copy_bytes
from pallas_kernels.bench.timing import (
    MOST_CALLS,
    Lead,
    Summary,
    Timed,
    choose_calls,
    measure_rounds,
    time_copy,
    time_program,
)
from pallas_kernels.bench.truth import exact
from pallas_kernels.tree_attention import reference

BOUND = 5e-3
"""Relative RMS against float32 that the gate allows: outputs and weights have eight bits."""


@dataclasses.dataclass
class Row:
    """One program in one cell; times are of a layer. ``problem`` says why there is none."""

    cell: Cell
    name: str
    implementation: str
    error: float | None = None
    problem: str | None = None
    scratch_bytes: int | None = None
    time: Summary | None = None
    bandwidth: float | None = None

    @property
    def share(self) -> float | None:
        """Of the copy's bandwidth, counting what must be read and written."""
        if self.time is None or self.bandwidth is None:
            return None
        return self.cell.bytes / self.bandwidth / (1e-3 * self.time.median)

    def flat(self) -> dict[str, Any]:
        cell, time = self.cell, self.time
        return {
            "batch": cell.batch,
            "context": cell.context,
            "rows": cell.tree.size,
            "tree": cell.tree.name,
            "layers": cell.layers,
            "name": self.name,
            "implementation": self.implementation,
            "error": self.error,
            "problem": self.problem,
            "scratch_bytes": self.scratch_bytes,
            "bytes": cell.bytes,
            "flops": cell.flops,
            "median_ms": time.median if time else None,
            "p10_ms": time.low if time else None,
            "p90_ms": time.high if time else None,
            "rounds": time.rounds if time else 0,
            "copy_bytes_per_s": self.bandwidth,
            "bandwidth_share": self.share,
        }


class Run:
    """One run of the command; everything found is in ``rows``."""

    def __init__(self, settings: Settings):
        self.settings, self.rows = settings, list[Row]()
        self.clock, self.environment = Clock(settings.time_limit), environment()
        self._copy, self._moved = time_copy(copy_bytes())
        gpu = jax.devices()[0].platform == "gpu"
        self._lead = Lead(copy_bytes()) if gpu else None

    def main(self) -> int:
        """The exit status; an interrupt still prints what there is."""
        settings = self.settings
        grid = [
            (batch, context, rows)
            for batch in settings.batch
            for context in settings.context
            for rows in settings.rows
        ]
        try:
            for index, place in enumerate(grid):
                if self.clock.over:
                    say(f"the time limit is reached: {len(grid) - index} cells are not run")
                    break
                self._cell(make_cell(settings, *place), self.clock.part(len(grid) - index))
                self._write()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(self._table())
        # A peer may refuse a cell; the kernel may not.
        return RED if any(row.problem for row in self.rows if row.name == KERNEL) else 0

    def _cell(self, cell: Cell, over: Callable[[], bool]) -> None:
        case = make_case(cell, self.settings.seed)
        wanted = _wanted(case)
        made: list[tuple[str, Callable[[], tuple[Step, Any]], Any]] = [
            (
                KERNEL,
                lambda: kernel_program(case, self.settings.implementation),
                (case.keys, case.values),
            )
        ]
        if self.settings.peers == "auto":
            made += [(XLA, lambda: xla_program(case), ()), (CUDNN, lambda: cudnn_program(case), ())]
        timed: list[tuple[Row, Timed]] = []
        for name, build, pool in made:
            row, entry = self._gate(name, build, pool, case, wanted)
            self.rows.append(row)
            if entry is not None:
                timed.append((row, entry))
            found = row.problem or f"error {row.error:.1e}"
            say(
                f"{self.clock.elapsed:.0f} s: B={cell.batch}, context {cell.context}, "
                f"{cell.tree.size} rows: {name} by {row.implementation}: {found}"
            )
        copy = self._copy
        entries = [copy, *(entry for _, entry in timed)]
        for entry in entries:
            choose_calls(entry, self._lead)
        summaries = measure_rounds(entries, self.settings.repeats, over, lambda done: None)
        for row, _ in timed:
            row.time = summaries[row.name]
            row.bandwidth = 1e3 * self._moved / summaries[copy.name].median

    def _gate(
        self,
        name: str,
        build: Callable[[], tuple[Step, Any]],
        pool: Any,
        case: Case,
        wanted: dict[tuple[int, int], Any],
    ) -> tuple[Row, Timed | None]:
        """Compile a program, check it, and hand it on to the clock if it is right."""
        row = Row(case.cell, name, "–")
        try:
            step, operands = build()
            lowered = jax.jit(step).lower(pool, operands)
            row.implementation = _implementation(lowered.as_text())
            compiled = lowered.compile()
            analysis = compiled.memory_analysis()
            row.scratch_bytes = None if analysis is None else int(analysis.temp_size_in_bytes)
            outputs, _ = compiled(pool, operands)
            row.error = _error(case, outputs, wanted)
        except Exception as error:  # a peer that refuses must not cost the others their rows
            row.problem = one_line(error)
            return row, None
        if not row.error <= BOUND:
            row.problem = f"relative RMS {row.error:.1e}, expected {BOUND:.0e}"
            return row, None
        share = float(case.cell.layers)  # times are of one layer
        return row, time_program(name, compiled, pool, operands, MOST_CALLS, share)

    def _write(self) -> None:
        path = self.settings.json
        if path is None:
            return
        settings = dataclasses.asdict(self.settings) | {"json": str(path)}
        rows = [row.flat() for row in self.rows]
        document = {"environment": self.environment, "settings": settings, "rows": rows}
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _table(self) -> Table:
        s = self.settings
        table = Table(
            title=f"{s.heads}/{s.key_heads} heads x {s.width}, bfloat16; "
            f"{self.environment['device']}",
            caption="ms of a layer. error: relative RMS against float32. MB: keys and values once, "
            "queries, own rows, outputs. of copy: their share of the copy's bandwidth.",
        )
        names = ("B", "context", "rows", "attention", "by", "error", "ms", "10-90 %", "MB")
        for name in (*names, "of copy", "TFLOP/s"):
            table.add_column(name, no_wrap=True)
        for row in self.rows:
            table.add_row(*_cells(row))
        return table


def _cells(row: Row) -> list[str]:
    cell, time, share = row.cell, row.time, row.share
    place = [str(x) for x in (cell.batch, cell.context, cell.tree.size)]
    if time is None:
        return [*place, row.name, row.implementation, (row.problem or "")[:60]]
    return [
        *place,
        row.name,
        row.implementation,
        f"{row.error:.1e}",
        f"{time.median:.4f}",
        f"{time.low:.4f}-{time.high:.4f}",
        f"{cell.bytes / 1e6:.1f}",
        f"{100 * share:.0f} %" if share is not None else "–",
        f"{cell.flops / time.median / 1e9:.0f}",
    ]


def _implementation(text: str) -> str:
    if "custom_call @mosaic_gpu" in text:
        return "mosaic_gpu"
    return "cudnn" if "cudnn" in text else "xla"


def _wanted(case: Case) -> dict[tuple[int, int], Any]:
    """Float32 outputs of the first and last layer and sequence."""
    cell = case.cell
    places = {(i, b) for i in {0, cell.layers - 1} for b in {0, cell.batch - 1}}
    return {(i, b): exact(_truth(case, i, b)) for i, b in places}


def _truth(case: Case, layer: int, b: int) -> jax.Array:
    own = (x[layer, b : b + 1].astype(jnp.float32) for x in (case.q, case.k, case.v))
    caches = (x[layer, b : b + 1][None].astype(jnp.float32) for x in (case.keys, case.values))
    out = jax.jit(reference.tree_attention)(
        *own, case.mask[b : b + 1], *caches, jnp.int32(0), case.length[b : b + 1]
    )
    return out[0, : case.cell.tree.size]


def _error(case: Case, outputs: Any, wanted: dict[tuple[int, int], Any]) -> float:
    """The worst relative RMS."""
    errors = []
    for (layer, b), expected in wanted.items():
        made = exact(outputs[layer][b, : case.cell.tree.size])
        errors.append(((made - expected) ** 2).sum() ** 0.5 / (expected**2).sum() ** 0.5)
    return float(max(errors))
