"""Audit policies, drafters, acceptance rules, kernels and checkpoints, ours or yours.

    python -m treejax.audit --quick
    python -m treejax.audit continuation --policy wy --drafter mtp:chain3 --out runs/audit
    python -m treejax.audit --faults
    python -m treejax.audit --list-faults

Tables and a verdict go to stdout, progress to stderr. DIR gets report.txt, report.json and
report.html. Exit status 1 if the audit is red, or did not end; 130 if it was interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pallas_kernels.implementation import IMPLEMENTATIONS
from treejax.ablation.figures import HINT, can_draw
from treejax.audit.asked import AUDITS, DTYPES, FAULTS, Asked
from treejax.audit.base import Report
from treejax.audit.text import as_text, write_text
from treejax.audit.work import Work
from treejax.cli.cache import use_compilation_cache
from treejax.cli.guard import INTERRUPTED, Parser, run_command, say
from treejax.cli.progress import progress

NAME = "treejax.audit"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        f"python -m {NAME}",
        description="Prove that an engine is right, and that the proof would notice.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "audits", nargs="*", metavar="AUDIT", help=f"of {', '.join(AUDITS)}; default all"
    )
    parser.add_argument("--quick", action="store_true", help="a minute instead of a proof")
    parser.add_argument("--faults", action="store_true", help="plant every fault as well")
    parser.add_argument(
        "--fault", metavar="NAMES", help="plant only these: NAME,NAME; see --list-faults"
    )
    parser.add_argument(
        "--list-faults",
        action="store_true",
        help="list the faults that can be planted and what each does, and do nothing else",
    )
    parser.add_argument("--time-limit", type=float, metavar="S", help="give up after S seconds")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the report there")
    who = parser.add_argument_group("who is audited")
    who.add_argument("--policy", metavar="NAMES", help="NAME,NAME; default all, of quick one")
    who.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="DRAFTER:TREE",
        help="may be given several times; default one of each kind, of quick one",
    )
    who.add_argument("--rule", metavar="NAMES", help="acceptance rules: NAME,NAME")
    who.add_argument("--checkpoint", metavar="DIR", help="default: the model that ships")
    who.add_argument("--dtype", choices=DTYPES, help="of the model; default float32")
    who.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, default="auto", help="of policies"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--envelope", metavar="FILE", help="hold errors against this envelope")
    how.add_argument("--calibrate", metavar="FILE", help="write the calibrated envelope there")
    how.add_argument("--seed", type=int, metavar="N", help="of all that is random")
    how.add_argument("--seeds", type=int, metavar="N", help="how many, where several are taken")
    return parser


def read_options(options: argparse.Namespace) -> Asked:
    """What was asked for.

    Raises:
      ValueError: one line.
    """
    if options.faults and options.fault is not None:
        raise ValueError("--faults plants every fault, --fault some of them: leave one out")
    if options.time_limit is not None and not options.time_limit > 0:
        raise ValueError(f"--time-limit is {options.time_limit:g}, expected seconds above 0")
    return Asked(
        audits=tuple(options.audits),
        policy=_names(options.policy),
        drafter=tuple(options.drafter),
        rule=_names(options.rule),
        faults=() if options.faults else None if options.fault is None else _names(options.fault),
        quick=options.quick,
        model=options.checkpoint,
        dtype=options.dtype,
        implementation=options.implementation,
        envelope=options.envelope,
        calibrate=options.calibrate,
        seed=options.seed,
        seeds=options.seeds,
    )


def list_faults() -> str:
    """Every fault that can be planted: its name and what it does, by the audit that must catch
    it."""
    lines = []
    for audit, faults in FAULTS.items():
        width = max(map(len, faults))
        lines += ["", f"faults that the {audit} audit must catch:"]
        lines += [f"  {name:<{width}}  {fault.says}" for name, fault in faults.items()]
    return "\n".join(lines[1:]) + "\n"


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    if options.list_faults:
        sys.stdout.write(list_faults())
        return 0
    asked = read_options(options)
    out: Path | None = options.out
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be is no late surprise
    use_compilation_cache()
    work = Work.prepare(asked)
    try:
        with progress(NAME) as advance:
            for _ in work.parts(advance, options.time_limit):
                pass
    except Exception:  # whatever it is, what was audited before is shown
        if work.done:
            show(work, out)
        raise
    report = show(work, out)
    if work.ended is not None:
        say(NAME, work.ended)
    if work.ended == "interrupted":
        return INTERRUPTED
    return 0 if report.green else 1


def show(work: Work, out: Path | None) -> Report:
    """Print the report as far as it came, and write it."""
    report = work.report()
    if sys.stdout.isatty():
        write_text(report, Console())
    else:
        sys.stdout.write(as_text(report))
    if out is not None:
        report.save(out)
        if not can_draw():
            say(NAME, HINT)
    return report


if __name__ == "__main__":
    sys.exit(run_command(NAME, main, sys.argv[1:]))
