"""The options of the command, checked."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.bench.guard import NAME, Parser
from pallas_kernels.bench.trees import NAMES as TREES

OPERATIONS = (
    "path_scan",
    "node_scan",
    "wy_solve",
    "replay",
    "wy_commit",
    "wy_commit_solve",
    "tree_conv",
    "path_scan+replay",
    "wy_solve+wy_commit",
    "wy_solve+replay",
)
"""Verifying, then publishing, then both in one program: the policies replay, wy, solve_replay."""

PRECISIONS = ("ieee", "bf16x3", "tf32")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed, and how. Names are those of the options."""

    batch: tuple[int, ...]
    layers: int
    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    tree: str
    dtype: str
    operations: tuple[str, ...]
    precision: str
    implementation: str
    repeats: int
    peers: str
    errors: str
    seed: int
    cupti: bool
    time_limit: float | None
    json: Path | None

    @property
    def ratio(self) -> int:
        """Value heads a key head."""
        return self.value_heads // self.key_heads


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        f"python -m {NAME}",
        description="Check the kernels against float64, then time them. Table on stdout.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--batch", type=parse_numbers, default=(1, 8, 32), metavar="B,..", help="default 1,8,32")
    add(
        "--layers", type=parse_positive, default=48, metavar="N", help="distinct layers, default 48"
    )
    add("--value-heads", type=parse_positive, default=48, metavar="N", help="default 48")
    add("--key-heads", type=parse_positive, default=16, metavar="N", help="default 16")
    add("--key-dim", type=parse_positive, default=128, metavar="N", help="default 128")
    add("--value-dim", type=parse_positive, default=128, metavar="N", help="default 128")
    add("--tree", choices=TREES, default="hydra27")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of q, k, v")
    add(
        "--operations",
        type=_operations,
        default=OPERATIONS,
        metavar="A,..",
        help=f"all (the default), or some of: {' '.join(OPERATIONS)}",
    )
    add("--precision", choices=PRECISIONS, default="ieee", help="of the wy operations")
    add("--implementation", choices=("auto", "xla", "mosaic_gpu"), default="auto")
    add("--repeats", type=parse_positive, default=30, metavar="N", help="rounds, default 30")
    add("--peers", choices=("auto", "none"), default="auto", help="PyTorch and FLA, if installed")
    add(
        "--errors",
        choices=("auto", "only", "none"),
        default="auto",
        help="the table of state errors: after the timings, alone, or not at all",
    )
    add("--seed", type=int, default=0, metavar="N")
    add(
        "--cupti",
        action="store_true",
        help="after the rounds, also ask CUPTI for the kernels that each program launches",
    )
    add(
        "--time-limit",
        type=parse_seconds,
        metavar="SECONDS",
        help="stop after the round in which this is reached, with what there is",
    )
    add("--json", type=Path, metavar="FILE", help="written as rows come, so an interrupt keeps it")
    return parser


def parse(arguments: Sequence[str]) -> Settings:
    """Raises ValueError where options do not fit together."""
    settings = Settings(**vars(make_parser().parse_args(arguments)))
    if settings.value_heads % settings.key_heads:
        raise ValueError(
            f"--value-heads {settings.value_heads} is no multiple of "
            f"--key-heads {settings.key_heads}"
        )
    if settings.seed < 0:
        raise ValueError(f"--seed is {settings.seed}, expected at least 0")
    if settings.json is not None and not settings.json.resolve().parent.is_dir():
        raise ValueError(f"--json {settings.json}: no such folder")
    return settings


def parse_positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return value


def parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(parse_positive, text.split(","))))


def _operations(text: str) -> tuple[str, ...]:
    if text == "all":
        return OPERATIONS
    chosen = text.split(",")
    for name in chosen:
        if name not in OPERATIONS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is unknown, expected all or some of: {', '.join(OPERATIONS)}"
            )
    return tuple(name for name in OPERATIONS if name in chosen)
