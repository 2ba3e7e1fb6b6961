"""What an experiment is: a plan of cells, each of which becomes one row, and how rows are shown.

The command keeps the rows and asks for those that are missing; the order in which cells run, how
arms are interleaved and what gates them are the experiment's own business.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rich.table import Table

from treejax.progress import Advance

type Row = dict[str, Any]
"""One measured cell: ``arm``, ``repeat``, the entries of the cell's key, ``gate``, ``problem`` (why
it is red or not run, else None), and the measures. A name with a part "s", "ms" or "us"
(``decode_s``, ``tokens_per_s``, ``verify_ms_min``) is a time or a rate; a red row has none."""

GREEN, NEAR_TIE, RED, NOT_RUN = "green", "near tie", "red", "not run"
GATES = (GREEN, NEAR_TIE, RED, NOT_RUN)
"""Agrees; differs where rounding decides; differs; could not run here (too large, for example)."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row to be.

    Attributes:
      arm: what is compared; shown, and what ``--arms`` selects by.
      key: what makes the cell unique beside arm and repeat: ``{"prompt": "a", "mode": "greedy"}``.
      bytes: named buffers that the arm needs, for the plan; may be empty.
    """

    arm: str
    key: Mapping[str, int | str]
    repeat: int
    bytes: dict[str, int] = dataclasses.field(default_factory=dict)

    def identity(self) -> tuple[Any, ...]:
        return self.arm, self.repeat, tuple(sorted(self.key.items()))

    def row(self, gate: str, problem: str | None = None, measures: Row | None = None) -> Row:
        """The cell's row."""
        head: Row = {"arm": self.arm, **self.key, "repeat": self.repeat}
        return head | {"gate": gate, "problem": problem} | (measures or {})


class Say(Protocol):
    """One line for the user."""

    def __call__(self, line: str, /) -> None: ...


@dataclasses.dataclass(frozen=True)
class Context:
    """What the command line gives to an experiment; None is an option that was not given.

    Attributes:
      out: the run's folder; None when only the plan is asked for.
      wheel: file that holds the prompts.
      checkpoint: folder or name of a model.
      dtype: of activations and weights.
      implementation: "auto", "xla" or "mosaic_gpu", of all arms.
      requests: JSON-lines file of recorded requests.
      time_limit: seconds that the run may take. Once they are over the command asks for no further
        row, except of an experiment whose ``ends_itself`` is true, which it lets go on to its end.
      over: whether the time limit has passed; always false without one. An experiment that measures
        many rows at once looks at it between such groups, after the first, and returns.
    """

    out: Path | None
    advance: Advance
    say: Say
    wheel: str | None = None
    checkpoint: str | None = None
    dtype: str | None = None
    implementation: str = "auto"
    requests: str | None = None
    time_limit: float | None = None
    over: Callable[[], bool] = lambda: False


class Experiment(Protocol):
    """The methods that the command calls.

    Attributes:
      name: the registry's.
      options: of ``wheel, checkpoint, dtype, implementation, requests`` those that the experiment
        takes; any other is refused.
      always: arms that ``--arms`` never leaves out, since others are measured beside them.

    An experiment with a further class attribute ``ends_itself = True`` measures many rows before it
    yields the first of them: at a time limit it is not cut off, and must look at ``context.over``.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]]
    always: ClassVar[tuple[str, ...]]

    @classmethod
    def from_toml(cls, table: dict[str, Any], where: str) -> "Experiment":
        """From a TOML table without its ``experiment``; ``where`` is the file's path.

        Paths inside are relative to that file.

        Raises:
          ValueError: one line that names the file and the key.
        """
        ...

    def cells(self, context: Context) -> list[Cell]:
        """The whole plan, in any order; nothing is measured."""
        ...

    def run(self, context: Context, cells: Sequence[Cell], done: Sequence[Row]) -> Iterator[Row]:
        """Rows of ``cells``, as soon as each is there; ``done`` are rows of an earlier run."""
        ...

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """What is printed at the end; the first table is the main one."""
        ...

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Flat records, the same numbers as in the tables: summary.csv and summary.json."""
        ...

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        """Write figures (and other files) into ``out``; without matplotlib none are drawn."""
        ...


def select_arms(cells: Sequence[Cell], wanted: Iterable[str], always: Sequence[str]) -> list[Cell]:
    """Cells whose arm is in ``wanted``, or begins with one of them; ``always`` stay.

    Raises:
      ValueError: a wanted name that no arm has.
    """
    wanted = tuple(wanted)
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    kept = set(always)
    for name in wanted:
        matching = [name] if name in arms else [arm for arm in arms if arm.startswith(name)]
        if not matching:
            raise ValueError(f"--arms {name}: no such arm, expected one of: {', '.join(arms)}")
        kept.update(matching)
    return [cell for cell in cells if cell.arm in kept] if wanted else list(cells)
