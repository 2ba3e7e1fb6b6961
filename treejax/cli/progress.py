"""How far a long command is: a bar on a terminal, a line now and then elsewhere; all on stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from treejax.cli.guard import say
from treejax.progress import Advance

_QUIET_S = 30.0  # between two lines where there is no terminal


@contextmanager
def progress(name: str, terminal: bool | None = None) -> Iterator[Advance]:
    """A bar with the time left on stderr; where that is no terminal, lines of the command ``name``.

    ``terminal`` None asks stderr. Work that comes in parts may give each a total of its own.
    """
    if not (sys.stderr.isatty() if terminal is None else terminal):
        yield _lines(name)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("")

        def advance(description: str, done: int, total: int) -> None:
            bar.update(task, description=description, completed=done, total=total)

        yield advance


def _lines(name: str) -> Advance:
    last = time.monotonic()
    part: tuple[float, int, int] | None = None  # when it began, what was done by then, of how much

    def advance(description: str, done: int, total: int) -> None:
        nonlocal last, part
        now = time.monotonic()
        if part is None or part[2] != total:
            part = now, done, total
        if now - last < _QUIET_S:
            return
        last = now
        began, first, _ = part
        left = (now - began) * (total - done) / (done - first) if done > first else None
        ahead = "" if left is None else f", {left / 60:.0f} min left"
        say(name, f"{description}: {done} of {total}{ahead}")

    return advance
