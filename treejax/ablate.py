"""Run an experiment: compare arms, gate before speed, keep every row.

    python -m treejax.ablate configs/ablations/quick.toml --out runs/quick
    python -m treejax.ablate configs/ablations/quick.toml --dry-run

The TOML is the experiment (``treejax.ablation`` lists the kinds). DIR gets ``rows.jsonl`` while it
runs, then ``summary.csv``, ``summary.json`` and figures; the tables go to stdout. A run that was
killed, interrupted or out of time goes on with ``--resume``. Exit status 1 if any row is red, or
missing.
"""

import argparse
import collections
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from treejax.ablation import EXPERIMENTS, Cell, Context, Experiment
from treejax.ablation.base import RED, select_arms
from treejax.ablation.figures import HINT, can_draw
from treejax.ablation.plan import plan_table
from treejax.ablation.report import (
    environment,
    file_digest,
    made_with,
    problems,
    write_summary,
)
from treejax.ablation.rows import RowFile, missing, read_rows
from treejax.cli.cache import use_compilation_cache
from treejax.cli.guard import INTERRUPTED, Parser, run_command, say
from treejax.cli.kernels import CHOICES
from treejax.cli.progress import progress
from treejax.config import read_toml
from treejax.progress import Advance

NAME = "treejax.ablate"
STATUS = (
    "Exit status: 0 every row is there and none is red; 1 a row is red, or missing because time "
    "ran out (the last line says which, --resume goes on); 2 a mistake; 130 interrupted."
)
_OPTIONS = ("wheel", "checkpoint", "dtype", "implementation", "requests")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        f"python -m {NAME}", description="Run an experiment.", epilog=STATUS, allow_abbrev=False
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="describes the experiment")
    parser.add_argument("--out", type=Path, metavar="DIR", help="rows, summaries and figures")
    parser.add_argument("--arms", metavar="A,B", help="only these arms, or those that begin so")
    parser.add_argument("--repeats", type=int, metavar="N", help="instead of the TOML's")
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and memory by arm")
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="begin nothing new after these; exit status 1 if rows are then missing",
    )
    some = parser.add_argument_group("what some experiments take")
    some.add_argument("--wheel", metavar="FILE", help="wheel that holds the prompts")
    some.add_argument("--checkpoint", metavar="DIR", help="default: the model that ships")
    some.add_argument("--dtype", choices=("float32", "bfloat16"), help="default float32")
    some.add_argument("--implementation", choices=CHOICES, help="of all arms; default auto")
    some.add_argument(
        "--requests", metavar="FILE.jsonl", help="recorded requests instead of the TOML's prompts"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    limit = options.time_limit
    if limit is not None and not limit >= 0:
        raise ValueError(f"--time-limit is {limit:g}, expected seconds of at least 0")
    out: Path | None = options.out
    if out is None and not options.dry_run:
        raise ValueError("--out DIR is missing, expected a folder for rows and summaries")
    experiment, text, seed = read_experiment(options)
    use_compilation_cache()
    with progress(NAME) as advance:
        context = make_context(options, advance)
        wanted = [] if options.arms is None else options.arms.split(",")
        cells = select_arms(experiment.cells(context), wanted, experiment.always)
        if not cells:
            raise ValueError(f"{options.config} asks for no cell, expected at least one")
        if options.dry_run or out is None:
            rows = read_rows(out) if options.resume and out else []
            Console(width=_width()).print(plan_table(cells, missing(cells, rows)))
            return 0
        begin = RowFile.resume if options.resume else RowFile.create
        file = begin(out, text, decisive(options))
        if options.resume and not file.rows:
            context.say(f"{out} holds no rows to go on from: a new run begins there")
        try:
            ended = measure(experiment, context, cells, file)
        except Exception:  # whatever it is, what was measured before is shown
            report(experiment, context, file, environment(text, seed, arguments))
            raise
    report(experiment, context, file, environment(text, seed, arguments))
    left = file.missing(cells)
    if left:
        said = f"{len(left)} of {len(cells)} rows missing ({_by_arm(left)})"
        say(NAME, f"{ended} with {said}: --resume goes on from here")
    if ended == "interrupted":
        return INTERRUPTED
    return 1 if left or any(row["gate"] == RED for row in file.rows) else 0


def _by_arm(left: Sequence[Cell], most: int = 6) -> str:
    """How many rows of each arm: "3 of wy, 2 of ring, and 4 of 2 other arms"."""
    counts = collections.Counter(cell.arm for cell in left)
    said = [f"{count} of {arm}" for arm, count in list(counts.items())[:most]]
    others = list(counts.values())[most:]
    if others:
        said.append(f"and {sum(others)} of {len(others)} other arm{'s'[: len(others) - 1]}")
    return ", ".join(said)


def read_experiment(options: argparse.Namespace) -> tuple[Experiment, str, int]:
    """The experiment, its TOML's text, and the seed."""
    table = read_toml(options.config)
    known = ", ".join(EXPERIMENTS)
    if "experiment" not in table:
        there = f"it has {', '.join(table)}" if table else "it is empty"
        raise ValueError(
            f"{options.config}: missing key 'experiment', expected one of: {known}; {there}"
        )
    name = table.pop("experiment")
    if name not in EXPERIMENTS:
        raise ValueError(f"{options.config}: experiment is {name!r}, expected one of: {known}")
    if options.repeats is not None:
        table["repeats"] = options.repeats
    kind: Any = EXPERIMENTS[name]
    for option in _OPTIONS:
        if getattr(options, option) is not None and option not in kind.options:
            raise ValueError(f"--{option}: the experiment {name!r} cannot use it, leave it out")
    for key, least in (("seed", 0), ("repeats", 1)):
        value = table.get(key, least)  # of a missing one the experiment says more
        if type(value) is not int or value < least:
            where = f"{options.config}: {key}"
            raise ValueError(f"{where} is {value!r}, expected an integer of at least {least}")
    experiment = kind.from_toml(table, options.config)
    return experiment, Path(options.config).read_text(encoding="utf-8"), table["seed"]


def make_context(options: argparse.Namespace, advance: Advance) -> Context:
    return Context(
        out=options.out,
        advance=advance,
        say=lambda line: say(NAME, line),
        wheel=options.wheel,
        checkpoint=options.checkpoint,
        dtype=options.dtype,
        implementation=options.implementation or "auto",
        requests=options.requests,
        time_limit=options.time_limit,
    )


def decisive(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the rows beside the TOML; a run keeps it to its end."""
    made = {name: getattr(options, name) for name in ("checkpoint", "dtype", "implementation")}
    requests = options.requests
    made["requests"] = None if requests is None else file_digest(requests)
    return made | made_with()


def measure(experiment: Experiment, context: Context, cells: Sequence[Cell], file: RowFile) -> str:
    """Run what is missing, and write every row at once. Returns how it ended."""
    left, done = file.missing(cells), list(file.rows)
    limit, started = context.time_limit, time.monotonic()
    if not left:
        return "ended"

    def over() -> bool:
        return limit is not None and time.monotonic() - started >= limit

    try:
        for row in experiment.run(dataclasses.replace(context, over=over), left, done):
            file.append(row)
            if row["gate"] == RED:
                context.say(problems([row])[0])
            # Rows that were measured together and are still to come must not be lost.
            if over() and not getattr(experiment, "ends_itself", False):
                return "out of time"
        if over():
            return "out of time"
    except KeyboardInterrupt:
        return "interrupted"
    return "ended"


def report(
    experiment: Experiment, context: Context, file: RowFile, environment: dict[str, Any]
) -> None:
    """Summaries, figures and the tables of all rows that are there."""
    if context.out is None or not file.rows:
        return
    write_summary(context.out, environment, experiment.summary(file.rows))
    experiment.figures(file.rows, context.out)
    if not can_draw():
        context.say(HINT)
    console = Console(width=_width())
    for table in experiment.tables(file.rows):
        console.print(table)


def _width() -> int | None:
    """As wide as the terminal; a file takes whole tables."""
    return None if sys.stdout.isatty() else 180


if __name__ == "__main__":
    sys.exit(run_command(NAME, main, sys.argv[1:]))
