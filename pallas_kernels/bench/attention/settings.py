"""The options of the command, checked."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.bench.guard import Parser
from pallas_kernels.bench.settings import parse_numbers, parse_positive, parse_seconds

ROWS = {1: "a token", 6: "a chain", 28: "hydra27", 64: "random64"}
"""Rows of a step, and the tree that they are."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed, and how. Names are those of the options."""

    context: tuple[int, ...]
    rows: tuple[int, ...]
    batch: tuple[int, ...]
    heads: int
    key_heads: int
    width: int
    layers: int | None
    implementation: str
    peers: str
    repeats: int
    seed: int
    time_limit: float | None
    json: Path | None


def parse(arguments: Sequence[str]) -> Settings:
    """Raises ValueError where options do not fit together."""
    parser = Parser(
        "python -m pallas_kernels.bench.attention",
        description="Check tree attention against float32, then time it. Table on stdout.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    contexts = (1024, 8192, 32768, 131072)
    add("--context", type=parse_numbers, default=contexts, metavar="S,..", help="cached rows")
    add("--rows", type=parse_numbers, default=tuple(ROWS), metavar="N,..", help="default 1,6,28,64")
    add("--batch", type=parse_numbers, default=(1, 4, 8), metavar="B,..", help="default 1,4,8")
    add("--heads", type=parse_positive, default=24, metavar="N", help="query heads, default 24")
    add("--key-heads", type=parse_positive, default=4, metavar="N", help="default 4")
    add("--width", type=parse_positive, default=256, metavar="N", help="of a head, default 256")
    add(
        "--layers",
        type=parse_positive,
        metavar="N",
        help="caches that a call reads one after another; by default more than a GPU's L2 holds",
    )
    add("--implementation", choices=("auto", "xla", "mosaic_gpu"), default="auto")
    add("--peers", choices=("auto", "none"), default="auto", help="XLA's attention and cuDNN's")
    add("--repeats", type=parse_positive, default=30, metavar="N", help="rounds, default 30")
    add("--seed", type=int, default=0, metavar="N")
    add(
        "--time-limit",
        type=parse_seconds,
        metavar="SECONDS",
        help="start no cell after this time, and end a cell's rounds",
    )
    add("--json", type=Path, metavar="FILE", help="written as cells come")
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.heads % settings.key_heads:
        raise ValueError(
            f"--heads {settings.heads} is no multiple of --key-heads {settings.key_heads}"
        )
    unknown = [n for n in settings.rows if n not in ROWS]
    if unknown:
        raise ValueError(f"--rows {unknown[0]} is unknown, expected some of: 1, 6, 28, 64")
    if settings.json is not None and not settings.json.resolve().parent.is_dir():
        raise ValueError(f"--json {settings.json}: no such folder")
    return settings
