"""An experiment that counts and measures nothing, and the command with it: a process to kill."""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

from rich.table import Table

from treejax.ablation.base import Cell
from treejax.config import from_mapping

TOML = 'experiment = "counting"\nseed = 3\nrepeats = 2\n'


@dataclasses.dataclass(frozen=True)
class Counting:
    """Three arms, two sizes; ``red`` names an arm that is always wrong."""

    name: ClassVar[str] = "counting"
    options: ClassVar[frozenset[str]] = frozenset({"dtype"})
    always: ClassVar[tuple[str, ...]] = ("always",)

    seed: int
    repeats: int
    red: str = ""

    @classmethod
    def from_toml(cls, table, where):
        return from_mapping(cls, table, where)

    def cells(self, context):
        return [
            Cell(arm, {"n": n}, repeat, {"state": 2**20, "keys": 2**19})
            for repeat in range(self.repeats)
            for n in (1, 2)
            for arm in ("always", "a", "b")
        ]

    def run(self, context, cells, done):
        for i, cell in enumerate(cells):
            context.advance(cell.arm, i, len(cells))
            time.sleep(float(os.environ.get("COUNTING_PAUSE_S", "0")))
            if cell.arm == self.red:
                yield cell.row("red", "planted")
            else:
                yield cell.row("green", measures={"count": 1, "when_s": time.time()})

    def summary(self, rows):
        arms = dict.fromkeys(row["arm"] for row in rows)
        return [{"arm": arm, "count": sum(r["arm"] == arm for r in rows)} for arm in arms]

    def tables(self, rows):
        return [Table("arm", title=f"{len(rows)} rows")]

    def figures(self, rows, out: Path):
        (out / "drawn").touch()


if __name__ == "__main__":
    from treejax import ablate
    from treejax.ablation import EXPERIMENTS
    from treejax.cli.guard import run_command

    # A shell in the background hands down that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    EXPERIMENTS["counting"] = Counting
    sys.exit(run_command(ablate.NAME, ablate.main, sys.argv[1:]))
