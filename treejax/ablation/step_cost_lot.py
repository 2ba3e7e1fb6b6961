"""A few arms of ``step_cost`` and plain decoding: compiled, checked and timed together."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treejax.ablation.base import GREEN, NOT_RUN, RED, Cell, Context, Row
from treejax.ablation.lab import could_not_run, one_line
from treejax.ablation.lab_timing import make_lead
from treejax.ablation.step_cost_arms import PLAIN
from treejax.ablation.step_cost_bench import Bench
from treejax.ablation.step_cost_gate import Verdict, check
from treejax.ablation.step_cost_report import ERRORS
from treejax.ablation.step_cost_rows import memory_of, row_measures
from treejax.ablation.step_cost_timing import make_entries, measure
from treejax.ablation.step_cost_verify import attention_acts

IDLE = "verify attends through XLA here anyway"


@dataclasses.dataclass
class Lot:
    """Benches of one batch and size of state, their rounds interleaved with plain's."""

    plain: Bench
    benches: list[Bench]
    contexts: tuple[int, ...]
    phases: bool
    calls: int
    rounds: int
    bandwidth: float

    @property
    def every(self) -> list[Bench]:
        return [self.plain, *self.benches]

    def run(self, context: Context, cells: Sequence[Cell]) -> Iterator[Row]:
        """The rows of ``cells``; states are given up at the end."""
        try:
            yield from self._run(context, cells)
        finally:
            for bench in self.every:
                bench.release()

    def _run(self, context: Context, cells: Sequence[Cell]) -> Iterator[Row]:
        problems = {bench.name: IDLE for bench in self.benches if _is_idle(bench)}
        acting = [bench for bench in self.every if bench.name not in problems]
        problems |= compile_benches(acting, self._split, context.say)
        memory = {b.name: self._memory(b, problems) for b in self.every}
        verdicts = self._check(context, problems)
        green = [bench for bench in self.every if self._problem(bench, problems, verdicts) is None]
        for cell in cells:
            problem = self._problem(self._bench(cell), problems, verdicts)
            if problem is not None:
                yield _failed(cell, problem, verdicts.get(cell.arm))
        for repeat in sorted({cell.repeat for cell in cells}):
            mine = [c for c in cells if c.repeat == repeat and self._bench(c) in green]
            if mine:
                yield from self._time(context, mine, verdicts, memory)

    def _time(
        self,
        context: Context,
        cells: Sequence[Cell],
        verdicts: dict[str, Verdict],
        memory: dict[str, Row],
    ) -> Iterator[Row]:
        """One repeat of green cells, plain beside them whether it is asked for or not."""
        entries = []
        for bench in self.every:
            if bench is self.plain or any(cell.arm == bench.name for cell in cells):
                bench.hold()
                entries += make_entries(bench, self.contexts, self._split(bench))

        def seen(done: int) -> None:
            context.advance(f"rounds of repeat {cells[0].repeat}", done, self.rounds)

        times, lacking = measure(entries, make_lead(), self.calls, self.rounds, seen)
        for cell in cells:
            problem = lacking.get(cell.arm) or lacking.get(PLAIN)
            if problem is not None:
                yield cell.row(NOT_RUN, problem)
                continue
            measures = row_measures(self._bench(cell), cell, times, entries, self.bandwidth)
            measures = verdicts[cell.arm].measures | measures | memory[cell.arm]
            yield cell.row(GREEN, None, measures)

    def _check(self, context: Context, problems: dict[str, str]) -> dict[str, Verdict]:
        """A verdict for every arm that compiled, if plain did."""
        made = {}
        for bench in self.every:
            if bench.name in problems or PLAIN in problems:
                continue
            try:
                verdict = check(bench, self.plain, min(self.contexts), self._split(bench))
            except Exception as error:  # one arm that fails must not cost the others their rows
                bench.release()
                verdict = Verdict(problems=[one_line(error)])
            made[bench.name] = verdict
            context.say(f"{bench.name}: {_said(verdict)}")
        return made

    def _problem(
        self, bench: Bench, problems: dict[str, str], verdicts: dict[str, Verdict]
    ) -> str | None:
        """Why an arm is not timed: its own problem, or that of what it is held against."""
        if bench.name in problems:
            return problems[bench.name]
        if bench.name in verdicts and verdicts[bench.name].problem is not None:
            return verdicts[bench.name].problem
        if bench is self.plain:
            return None
        problem = self._problem(self.plain, problems, verdicts)
        return None if problem is None else f"plain decoding fails: {problem}"

    def _memory(self, bench: Bench, problems: dict[str, str]) -> Row:
        if bench.name in problems:
            return {}
        try:
            return memory_of(bench)
        except Exception as error:  # no room, mostly: this arm's row says why, the others go on
            bench.release()
            problems[bench.name] = one_line(error)
            return {}

    def _split(self, bench: Bench) -> bool:
        """Whether phases are compiled, checked and timed; an arm with a change undone has its
        base's."""
        return self.phases and bench.arm.off is None

    def _bench(self, cell: Cell) -> Bench:
        return next(bench for bench in self.every if bench.name == cell.arm)


def _is_idle(bench: Bench) -> bool:
    """Whether an arm would undo what is not there."""
    if bench.arm.off != "attention":
        return False
    return not attention_acts(bench.abstract_state(), bench.abstract_tree())


def compile_benches(
    benches: Sequence[Bench], split: Callable[[Bench], bool], say: Callable[[str], None]
) -> dict[str, str]:
    """Compile every program that is not there yet, in threads: by arm, why one failed.

    Tracing holds Python's lock, compiling does not: each program compiles while the next is traced.
    """
    problems: dict[str, str] = {}
    with ThreadPoolExecutor() as pool:
        pending = []
        for bench in benches:
            if bench.compile_s:
                continue
            say(f"compile {bench.name}")
            try:
                for program, job in bench.jobs(split(bench)).items():
                    started = time.perf_counter()
                    lowered = job()
                    traced = time.perf_counter() - started
                    task = pool.submit(_compile, bench, program, lowered, traced)
                    pending.append((bench.name, task))
            except Exception as error:  # one arm that fails must not cost the others their rows
                problems[bench.name] = one_line(error)
        for name, task in pending:
            try:
                task.result()
            except Exception as error:  # as above, found while compiling
                problems.setdefault(name, one_line(error))
    return problems


def _compile(bench: Bench, program: str, lowered: Any, traced: float) -> None:
    started = time.perf_counter()
    compiled = lowered.compile()
    bench.keep(program, traced + time.perf_counter() - started, compiled)


def _said(verdict: Verdict) -> str:
    found = verdict.measures
    errors = [f"{name} {found[name]:.1e}" for name in ERRORS if name in found]
    return ", ".join(errors) if verdict.problem is None else f"RED, {verdict.problem}"


def _failed(cell: Cell, problem: str, verdict: Verdict | None) -> Row:
    """A row without times: not run where memory was lacking, or where nothing would change."""
    gate = NOT_RUN if problem == IDLE or could_not_run(problem) else RED
    return cell.row(gate, problem, None if verdict is None else verdict.measures)
