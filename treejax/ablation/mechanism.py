"""The table of mechanisms: every policy on the same operands at a 27B model's recurrent shapes.

LumoTree's protocol (arXiv 2609.23900): 48 layers of 48 value and 16 key heads x 128 x 128, 28 nodes
in 32 rows, every node in turn as the accepted one; verify, publish and both, the buffers by name,
and errors against float64. Nothing is timed that has not passed the gate.

On a CPU, in about half a minute, the same table at small shapes: copy ``configs/ablations/
mechanism.toml`` with ``layers = 2, value_heads = 2, key_heads = 1``, ``dtype = "float32"``,
``rounds = 3``, without the arms that name a precision, and run

    python -m treejax.ablate small.toml --out runs/mechanism --implementation xla
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from treejax.ablation.base import GREEN, NOT_RUN, Cell, Context, Row
from treejax.ablation.lab import (
    Bench,
    carry_bytes,
    device_bytes,
    frontiers,
    rows_for,
    sequences_that_fit,
)
from treejax.ablation.lab_arms import check_arms
from treejax.ablation.lab_figures import draw_dots
from treejax.ablation.lab_gate import Truth
from treejax.ablation.lab_operands import Sizes, draw
from treejax.ablation.lab_run import (
    MIB,
    by_cell,
    check_benches,
    hide_red,
    leading,
    make_policies,
    named_bytes,
    pooled,
    queue_bytes,
    shown,
    unfit,
)
from treejax.ablation.lab_timing import (
    Time,
    lack_of_memory,
    make_lead,
    measure,
    time_apart,
    time_step,
)
from treejax.ablation.lab_trees import make_shape
from treejax.config import from_mapping

GATED = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
"""Which frontiers the gate publishes one after the other: the deepest, then on the way up; enough
of them for a ring of four commits to be written."""


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """The experiment's settings.

    Attributes:
      most_depth: static bound on a node's depth, as a drafter of this tree gives it.
      warm_up: calls of each program before the first that counts.
      rounds: samples of each program in a repeat, interleaved.
      memory_gib: device memory; 0 for what the device says.
      model_gib: what weights and everything else take of it, for the sequences that fit beside
        them; a figure that counts recurrent state and verify buffers alone.
    """

    name: ClassVar[str] = "mechanism"
    options: ClassVar[frozenset[str]] = frozenset({"implementation"})
    always: ClassVar[tuple[str, ...]] = ()
    ends_itself: ClassVar[bool] = True

    seed: int
    repeats: int
    arms: tuple[str, ...]
    sizes: Sizes
    tree: str = "hydra27"
    capacity: int = 32
    most_depth: int = 11
    batch: int = 1
    warm_up: int = 20
    rounds: int = 25
    memory_gib: float = 0.0
    model_gib: float = 27.0

    @classmethod
    def from_toml(cls, table: dict[str, Any], where: str) -> "Mechanism":
        made = from_mapping(cls, table, where)
        check_arms(made.arms, where)
        make_shape(made.tree, made.capacity, made.most_depth)
        return made

    def cells(self, context: Context) -> list[Cell]:
        made = []
        for arm, policy in make_policies(self.arms, context, self.sizes, self.capacity).items():
            sizes = named_bytes(policy, self.sizes, self.capacity, self.batch)
            made += [Cell(arm, {"batch": self.batch}, r, sizes) for r in range(self.repeats)]
        return made

    def run(self, context: Context, cells: Sequence[Cell], done: Sequence[Row]) -> Iterator[Row]:
        available = device_bytes(self.memory_gib)
        asked = dict.fromkeys(cell.arm for cell in cells)
        policies = make_policies(asked, context, self.sizes, self.capacity)
        where = self.sizes, self.batch, self.capacity
        problems = {arm: unfit(arm, policies, *where, available) for arm in policies}
        for cell in cells:
            if problem := problems[cell.arm]:
                yield cell.row(NOT_RUN, problem)
        policies = {arm: policy for arm, policy in policies.items() if not problems[arm]}
        if not policies:
            return
        first = next(iter(policies.values()))
        rows = rows_for(first, self.capacity)
        drawn = draw(self.sizes, self.batch, rows, self.seed, first.implementation)
        shape = make_shape(self.tree, self.capacity, self.most_depth)
        steps = frontiers(shape, self.batch, rows, self.most_depth)
        truth = Truth(drawn, [steps[int(part * len(steps))] for part in GATED])
        benches = [Bench(arm, policy, drawn, steps[0]) for arm, policy in policies.items()]
        verdicts = check_benches(benches, truth, True, context.say)
        green = [bench for bench in benches if (v := verdicts.get(bench.name)) and v.green]
        for cell in cells:
            verdict = verdicts.get(cell.arm)
            if verdict is not None and not verdict.green:
                yield verdict.row(cell)
        lead = make_lead()
        for repeat in sorted({cell.repeat for cell in cells}):
            mine = {cell.arm: cell for cell in cells if cell.repeat == repeat}
            timed = [bench for bench in green if bench.name in mine]
            if not timed:
                continue
            times = self._time(context, timed, steps, lead, repeat)
            for bench in timed:
                found = times[bench.name]
                if isinstance(found, str):
                    yield mine[bench.name].row(NOT_RUN, found)
                else:
                    measures = self._measures(bench, found, available)
                    yield verdicts[bench.name].row(mine[bench.name], measures)
            if context.over():
                return

    def _time(
        self,
        context: Context,
        benches: Sequence[Bench],
        steps: Sequence[Any],
        lead: Any,
        repeat: int,
    ) -> dict[str, dict[str, Time] | str]:
        """By arm the times of "step", "verify" and "publish", or why it has none."""
        entries, problems = [], {}
        for bench in benches:
            try:
                apart = time_apart(bench, steps, queue_bytes())
            except Exception as error:  # raised again unless memory was lacking
                problems[bench.name] = lack_of_memory(error)
                bench.release()
            else:
                entries += [time_step(bench, steps, queue_bytes()), *apart]

        def seen(done: int) -> None:
            context.advance(f"rounds of repeat {repeat}", done, self.rounds)

        found = measure(entries, lead, self.warm_up, self.rounds, seen)
        made: dict[str, dict[str, Time] | str] = dict(problems)
        for bench in benches:
            if bench.name in problems:
                continue
            parts = {part: found[f"{bench.name} {part}"] for part in PARTS}
            lacking = [time for time in parts.values() if isinstance(time, str)]
            times = {part: time for part, time in parts.items() if isinstance(time, Time)}
            made[bench.name] = lacking[0] if lacking else times
        return made

    def _measures(self, bench: Bench, times: dict[str, Time], available: int | None) -> Row:
        policy, sizes = bench.policy, self.sizes
        made: Row = {"implementation": policy.implementation}
        for part in PARTS:
            made |= times[part].measures(part)
        step = times["step"]
        buffers = policy.buffers(sizes.config, self.capacity, self.batch)
        carried = carry_bytes(policy, sizes, self.batch)
        states = sizes.layers * self.batch * sizes.state_bytes
        made |= {
            "rounds": step.rounds,
            "calls": step.calls,
            "buffers_mib": sum(buffers.values()) / MIB,
            "buffers": {name: size / MIB for name, size in buffers.items()},
            "carried_factors_mib": (carried - states) / MIB,
            "temporary_mib": None if bench.temporary_bytes is None else bench.temporary_bytes / MIB,
        }
        free = (available or 0) - int(self.model_gib * MIB * 1024)
        made["sequences"] = (
            None if free <= 0 else sequences_that_fit(policy, sizes, self.capacity, free)
        )
        return made

    def summary(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        made = []
        for (arm,), mine in by_cell(hide_red(rows), ()).items():
            first = leading(mine)
            line = {"arm": arm, "gate": first["gate"], "problem": first["problem"]}
            for name in ("verify_ms", "publish_ms", "step_ms"):
                line |= pooled(mine, name)
            for name in COLUMNS:
                line[name] = first.get(name)
            for name, size in (first.get("buffers") or {}).items():
                line[f"buffer_{name}_mib"] = size
            made.append(line)
        return made

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        s = self.sizes
        table = Table(
            title=f"{s.layers} layers of {s.value_heads}/{s.key_heads} heads x {s.value_dim} x "
            f"{s.key_dim}, {s.dtype}, {self.tree} in {self.capacity} rows, batch {self.batch}"
        )
        heads = "arm|verify ms|publish ms|both ms|p10-p90|buffers MiB|output error|state error"
        for head in (*heads.split("|"), "output RMS", "state RMS", "sequences"):
            table.add_column(head, justify="left" if head == "arm" else "right")
        for line in self.summary(rows):
            if line["gate"] != GREEN:
                table.add_row(line["arm"], str(line["problem"]))
                continue
            first = next(r for r in rows if r["arm"] == line["arm"] and r["gate"] == GREEN)
            table.add_row(
                line["arm"],
                *(shown(line[name]) for name in ("verify_ms", "publish_ms", "step_ms")),
                f"{first['step_ms_p10']:.3g}-{first['step_ms_p90']:.3g}",
                shown(line["buffers_mib"], ",.1f"),
                *(shown(line[f"deepest_{name}_error"], ".2e") for name in ("output", "state")),
                *(shown(line[f"{name}_error"], ".2e") for name in ("output", "state")),
                shown(line["sequences"], ",d"),
            )
        return [table]

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        green = [line for line in self.summary(rows) if line["gate"] == GREEN]

        def ranged(name: str) -> list[tuple[float, float, float]]:
            return [(x[name], x[f"{name}_min"], x[f"{name}_max"]) for x in green]

        def single(name: str) -> list[tuple[float, float, float]]:
            return [(x[name], x[name], x[name]) for x in green]

        times = {"verify": "verify_ms", "publish": "publish_ms", "both in one": "step_ms"}
        sizes = {
            "kept between steps, beside states": "carried_factors_mib",
            "filled while verifying": "buffers_mib",
        }
        errors = {"output": "output_error", "state": "state_error"}
        draw_dots(
            out / "mechanism",
            [line["arm"] for line in green],
            {
                "ms a step": {key: ranged(name) for key, name in times.items()},
                "MiB": {key: single(name) for key, name in sizes.items()},
                "relative RMS error": {key: single(name) for key, name in errors.items()},
            },
        )


PARTS = ("verify", "publish", "step")
COLUMNS = (
    *("implementation", "buffers_mib", "carried_factors_mib", "temporary_mib", "sequences"),
    *("deepest_output_error", "deepest_state_error", "output_error", "state_error"),
)
