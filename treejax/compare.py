"""Show that drafting changes nothing but speed: every policy and drafter against plain decoding.

    python -m treejax.compare configs/prompts/astropy.toml --wheel astropy-8.0.2-....whl
    python -m treejax.compare configs/prompts/beartype.toml --max-tokens 48 --together

Decodes the prompts with every arm, greedily and sampled (temperature 0.8, top-p 0.95), and compares
tokens and published states. The table goes to stdout; exit status 1 if an arm differs. ``--time
[ARM]`` also measures speeds, of arms that agree only.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from treejax.checkpoint import load_model
from treejax.cli import compare_report
from treejax.cli.arms import DRAFTS, MODES, Arm, Row, Task, make_arms, pool_rates
from treejax.cli.cache import use_compilation_cache
from treejax.cli.guard import Parser, run_command, say
from treejax.cli.kernels import CHOICES, choose_implementation
from treejax.cli.passages import read_passages
from treejax.drafters import parse
from treejax.loop import DEFAULT_DRAFTER, DEFAULT_TREE
from treejax.policies import REGISTRY as POLICIES
from treejax.policies.choose import DEFAULT
from treejax.progress import Advance
from treejax.requests import make_requests

NAME = "treejax.compare"
DEFAULT_ARM = Arm(DEFAULT, DEFAULT_DRAFTER, DEFAULT_TREE).name


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        f"python -m {NAME}",
        description="Compare every policy and drafter with plain decoding, token by token.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="PROMPTS.toml", help="TOML file that names the prompts")
    parser.add_argument("--wheel", metavar="FILE", help="wheel that holds the prompts")
    parser.add_argument("--checkpoint", metavar="DIR", help="default: the model that ships")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="only the first N prompts; default all"
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--policy", action="append", choices=tuple(POLICIES), default=[])
    parser.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="DRAFTER:TREE",
        help=f"default: {' '.join(DRAFTS)}",
    )
    parser.add_argument(
        "--implementation", choices=CHOICES, default="auto", help="of all arms; default auto"
    )
    parser.add_argument("--together", action="store_true", help="one batch an arm: less to compile")
    parser.add_argument(
        "--time",
        action="append",
        nargs="?",
        const=DEFAULT_ARM,
        default=[],
        metavar="ARM",
        help=f"time this arm too; may be given several times; alone it means {DEFAULT_ARM}",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of timing, default 3")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write rows.jsonl, summary.csv, summary.json, arms.png",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    arms = make_arms(options.policy or tuple(POLICIES), options.drafter or DRAFTS)
    timed = choose_timed(arms, options.time)
    texts = read_passages(options.config, options.wheel)
    for name in ("prompts", "max_tokens", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at least 1")
    texts = dict(list(texts.items())[: options.prompts])
    use_compilation_cache()
    model = load_model(options.checkpoint, options.dtype)
    requests = make_requests(model, list(texts.values()), options.max_tokens, ())
    short = [name for name, r in zip(texts, requests, strict=True) if r.budget < options.max_tokens]
    if short:
        raise ValueError(f"{short[0]} and {options.max_tokens} tokens exceed the model's context")
    prompts = [request.prompt for request in requests]
    largest = max(parse(arm.tree).capacity for arm in arms)
    kernels = choose_implementation(options.implementation, model.config, largest)
    how = (options.seed, options.together, kernels.implementation)
    task = Task(model, prompts, options.max_tokens, *how)
    rows = list(compare(task, arms, list(texts), options.out))
    summaries = [compare_report.summarise(arm, rows) for arm in arms]

    agreed = {summary.arm for summary in summaries if summary.ok}
    timed = [arm for arm in timed if arm.name in agreed]
    rates = measure(task, timed, options.repeats) if timed else {}
    summaries = [dataclasses.replace(s, rate=rates.get(s.arm)) for s in summaries]
    title = f"{len(texts)} prompts, {options.max_tokens} tokens each, {options.dtype}"
    title, caption = f"{title}, {kernels.implementation}", kernels.notice
    table = compare_report.make_table(summaries, rates.get("plain"), title, caption)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if options.out is not None:
        options.implementation = kernels.implementation
        write_summaries(options, summaries)
    return 0 if len(agreed) == len(arms) else 1


def choose_timed(arms: Sequence[Arm], names: Sequence[str]) -> list[Arm]:
    known = {arm.name: arm for arm in arms if arm.drafter != "scripted"}
    for name in names:
        if name not in known:
            raise ValueError(f"--time {name}: no such arm, expected one of: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def compare(
    task: Task, arms: Sequence[Arm], names: Sequence[str], out: Path | None
) -> Iterator[Row]:
    """Rows of all arms; each is written as soon as it is there, and a red one is said."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rows.jsonl").write_text("")
    done, total = 0, len(arms) * len(task.prompts) * len(MODES)
    with progress_bar() as advance:
        advance("plain", done, total)
        references = task.references()
        for arm in arms:
            for row in task.follow(arm, references):
                done += 1
                advance(arm.name, done, total)
                name = names[row.case.prompt]
                if out is not None:
                    with (out / "rows.jsonl").open("a", encoding="utf-8") as file:
                        file.write(compare_report.row_json(row, name) + "\n")
                if row.agreement.pair is not None or not row.agreement.ok:
                    say(NAME, f"{arm.name}, {row.case.mode}, {name}: {row.agreement}")
                yield row


def measure(task: Task, arms: Sequence[Arm], repeats: int) -> dict[str, compare_report.Rate]:
    """Rates of the arms and of plain decoding."""
    total = repeats * len(task.prompts) * (1 + len(arms))
    timings = []
    with progress_bar() as advance:
        for timing in task.time(arms, repeats):
            advance(f"timing {timing[0]}", len(timings), total)
            timings.append(timing)
    return pool_rates(timings)


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """A bar on stderr, or nothing where that is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("")
        yield lambda description, done, total: bar.update(
            task, description=description, completed=done, total=total
        )


def write_summaries(
    options: argparse.Namespace, summaries: Sequence[compare_report.Summary]
) -> None:
    out: Path = options.out
    with (out / "summary.csv").open("w", encoding="utf-8", newline="") as file:
        compare_report.write_csv(summaries, file)
    settings = {name: str(value) for name, value in vars(options).items()}
    whole = {
        "environment": compare_report.environment(settings),
        "arms": [summary.flat() for summary in summaries],
    }
    (out / "summary.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if not compare_report.draw_figure(summaries, out / "arms.png"):
        say(NAME, "no figure: matplotlib is not installed (pip install treejax[notebooks])")


if __name__ == "__main__":
    sys.exit(run_command(NAME, main, sys.argv[1:]))
