"""Where one policy overtakes another: nodes, shape of the tree, batch and accepted length.

One program a policy, capacity and batch; topology and path are data, and the steps of all arms of
a cell are interleaved. Beside each time stands what the byte model (reference, part C.2) takes at
the bandwidth of a copy. A cell that the device's memory cannot hold says so.

A small version for a CPU: the TOML with two layers of two heads, ``nodes = [4, 8]``, ``batches =
[1, 2]``, ``dtype = "float32"``, and

    python -m treejax.ablate small.toml --out runs/atlas --implementation xla
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from treejax.ablation import atlas_report
from treejax.ablation.base import NOT_RUN, Cell, Context, Row
from treejax.ablation.byte_model import form_of, traffic_of
from treejax.ablation.lab import device_bytes, rows_for
from treejax.ablation.lab_arms import check_arms
from treejax.ablation.lab_operands import Drawn, Sizes, draw
from treejax.ablation.lab_run import make_policies, named_bytes, unfit
from treejax.ablation.lab_sweep import (
    Group,
    check_group,
    compile_groups,
    held,
    make_group,
    step_measures,
    time_group,
)
from treejax.ablation.lab_timing import copy_bandwidth, make_lead
from treejax.ablation.lab_trees import Shape, make_shape
from treejax.ablation.measured import write_places
from treejax.config import from_mapping
from treejax.policies import Policy

DEEPEST = 0
"""Stands for the longest path in ``published``."""


@dataclasses.dataclass(frozen=True)
class Atlas:
    """The experiment's settings.

    Attributes:
      nodes, trees: every form of tree at every number of nodes; equal ones are measured once.
      published: rows of the accepted path, the root included; 0 for the longest path.
      capacities: rows of the programs; a tree runs in the smallest that holds it.
      most_depth: static bound on a node's depth, the capacity's own where that is smaller; longer
        chains are cut there, so they are left out.
      The others are those of ``mechanism``.
    """

    name: ClassVar[str] = "atlas"
    options: ClassVar[frozenset[str]] = frozenset({"implementation"})
    always: ClassVar[tuple[str, ...]] = ()
    ends_itself: ClassVar[bool] = True

    seed: int
    repeats: int
    arms: tuple[str, ...]
    nodes: tuple[int, ...]
    trees: tuple[str, ...]
    batches: tuple[int, ...]
    published: tuple[int, ...]
    sizes: Sizes
    capacities: tuple[int, ...] = (8, 32, 128)
    most_depth: int = 31
    warm_up: int = 4
    rounds: int = 3
    memory_gib: float = 0.0

    @classmethod
    def from_toml(cls, table: dict[str, Any], where: str) -> "Atlas":
        made = from_mapping(cls, table, where)
        check_arms(made.arms, where)
        if max(made.nodes) > max(made.capacities):
            raise ValueError(
                f"{where}: nodes hold {max(made.nodes)} and the largest of capacities is "
                f"{max(made.capacities)}, expected one that holds it"
            )
        if min(made.published) < 0:
            raise ValueError(f"{where}: published holds {min(made.published)}, expected 0 or more")
        made.shapes()  # refuses unknown forms
        return made

    def shapes(self) -> dict[tuple[int, str], Shape]:
        """Distinct trees by (nodes, form), smallest first."""
        made: dict[tuple[int, str], Shape] = {}
        for size in sorted(self.nodes):
            for form in self.trees:
                shape = make_shape(form, size, self.most_depth, self.seed)
                known = {other.parents for other in made.values()}
                if shape.size == size and shape.parents not in known:
                    made[size, form] = shape
        return made

    def paths(self, shape: Shape) -> list[tuple[int, ...]]:
        """Distinct paths to publish, shortest first."""
        whole = shape.deepest
        lengths = {min(n, len(whole)) if n != DEEPEST else len(whole) for n in self.published}
        return [whole[:length] for length in sorted(lengths)]

    def places(self) -> list[atlas_report.Place]:
        """All that is compared, by form of tree and length of the path."""
        made = []
        for (size, form), shape in self.shapes().items():
            for path in self.paths(shape):
                name = atlas_report.path_name(len(path), len(shape.deepest))
                made += [atlas_report.Place(size, form, batch, name) for batch in self.batches]
        order = list(self.trees)
        return sorted(made, key=lambda p: (order.index(p.tree), p.path.zfill(9), p.nodes))

    def _capacity(self, size: int) -> int:
        return min(capacity for capacity in self.capacities if capacity >= size)

    def _policies(self, context: Context) -> dict[str, Policy]:
        return make_policies(self.arms, context, self.sizes, max(self.capacities))

    def cells(self, context: Context) -> list[Cell]:
        policies, made = self._policies(context), []
        for (size, form), shape in self.shapes().items():
            capacity = self._capacity(size)
            for batch in self.batches:
                needs = {
                    arm: named_bytes(policy, self.sizes, capacity, batch)
                    for arm, policy in policies.items()
                }
                for path in self.paths(shape):
                    key: dict[str, int | str] = {
                        "nodes": size,
                        "tree": form,
                        "batch": batch,
                        "published": len(path),
                    }
                    made += [
                        Cell(arm, dict(key), repeat, needs[arm])
                        for repeat in range(self.repeats)
                        for arm in policies
                    ]
        return made

    def run(self, context: Context, cells: Sequence[Cell], done: Sequence[Row]) -> Iterator[Row]:
        available, made = device_bytes(self.memory_gib), self._policies(context)
        policies = {cell.arm: made[cell.arm] for cell in cells}
        fitting: dict[tuple[int, int], list[Cell]] = {}
        for cell in cells:
            capacity, batch = self._capacity(int(cell.key["nodes"])), int(cell.key["batch"])
            if problem := unfit(cell.arm, policies, self.sizes, batch, capacity, available):
                yield cell.row(NOT_RUN, problem)
            else:
                fitting.setdefault((capacity, batch), []).append(cell)
        if not fitting:
            return
        drawn = self._draw(policies, fitting)
        lead, bandwidth = make_lead(), copy_bandwidth()
        context.say(f"a copy moves {bandwidth / 1e9:,.0f} GB/s")
        finished = 0
        for capacity in sorted({capacity for capacity, _ in fitting}):
            groups = {
                batch: make_group(
                    {cell.arm: policies[cell.arm] for cell in mine},
                    *(drawn, batch, capacity, min(self.most_depth, capacity - 1)),
                )
                for (rows, batch), mine in sorted(fitting.items())
                if rows == capacity
            }
            compile_groups(list(groups.values()), context.say)
            for batch in list(groups):
                with held(groups.pop(batch)) as group:  # and its operands
                    mine = fitting[capacity, batch]
                    for row in self._run_group(context, group, mine, lead, bandwidth):
                        yield row
                        finished += 1
                        context.advance(f"N={capacity} B={batch}", finished, len(cells))
                if context.over():
                    return

    def _draw(self, policies: dict[str, Policy], fitting: dict[tuple[int, int], Any]) -> Drawn:
        """Operands for the largest batch and capacity; every group takes a part."""
        first = next(iter(policies.values()))
        rows = rows_for(first, max(capacity for capacity, _ in fitting))
        batch = max(batch for _, batch in fitting)
        return draw(self.sizes, batch, rows, self.seed, first.implementation)

    def _run_group(
        self,
        context: Context,
        group: Group,
        cells: Sequence[Cell],
        lead: Any,
        bandwidth: float,
    ) -> Iterator[Row]:
        """Tree after tree: gate all arms over two rounds of its paths, then time them together."""
        shapes = self.shapes()
        for size, form in dict.fromkeys((c.key["nodes"], c.key["tree"]) for c in cells):
            shape = shapes[int(size), str(form)]
            mine = [c for c in cells if (c.key["nodes"], c.key["tree"]) == (size, form)]
            steps = {len(path): group.step(shape, path) for path in self.paths(shape)}
            verdicts = check_group(group, [steps[n] for n in sorted(steps, reverse=True)] * 2)
            for cell in mine:
                if not verdicts[cell.arm].green:
                    yield verdicts[cell.arm].row(cell)
            green = [arm for arm, verdict in verdicts.items() if verdict.green]
            for repeat in sorted({cell.repeat for cell in mine}):
                wanted = [c for c in mine if c.repeat == repeat and c.arm in green]
                arms = list(dict.fromkeys(cell.arm for cell in wanted))
                lengths = sorted({int(cell.key["published"]) for cell in wanted})
                labelled = {str(n): [steps[n]] for n in lengths}
                if not arms:
                    continue
                times = time_group(group, arms, labelled, lead, self.warm_up, self.rounds)
                for cell in wanted:
                    bench = group.benches[cell.arm]
                    time = times[cell.arm, str(cell.key["published"])]
                    if isinstance(time, str):
                        yield cell.row(NOT_RUN, time)
                        continue
                    made = step_measures(time, bench)
                    made |= self._modelled(bench.policy, shape, cell, bandwidth)
                    yield verdicts[cell.arm].row(cell, made)
                if context.over():
                    return

    def _modelled(self, policy: Policy, shape: Shape, cell: Cell, bandwidth: float) -> Row:
        """The tree's figures, and the byte model's."""
        batch, published = int(cell.key["batch"]), int(cell.key["published"])
        traffic = traffic_of(self.sizes, policy, shape, batch, published)
        moved = traffic.bytes(form_of(policy.name, policy.implementation))
        return {
            "depth": shape.max_depth,
            "leaves": shape.leaves,
            "branching": shape.branching,
            "model_mb": moved / 1e6,
            "model_ms": 1e3 * moved / bandwidth,
            "copy_gb_per_s": bandwidth / 1e9,
        }

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        longest = {place: len(shape.deepest) for place, shape in self.shapes().items()}
        return atlas_report.cells_of(rows, longest)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        lines = self.summary(rows)
        return [*atlas_report.pair_tables(lines), atlas_report.unfit_table(lines)]

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        write_places(rows, self.sizes, out)
        lines = self.summary(rows)
        atlas_report.write_digest(lines, out)
        atlas_report.draw(lines, self.places(), self.arms, out)
