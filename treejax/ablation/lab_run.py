"""What the experiments on the laboratory share: checked benches, rows, and pooled numbers."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from treejax.ablation.base import GREEN, NOT_RUN, RED, Context, Row, Say
from treejax.ablation.lab import (
    Bench,
    carry_bytes,
    compile_together,
    does_not_fit,
    needed_bytes,
)
from treejax.ablation.lab_arms import make_arm
from treejax.ablation.lab_gate import Truth, Verdict, check
from treejax.ablation.lab_operands import Sizes
from treejax.ablation.rows import is_time
from treejax.cli.kernels import choose_implementation
from treejax.policies import Policy

MIB = 2**20


def check_benches(
    benches: Sequence[Bench],
    truth: Truth,
    split: bool,
    say: Say,
) -> dict[str, Verdict]:
    """Compile all benches in threads, then hold each against float64; by name.

    ``split`` compiles verify and publish apart too and checks both ways to run a step.
    """
    problems = compile_together(benches, split, lambda name: say(f"compile {name}"))
    verdicts: dict[str, Verdict] = {}
    for bench in benches:
        problem = problems.get(bench.name)
        if problem is not None:
            verdicts[bench.name] = Verdict.failed(problem)
        else:
            verdicts[bench.name] = check(bench, truth, together=True)
            if split and verdicts[bench.name].green:
                verdicts[bench.name] = check(bench, truth, together=False)
        verdict = verdicts[bench.name]
        error = f"error {verdict.outputs.rms:.1e}"
        say(f"{bench.name}: {error if verdict.green else said(verdict)}")
    return verdicts


def said(verdict: Verdict) -> str:
    """A verdict that is not green, for the user."""
    return f"{verdict.gate.upper()}, {verdict.problem}"


def queue_bytes() -> int:
    """Bytes of results that calls may keep alive while the device has not come to them."""
    statistics_of = jax.devices()[0].memory_stats() or {}
    return int(0.2 * statistics_of.get("bytes_limit", 5e9))


def hide_red(rows: Iterable[Row]) -> list[Row]:
    """The rows as they may be shown: an arm that is red anywhere is red everywhere, without times.

    An arm that computes something else at one tree, batch or repeat is not the arm that was to be
    timed at the others.
    """
    rows = list(rows)
    red = {row["arm"]: row["problem"] for row in reversed(rows) if row["gate"] == RED}
    made = []
    for row in rows:
        if row["arm"] in red:
            row = {name: value for name, value in row.items() if not is_time(name)}
            if row["gate"] not in (RED, NOT_RUN):
                row |= {"gate": RED, "problem": red[row["arm"]]}
        made.append(row)
    return made


def leading(rows: Sequence[Row]) -> Row:
    """The row that speaks for a cell's repeats: a red one, else a green one, else the first."""
    for gate in (RED, GREEN):
        for row in rows:
            if row["gate"] == gate:
                return row
    return rows[0]


def pooled(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, float | None]:
    """Median and range over the repeats of a measure that green rows have."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    return {
        name: statistics.median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def by_cell(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by arm and the given keys, in the order in which they first came."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], *(row[key] for key in keys)), []).append(row)
    return groups


def shown(value: Any, form: str = ".3g") -> str:
    """A cell of a table: nothing where there is no number."""
    if value is None or value == "":
        return ""
    return format(value, form) if isinstance(value, int | float) else str(value)


def implementation_of(context: Context, sizes: Sizes, capacity: int) -> str:
    """What runs: "xla", "mosaic_gpu" or "interpret"."""
    asked = context.implementation
    return choose_implementation(asked, sizes.config, capacity).implementation


def make_policies(
    arms: Iterable[str], context: Context, sizes: Sizes, capacity: int
) -> dict[str, Policy]:
    """The policy of every arm, on what runs trees of the capacity."""
    implementation = implementation_of(context, sizes, capacity)
    return {arm: make_arm(arm, implementation, sizes.dtype) for arm in arms}


def named_bytes(policy: Policy, sizes: Sizes, capacity: int, batch: int) -> dict[str, int]:
    """What an arm keeps and fills, by name, for the plan."""
    named = policy.buffers(sizes.config, capacity, batch)
    return {"carry": carry_bytes(policy, sizes, batch)} | named


def unfit(
    arm: str,
    policies: Mapping[str, Policy],
    sizes: Sizes,
    batch: int,
    capacity: int,
    available: int | None,
) -> str | None:
    """Why an arm does not fit beside the carries of all other ``policies``, which are held at the
    same time so that their rounds interleave; None if it does."""
    others = sum(carry_bytes(policies[x], sizes, batch) for x in policies if x != arm)
    return does_not_fit(needed_bytes(policies[arm], sizes, batch, capacity) + others, available)
