"""What the experiments on the laboratory share: checked benches, rows, and pooled numbers."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from treejax.ablation.base import Context, Say
from treejax.ablation.lab import Bench, compile_together
from treejax.ablation.lab_gate import Truth, Verdict, check
from treejax.ablation.lab_operands import Sizes
from treejax.cli.kernels import choose_implementation

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
        found = f"error {verdict.outputs.rms:.1e}" if verdict.green else f"RED, {verdict.problem}"
        say(f"{bench.name}: {found}")
    return verdicts


def queue_bytes() -> int:
    """Bytes of results that calls may keep alive while the device has not come to them."""
    statistics_of = jax.devices()[0].memory_stats() or {}
    return int(0.2 * statistics_of.get("bytes_limit", 5e9))


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


def by_cell(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows by arm and the given keys, in the order in which they first came."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
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
