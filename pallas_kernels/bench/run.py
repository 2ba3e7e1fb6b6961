"""The run: for each batch size operands, gate, rounds and a table; then the table of errors."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pallas_kernels.bench import gate, peers
from pallas_kernels.bench.cases import Case, make_case
from pallas_kernels.bench.gate import Verdict
from pallas_kernels.bench.guard import INTERRUPTED, RED, one_line, say
from pallas_kernels.bench.kernels import list_kernels
from pallas_kernels.bench.programs import Program, make_program
from pallas_kernels.bench.report import Report, Row
from pallas_kernels.bench.settings import Settings
from pallas_kernels.bench.state_error import measure_errors
from pallas_kernels.bench.timing import (
    MOST_CALLS,
    Lead,
    Timed,
    Working,
    choose_calls,
    measure_rounds,
    time_copy,
    time_program,
)
from pallas_kernels.bench.traffic import floor_bytes, sizes_of
from pallas_kernels.bench.trees import Tree, make_tree
from pallas_kernels.bench.truth import Truth

TABLE_WIDTH = 170
"""Of tables that go to a file: no cell wraps."""


class Clock:
    """Time since the start, and how much of it may be used."""

    def __init__(self, limit: float | None):
        self.start, self.limit = time.monotonic(), limit

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def part(self, parts: int) -> Callable[[], bool]:
        """Whether one of so many equal parts of what is left is used up."""
        if self.limit is None:
            return lambda: False
        end = self.elapsed + (self.limit - self.elapsed) / parts
        return lambda: self.elapsed >= end

    @property
    def over(self) -> bool:
        return self.limit is not None and self.elapsed >= self.limit


class Run:
    """One run of the command; everything found is in ``report``."""

    def __init__(self, settings: Settings):
        self.settings, self.report = settings, Report(settings)
        self.clock = Clock(settings.time_limit)
        self.tree: Tree = make_tree(settings.tree)
        self.memory = _memory()
        self._gpu = jax.devices()[0].platform == "gpu"

    def main(self) -> int:
        """The exit status; an interrupt still prints what there is."""
        settings, report = self.settings, self.report
        out = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
        report.write()
        batches = settings.batch if settings.errors != "only" else ()
        try:
            for index, batch in enumerate(batches):
                if self.clock.over:
                    say(f"the time limit is reached: B={batch} is not run")
                    continue
                try:
                    self._batch(batch, self.clock.part(len(batches) - index))
                finally:
                    out.print(report.table(batch))
            if settings.errors != "none":
                self._errors()
                out.print(report.error_table())
        except KeyboardInterrupt:
            return INTERRUPTED
        report.complete = not self.clock.over
        report.write()
        return 0 if report.green else RED

    def _batch(self, batch: int, over: Callable[[], bool]) -> None:
        settings = self.settings
        self._tell(f"B={batch}: operands")
        case = make_case(settings, batch, self.tree, settings.layers, "realistic")
        truth = Truth(case)
        working = Working(_copy(case.pool))
        timed: dict[str, tuple[Row, Timed]] = {}
        for name in settings.operations:
            if over():
                say(f"the time limit is reached: B={batch} {name} is not run")
                continue
            row, entry = self._gate(name, case, truth, working)
            self.report.rows.append(row)
            self.report.write()
            if entry is not None:
                timed[name] = row, entry
        if settings.peers == "auto" and not over():
            for peer in peers.make_peers(case, truth):
                row = Row(
                    batch,
                    peer.timed.name,
                    peer.implementation,
                    peer.layers,
                    floor_bytes(peer.operation, self._sizes(case)),
                    peer.verdict,
                )
                self.report.rows.append(row)
                self._tell_verdict(row)
                if peer.verdict.green:
                    timed[row.name] = row, peer.timed
        self._rounds(batch, timed, over)
        if settings.cupti:
            self._list_kernels(case, [row for row, _ in timed.values()])
        timed.clear()
        peers.release()

    def _gate(
        self, name: str, case: Case, truth: Truth, working: Working
    ) -> tuple[Row, Timed | None]:
        """Compile a program, check it, and hand it on to the clock if it is green."""
        size = floor_bytes(name, self._sizes(case))
        try:
            program = make_program(name, case, self.memory)
            row, compiled = self._compile(program, case, size)
            working.pool = _refill(working.pool, case.pool)
            outputs, pool = compiled(
                working.pool if program.publishes else case.pool, program.operands
            )
            if pool is not None:
                working.pool = pool
            row.verdict = gate.check(program, outputs, pool, truth)
            promised = row.implementation == "mosaic_gpu"
            if name == "path_scan":
                equal = gate.path_scan_is_native(case, outputs)
                row.verdict = gate.with_bits(row.verdict, equal, promised)
            if name == "replay":
                equal = gate.replay_is_decode(case)
                row.verdict = gate.with_bits(row.verdict, equal, promised)
        except Exception as error:  # one kernel that fails must not cost the others their rows
            verdict = Verdict({}, (one_line(error),))
            row = Row(case.batch, name, "–", self.settings.layers, size, verdict)
            if working.pool.is_deleted():
                working.pool = _copy(case.pool)
        self._tell_verdict(row)
        if not row.verdict.green:
            return row, None
        kept = sum(x.nbytes for x in jax.tree.leaves(outputs))
        entry = time_program(
            name,
            compiled,
            working if program.publishes else case.pool,
            program.operands,
            max(1, min(MOST_CALLS, self.memory // max(1, kept))),
            program.layers / self.settings.layers,
        )
        return row, entry

    def _compile(self, program: Program, case: Case, size: int) -> tuple[Row, Any]:
        donated = (0,) if program.publishes else ()
        jitted = jax.jit(program.step, donate_argnums=donated)
        lowered = jitted.lower(case.pool, program.operands)
        compiled = lowered.compile()
        analysis = compiled.memory_analysis()
        row = Row(
            case.batch,
            program.name,
            "mosaic_gpu" if "mosaic_gpu" in lowered.as_text() else "xla",
            program.layers,
            size,
            Verdict({}, ()),
            None if analysis is None else int(analysis.temp_size_in_bytes),
        )
        if program.publishes and row.implementation == "mosaic_gpu":
            shape = ",".join(map(str, case.pool.shape))
            if re.search(rf"= f32\[{shape}\]\S* copy\(", compiled.as_text() or ""):
                say(f"B={case.batch} {program.name}: the program copies the pool")
        return row, compiled

    def _rounds(
        self, batch: int, timed: dict[str, tuple[Row, Timed]], over: Callable[[], bool]
    ) -> None:
        """Time everything that is green, and the copy that bandwidth is measured with."""
        copy, moved = time_copy(copy_bytes())
        lead = Lead(copy_bytes()) if self._gpu else None
        entries = [copy, *(entry for _, entry in timed.values())]
        for entry in entries:
            choose_calls(entry, lead if entry.name in self.settings.operations else None)
        with progress(f"B={batch} rounds", self.settings.repeats) as seen:
            summaries = measure_rounds(entries, self.settings.repeats, over, seen)
        self.report.bandwidth[batch] = 1e3 * moved / summaries[copy.name].median
        for name, (row, _) in timed.items():
            row.time = summaries[name]
        self.report.write()
        self._tell(f"B={batch}: {summaries[copy.name].rounds} rounds")

    def _list_kernels(self, case: Case, rows: list[Row]) -> None:
        """Apart from the rounds, because CUPTI slows what it watches."""
        for row in rows:
            if row.name not in self.settings.operations:
                continue  # a peer
            program = make_program(row.name, case, self.memory)
            try:
                row.kernels = list_kernels(program.step, case.pool, program.operands)
            except Exception as error:  # it is for insight: nothing depends on it
                say(f"B={case.batch} {row.name}: CUPTI: {one_line(error)}")
        self.report.write()

    def _errors(self) -> None:
        for error in measure_errors(self.settings):
            self.report.errors.append(error)
            self.report.write()
            if not error.ok:
                found = error.problem or f"{error.states:.1e}, expected {error.bound:.1e}"
                say(f"state error of {error.method} on {error.tree}, {error.kind}: {found}")
            if self.clock.over:
                say("the time limit is reached: the table of state errors is not complete")
                return

    def _sizes(self, case: Case):
        return sizes_of(self.settings, case.batch, self.tree, self.settings.layers)

    def _tell(self, message: str) -> None:
        Console(stderr=True, highlight=False).print(f"{self.clock.elapsed:7.1f} s  {message}")

    def _tell_verdict(self, row: Row) -> None:
        worst = max((e.rms for e in row.verdict.errors.values()), default=0.0)
        state = f"error {worst:.1e}" if row.verdict.green else "RED"
        self._tell(f"B={row.batch}: {row.name} by {row.implementation}: {state}")
        for problem in row.verdict.problems:
            say(f"B={row.batch} {row.name}: {problem}")


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, or nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)


@jax.jit
def _copy(pool: jax.Array) -> jax.Array:
    return jnp.copy(pool)


def _refill(pool: jax.Array, source: jax.Array) -> jax.Array:
    """The source's values, in a pool of their own; the old one is given up first."""
    pool.delete()
    return _copy(source)


def _memory() -> int:
    """Bytes of outputs that may be alive at once: a part of the device's memory."""
    statistics = jax.devices()[0].memory_stats() or {}
    return int(0.4 * statistics.get("bytes_limit", 5e9))


def copy_bytes() -> int:
    """Far larger than any cache."""
    return 2**31 if jax.devices()[0].platform == "gpu" else 2**26
