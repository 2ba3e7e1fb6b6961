"""When the state is written: at once, inside the next verify, or every few commits.

One closed form, the masked solve, with three times of writing (TreeWY's untested explanation of its
gap to ReplaySSM): ``wy`` writes at each publish, ``fused`` within the next verify, ``ring`` after L
commits. By batch size, in milliseconds a step and in the bytes that the byte model moves.

A small version for a CPU, in about half a minute: the TOML with two layers of two heads, ``batches
= [1, 2]``, ``dtype = "float32"``, and

    python -m treejax.ablate small.toml --out runs/write_timing --implementation xla
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from treejax.ablation.base import NOT_RUN, Cell, Context, Row
from treejax.ablation.byte_model import form_of, traffic_of
from treejax.ablation.lab import device_bytes, rows_for
from treejax.ablation.lab_arms import check_arms
from treejax.ablation.lab_figures import draw_lines
from treejax.ablation.lab_operands import Sizes, draw
from treejax.ablation.lab_run import (
    by_cell,
    hide_red,
    leading,
    make_policies,
    named_bytes,
    pooled,
    said,
    shown,
    unfit,
)
from treejax.ablation.lab_sweep import (
    Group,
    check_group,
    compile_groups,
    held,
    make_group,
    step_measures,
    time_group,
)
from treejax.ablation.lab_timing import make_lead
from treejax.ablation.lab_trees import Shape, make_shape
from treejax.ablation.measured import write_places
from treejax.config import from_mapping
from treejax.policies import Policy


@dataclasses.dataclass(frozen=True)
class WriteTiming:
    """The experiment's settings.

    Attributes:
      published: rows of the accepted path: the root and the accepted candidates.
      gated: steps in a row that the gate compares; more than the longest ring has commits, so that
        its write is among them.
      The others are those of ``mechanism``.
    """

    name: ClassVar[str] = "write_timing"
    options: ClassVar[frozenset[str]] = frozenset({"implementation"})
    always: ClassVar[tuple[str, ...]] = ()
    ends_itself: ClassVar[bool] = True

    seed: int
    repeats: int
    arms: tuple[str, ...]
    batches: tuple[int, ...]
    sizes: Sizes
    tree: str = "hydra27"
    capacity: int = 32
    most_depth: int = 11
    published: int = 6
    gated: int = 10
    warm_up: int = 20
    rounds: int = 25
    memory_gib: float = 0.0

    @classmethod
    def from_toml(cls, table: dict[str, Any], where: str) -> "WriteTiming":
        made = from_mapping(cls, table, where)
        check_arms(made.arms, where)
        if not 1 <= made.published <= len(made.shape.deepest):
            raise ValueError(
                f"{where}: published is {made.published}, expected 1..{len(made.shape.deepest)}, "
                f"the rows of the longest path of {made.tree}"
            )
        return made

    @property
    def shape(self) -> Shape:
        return make_shape(self.tree, self.capacity, self.most_depth)

    def _policies(self, context: Context) -> dict[str, Policy]:
        return make_policies(self.arms, context, self.sizes, self.capacity)

    def cells(self, context: Context) -> list[Cell]:
        made = []
        for batch in self.batches:
            for arm, policy in self._policies(context).items():
                sizes = named_bytes(policy, self.sizes, self.capacity, batch)
                made += [Cell(arm, {"batch": batch}, r, sizes) for r in range(self.repeats)]
        return made

    def run(self, context: Context, cells: Sequence[Cell], done: Sequence[Row]) -> Iterator[Row]:
        available, made = device_bytes(self.memory_gib), self._policies(context)
        policies = {cell.arm: made[cell.arm] for cell in cells}
        fitting: dict[int, list[Cell]] = {}
        for cell in cells:
            batch = int(cell.key["batch"])
            where = self.sizes, batch, self.capacity
            if problem := unfit(cell.arm, policies, *where, available):
                yield cell.row(NOT_RUN, problem)
            else:
                fitting.setdefault(batch, []).append(cell)
        if not fitting:
            return
        first = next(iter(policies.values()))
        rows = rows_for(first, self.capacity)
        drawn = draw(self.sizes, max(fitting), rows, self.seed, first.implementation)
        groups = {}
        for batch, mine in fitting.items():
            wanted = {cell.arm: policies[cell.arm] for cell in mine}
            groups[batch] = make_group(wanted, drawn, batch, self.capacity, self.most_depth)
        compile_groups(list(groups.values()), context.say)
        lead = make_lead()
        for at, (batch, mine) in enumerate(fitting.items()):
            context.advance(f"batch {batch}", at, len(fitting))
            with held(groups.pop(batch)) as group:  # and its operands
                yield from self._run_batch(context, group, mine, lead)
            if context.over():
                return

    def _run_batch(
        self, context: Context, group: Group, cells: Sequence[Cell], lead: Any
    ) -> Iterator[Row]:
        shape = self.shape
        path = shape.deepest[: self.published]
        steps = [group.step(shape, shape.deepest)]
        steps += [group.step(shape, path)] * (self.gated - 1)
        verdicts = check_group(group, steps)
        for cell in cells:
            verdict = verdicts[cell.arm]
            if not verdict.green:
                context.say(f"{cell.arm} at batch {group.batch}: {said(verdict)}")
                yield verdict.row(cell)
        green = [arm for arm, verdict in verdicts.items() if verdict.green]
        for repeat in sorted({cell.repeat for cell in cells}):
            mine = {c.arm: c for c in cells if c.repeat == repeat and c.arm in green}
            if not mine:
                continue
            again = {"step": [group.step(shape, path)]}
            times = time_group(group, list(mine), again, lead, self.warm_up, self.rounds)
            for arm, cell in mine.items():
                bench, time = group.benches[arm], times[arm, "step"]
                if isinstance(time, str):
                    yield cell.row(NOT_RUN, time)
                    continue
                moved = self._moved(bench.policy, group.batch)
                made = step_measures(time, bench) | {"model_mb": moved / 1e6}
                yield verdicts[arm].row(cell, made)
            if context.over():
                return

    def _moved(self, policy: Policy, batch: int) -> int:
        """Bytes of a step under the byte model."""
        traffic = traffic_of(self.sizes, policy, self.shape, batch, self.published)
        return traffic.bytes(form_of(policy.name, policy.implementation))

    def summary(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        made = []
        for (arm, batch), mine in by_cell(hide_red(rows), ("batch",)).items():
            first = leading(mine)
            line = {"arm": arm, "batch": batch, "gate": first["gate"], "problem": first["problem"]}
            line |= pooled(mine, "step_ms")
            line["model_mb"] = first.get("model_mb")
            line["output_error"] = first.get("output_error")
            line["state_error"] = first.get("state_error")
            made.append(line)
        return made

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        lines = self.summary(rows)
        batches = sorted({line["batch"] for line in lines})
        made = []
        for title, name, form in (
            ("ms a step", "step_ms", ".3g"),
            ("MB moved by the model", "model_mb", ",.4g"),
        ):
            table = Table(title=f"{title}, {self.tree}, {self.published} rows published")
            table.add_column("arm")
            for batch in batches:
                table.add_column(f"B={batch}", justify="right")
            for arm in dict.fromkeys(line["arm"] for line in lines):
                mine = {line["batch"]: line for line in lines if line["arm"] == arm}
                texts = [
                    shown(mine[b].get(name), form) or str(mine[b]["gate"]) if b in mine else ""
                    for b in batches
                ]
                table.add_row(arm, *texts)
            made.append(table)
        return made

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        write_places(rows, self.sizes, out, self.shape.size)
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for line in self.summary(rows):
            if line["step_ms"] is None:
                continue
            for title, value in (
                ("ms a step and sequence", line["step_ms"] / line["batch"]),
                ("GB/s that the model's bytes make", line["model_mb"] / line["step_ms"]),
            ):
                points = panels.setdefault(title, {}).setdefault(line["arm"], [])
                points.append((line["batch"], value))
        draw_lines(out / "write_timing", panels, "sequences")
