"""Groups of benches that share operands: what a sweep over trees runs at one batch and capacity."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from pallas_kernels.bench.timing import Lead
from treejax.ablation.base import Row, Say
from treejax.ablation.compilations import count_compilations
from treejax.ablation.lab import Bench, Step, compile_together, make_step, rows_for
from treejax.ablation.lab_gate import Truth, Verdict, check
from treejax.ablation.lab_operands import Drawn
from treejax.ablation.lab_run import queue_bytes
from treejax.ablation.lab_timing import Time, measure, time_step
from treejax.ablation.lab_trees import Shape, make_shape
from treejax.policies import Policy

RECORDED = 32
"""Random trees that a program is run over while compilations are counted."""


@dataclasses.dataclass
class Group:
    """Benches by arm, all of one batch and capacity."""

    batch: int
    capacity: int
    rows: int
    most_depth: int
    benches: dict[str, Bench]
    problems: dict[str, str]

    def step(self, shape: Shape, published: Sequence[int]) -> Step:
        return make_step(shape, published, self.batch, self.rows, self.most_depth)

    def release(self) -> None:
        for bench in self.benches.values():
            bench.release()


def make_group(
    policies: Mapping[str, Policy], drawn: Drawn, batch: int, capacity: int, most_depth: int
) -> Group:
    """Benches of the policies on the first sequences and rows of the operands, not compiled."""
    rows = rows_for(next(iter(policies.values())), capacity)
    cut = drawn.cut(batch, rows)
    seen = make_step(Shape("root", (-1,)), [0], batch, rows, most_depth)
    benches = {arm: Bench(arm, policy, cut, seen) for arm, policy in policies.items()}
    return Group(batch, capacity, rows, most_depth, benches, {})


def compile_groups(groups: Sequence[Group], say: Say) -> None:
    """Compile the step of every bench of all groups in threads; problems are left in the groups."""
    for group in groups:
        for arm, bench in group.benches.items():
            bench.name = f"{arm} B={group.batch} N={group.capacity}"
    benches = [bench for group in groups for bench in group.benches.values()]
    problems = compile_together(benches, False, lambda name: say(f"compile {name}"))
    for group in groups:
        for arm, bench in group.benches.items():
            if bench.name in problems:
                group.problems[arm] = problems[bench.name]


def check_group(group: Group, steps: Sequence[Step]) -> dict[str, Verdict]:
    """Verdicts by arm over the steps, each in one program; arms that did not compile are failed."""
    drawn = next(iter(group.benches.values())).drawn
    truth = Truth(drawn, steps)
    verdicts = {}
    for arm, bench in group.benches.items():
        if arm in group.problems:
            verdicts[arm] = Verdict.failed(group.problems[arm])
        else:
            verdicts[arm] = check(bench, truth, together=True)
    return verdicts


def time_group(
    group: Group,
    arms: Sequence[str],
    steps: Mapping[str, Sequence[Step]],
    lead: Lead | None,
    warm_up: int,
    rounds: int,
) -> dict[tuple[str, str], Time | str]:
    """By (arm, label) the times, or why there are none: every arm over every labelled list of
    steps, all interleaved."""
    pairs = [(arm, label) for label in steps for arm in arms]
    entries = {
        (arm, label): time_step(group.benches[arm], steps[label], queue_bytes(), label)
        for arm, label in pairs
    }
    times = measure(list(entries.values()), lead, warm_up, rounds, lambda done: None)
    return {pair: times[entry.name] for pair, entry in entries.items()}


def compilations_over_trees(bench: Bench, steps: Sequence[Step]) -> int:
    """How many programs JAX compiles while a bench runs the steps, all of other trees and paths."""
    bench.step(steps[0])
    with count_compilations() as seen:
        for step in steps:
            bench.step(step)
        bench.wait()
    return sum(seen.values())


def random_steps(group: Group, seed: int, count: int = RECORDED) -> list[Step]:
    """Steps over random trees of any size up to the capacity, each publishing its deepest path."""
    made = []
    for i in range(count):
        size = 1 + i * (group.capacity - 1) // max(1, count - 1)
        shape = make_shape("random", size, group.most_depth, seed + i)
        made.append(group.step(shape, shape.deepest))
    return made


@contextlib.contextmanager
def held(group: Group) -> Iterator[Group]:
    """The group, whose carries are given up at the end."""
    try:
        yield group
    finally:
        group.release()


def step_measures(time: Time, bench: Bench) -> Row:
    """What every sweep's row says of a green cell beside its errors."""
    counted = {"rounds": time.rounds, "calls": time.calls}
    return time.measures("step") | counted | {"implementation": bench.policy.implementation}
