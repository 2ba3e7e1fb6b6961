"""Wider and wider full trees: what is stored, what fits, what a step takes, what is accepted.

TreeWY's sweep (arXiv 2608.20961): trees in which every node of depth d has w_d children, (1, 1, 1)
to (3, 3, 3), and on to 63 and 127 nodes. One program serves all trees of a capacity; while random
trees change under it, compilations are counted, and one is enough to make the row red.

Acceptance is measured with a model: its MTP head drafts each width greedily and the text must be
plain decoding's.

A small version for a CPU: the TOML with two layers of two heads, two widths, ``dtype = "float32"``
and no ``acceptance`` table, and

    python -m treejax.ablate small.toml --out runs/width_sweep --implementation xla
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from treejax.ablation.acceptance import Acceptance, acceptance_rows
from treejax.ablation.base import NOT_RUN, RED, Cell, Context, Row
from treejax.ablation.lab import (
    GIB,
    device_bytes,
    rows_for,
    sequences_that_fit,
)
from treejax.ablation.lab_arms import check_arms
from treejax.ablation.lab_figures import draw_lines
from treejax.ablation.lab_operands import Sizes, draw
from treejax.ablation.lab_run import (
    MIB,
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
    compilations_over_trees,
    compile_groups,
    held,
    make_group,
    random_steps,
    step_measures,
    time_group,
)
from treejax.ablation.lab_timing import make_lead
from treejax.ablation.lab_trees import Shape, make_shape
from treejax.config import from_mapping
from treejax.policies import Policy

ACCEPTANCE = "acceptance"


@dataclasses.dataclass(frozen=True)
class WidthSweep:
    """The experiment's settings.

    Attributes:
      widths: children by depth, "2,2,2"; each tree runs in the smallest capacity that holds it.
      fit_gib, model_gib: a device's memory and what weights take of it, for the sequences that fit;
        recurrent state and verify buffers are counted, attention caches are not.
      acceptance: the model's part, left out without it.
      The others are those of ``mechanism``.
    """

    name: ClassVar[str] = "width_sweep"
    options: ClassVar[frozenset[str]] = frozenset(
        {"implementation", "wheel", "checkpoint", "dtype"}
    )
    always: ClassVar[tuple[str, ...]] = ()
    ends_itself: ClassVar[bool] = True

    seed: int
    repeats: int
    arms: tuple[str, ...]
    widths: tuple[str, ...]
    sizes: Sizes
    capacities: tuple[int, ...] = (8, 16, 32, 64, 128)
    most_depth: int = 7
    batch: int = 1
    warm_up: int = 10
    rounds: int = 10
    memory_gib: float = 0.0
    fit_gib: float = 141.0
    model_gib: float = 27.0
    acceptance: Acceptance | None = None

    @classmethod
    def from_toml(cls, table: dict[str, Any], where: str) -> "WidthSweep":
        table = dict(table)
        acceptance = table.pop("acceptance", None)
        made = from_mapping(cls, table, where)
        if acceptance is not None:
            found = from_mapping(Acceptance, acceptance, f"{where}.acceptance")
            prompts = str(Path(where).parent / found.prompts)
            found = dataclasses.replace(found, prompts=prompts)
            made = dataclasses.replace(made, acceptance=found)
        check_arms(made.arms, where)
        for width in made.widths:
            made.capacity_of(made.shape(width))
        return made

    def shape(self, width: str) -> Shape:
        return make_shape(width, 0, self.most_depth)

    def capacity_of(self, shape: Shape) -> int:
        fitting = [capacity for capacity in self.capacities if capacity >= shape.size]
        if not fitting:
            largest = max(self.capacities)
            raise ValueError(f"tree {shape.name} has {shape.size} nodes, at most {largest} fit")
        return min(fitting)

    def _policies(self, context: Context) -> dict[str, Policy]:
        return make_policies(self.arms, context, self.sizes, max(self.capacities))

    def cells(self, context: Context) -> list[Cell]:
        made = []
        for width in self.widths:
            shape = self.shape(width)
            capacity = self.capacity_of(shape)
            key = {"widths": width, "nodes": shape.size, "capacity": capacity, "batch": self.batch}
            for arm, policy in self._policies(context).items():
                sizes = named_bytes(policy, self.sizes, capacity, self.batch)
                made += [Cell(arm, dict(key), r, sizes) for r in range(self.repeats)]
        if self.acceptance is not None:
            made += [Cell(ACCEPTANCE, {"widths": w}, 0) for w in self.acceptance.widths]
        return made

    def run(self, context: Context, cells: Sequence[Cell], done: Sequence[Row]) -> Iterator[Row]:
        timed = [cell for cell in cells if cell.arm != ACCEPTANCE]
        drafted = [cell for cell in cells if cell.arm == ACCEPTANCE]
        yield from self._run_policies(context, timed)
        if not drafted or self.acceptance is None or (timed and context.over()):
            return
        for row in acceptance_rows(self.acceptance, context, drafted):
            yield row
            if context.over():
                return

    def _run_policies(self, context: Context, cells: Sequence[Cell]) -> Iterator[Row]:
        available, made = device_bytes(self.memory_gib), self._policies(context)
        policies = {cell.arm: made[cell.arm] for cell in cells}
        fitting: dict[int, list[Cell]] = {}
        for cell in cells:
            capacity = int(cell.key["capacity"])
            where = self.sizes, self.batch, capacity
            if problem := unfit(cell.arm, policies, *where, available):
                yield cell.row(NOT_RUN, problem)
            else:
                fitting.setdefault(capacity, []).append(cell)
        if not fitting:
            return
        first = next(iter(policies.values()))
        rows = rows_for(first, max(fitting))
        drawn = draw(self.sizes, self.batch, rows, self.seed, first.implementation)
        groups = {}
        for capacity, mine in fitting.items():
            wanted = {cell.arm: policies[cell.arm] for cell in mine}
            groups[capacity] = make_group(wanted, drawn, self.batch, capacity, self.most_depth)
        compile_groups(list(groups.values()), context.say)
        lead = make_lead()
        for at, (capacity, mine) in enumerate(sorted(fitting.items())):
            context.advance(f"capacity {capacity}", at, len(fitting))
            with held(groups.pop(capacity)) as group:  # and its operands
                yield from self._run_capacity(context, group, mine, lead)
            if context.over():
                return

    def _run_capacity(
        self, context: Context, group: Group, cells: Sequence[Cell], lead: Any
    ) -> Iterator[Row]:
        """Gate every width, count compilations over random trees, then time all widths together."""
        shapes = {str(cell.key["widths"]): self.shape(str(cell.key["widths"])) for cell in cells}
        paths = {width: group.step(shape, shape.deepest) for width, shape in shapes.items()}
        verdicts = check_group(group, [step for step in paths.values() for _ in range(3)])
        others = random_steps(group, self.seed)
        counted: dict[str, int] = {}
        for arm, verdict in verdicts.items():
            if verdict.green:
                counted[arm] = compilations_over_trees(group.benches[arm], others)
            else:
                context.say(f"{arm} in {group.capacity} rows: {said(verdict)}")
        for cell in cells:
            verdict, compiled = verdicts[cell.arm], counted.get(cell.arm, 0)
            if not verdict.green:
                yield verdict.row(cell)
            elif compiled:
                problem = f"{compiled} compilations while trees changed, expected 0"
                yield cell.row(RED, problem, {"compilations": compiled})
        green = [arm for arm, compiled in counted.items() if not compiled]
        for repeat in sorted({cell.repeat for cell in cells}):
            mine = [cell for cell in cells if cell.repeat == repeat and cell.arm in green]
            if not mine:
                continue
            labelled = {width: [step] for width, step in paths.items()}
            arms = list(dict.fromkeys(cell.arm for cell in mine))
            times = time_group(group, arms, labelled, lead, self.warm_up, self.rounds)
            for cell in mine:
                bench, width = group.benches[cell.arm], str(cell.key["widths"])
                time = times[cell.arm, width]
                if isinstance(time, str):
                    yield cell.row(NOT_RUN, time)
                    continue
                made = step_measures(time, bench) | {"compilations": 0, "trees": len(others)}
                made |= self._memory(bench.policy, shapes[width], group.capacity)
                yield verdicts[cell.arm].row(cell, made)
            if context.over():
                return

    def _memory(self, policy: Policy, shape: Shape, capacity: int) -> Row:
        """Stored blocks as TreeWY counts them, the scratch allocated, and sequences that fit."""
        config, layers = self.sizes.config, self.sizes.layers
        buffers = policy.buffers(config, capacity)
        cuts = buffers.get("cut_states", 0) / (layers * self.sizes.state_bytes)
        free = int((self.fit_gib - self.model_gib) * GIB)
        return {
            "stored_blocks": shape.size + 1 if "states" in buffers else 1 + cuts,
            "scratch_mib": self.batch * sum(buffers.values()) / MIB,
            "sequences": sequences_that_fit(policy, self.sizes, capacity, free),
        }

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        made = []
        for (arm, width), mine in by_cell(hide_red(rows), ("widths",)).items():
            first = leading(mine)
            line = {name: first.get(name) for name in ("arm", "widths", "nodes", "capacity")}
            line["nodes"] = self.shape(width).size
            line |= {"gate": first["gate"], "problem": first["problem"]}
            if arm != ACCEPTANCE:
                line |= pooled(mine, "step_ms")
            names = "stored_blocks scratch_mib sequences compilations trees acceptance_length"
            made.append(line | {name: first.get(name) for name in names.split()})
        return made

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        lines = self.summary(rows)
        widths = [w for w in self.widths if any(line["widths"] == w for line in lines)]
        made = []
        for title, name, form in TABLES:
            mine = [line for line in lines if line.get(name) is not None]
            if not mine:
                continue
            table = Table(title=title)
            table.add_column("arm")
            for width in widths:
                table.add_column(f"{width} ({self.shape(width).size})", justify="right")
            for arm in dict.fromkeys(line["arm"] for line in lines):
                cells = {line["widths"]: line for line in lines if line["arm"] == arm}
                if any(cells[w].get(name) is not None for w in cells):
                    texts = [shown(cells.get(w, {}).get(name), form) for w in widths]
                    table.add_row(arm, *texts)
            made.append(table)
        return made

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for line in self.summary(rows):
            for title, name, _ in TABLES[:3]:
                if line.get(name) is not None:
                    points = panels.setdefault(title, {}).setdefault(line["arm"], [])
                    points.append((line["nodes"], line[name]))
        draw_lines(out / "width_sweep", panels, "nodes of a full tree")


TABLES = (
    ("ms a step", "step_ms", ".3g"),
    ("full states a layer while verifying", "stored_blocks", ".3g"),
    ("verify scratch, MiB", "scratch_mib", ",.1f"),
    ("sequences that fit", "sequences", ",d"),
    ("compilations while trees changed", "compilations", "d"),
    ("acceptance length, mtp, greedy", "acceptance_length", ".3f"),
)
