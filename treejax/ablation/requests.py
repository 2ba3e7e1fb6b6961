"""Request replay: whole generations by every arm, as the papers measure them.

LumoTree's protocol (arXiv 2609.23900): requests one after the other, plain decoding and every arm
on the same ones, rates pooled over them. Here arms are interleaved: each request is decoded by all
of them in an order that turns, and what an arm decoded is held against plain decoding before its
time counts. ``--requests FILE.jsonl`` replays recorded requests instead (``recorded``).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jax.errors import JaxRuntimeError

from treejax.ablation.base import NOT_RUN, RED, Cell, Context, Row
from treejax.ablation.requests_report import draw, make_table, summarise, write_requests
from treejax.ablation.requests_settings import RequestSettings, check
from treejax.ablation.serving import PLAIN, Arm, Reference, Server, Task, describe, figures_of
from treejax.ablation.workload import Workload, load
from treejax.config import from_mapping
from treejax.drafters import Drafter
from treejax.policies import Policy


class Requests:
    """The experiment ``requests``."""

    name: ClassVar[str] = "requests"
    options: ClassVar[frozenset[str]] = frozenset(
        {"wheel", "checkpoint", "dtype", "implementation", "requests"}
    )
    always: ClassVar[tuple[str, ...]] = (PLAIN,)

    def __init__(self, settings: RequestSettings, where: str):
        self.settings, self._where = settings, where
        self._workload: Workload | None = None

    @classmethod
    def from_toml(cls, table: dict[str, Any], where: str) -> "Requests":
        settings = from_mapping(RequestSettings, table, where)
        check(settings, where)
        return cls(settings, where)

    def arms(self) -> dict[Arm, int | None]:
        """Arms, and how many of the requests each serves (None: all)."""
        s = self.settings
        made: dict[Arm, int | None] = {Arm(s.policy, None): None}
        made |= {Arm(s.policy, draft): None for draft in s.drafts}
        for policy in s.others.policies:
            for draft in s.others.drafts:
                made.setdefault(Arm(policy, draft), s.others.requests)
        return made

    def cells(self, context: Context) -> list[Cell]:
        work, made = self._load(context), []
        for arm, count in self.arms().items():
            sizes = work.bytes_of(arm)
            names = list(dict.fromkeys(task.prompt for task in work.tasks))[:count]
            for repeat in range(self.settings.repeats):
                for task in work.tasks:
                    if task.prompt in names:
                        made.append(Cell(arm.name, task.key, repeat, sizes))
        return made

    def run(self, context: Context, cells: Sequence[Cell], done: Sequence[Row]) -> Iterator[Row]:
        work = self._load(context)
        server = work.server
        arms = {arm.name: arm for arm in self.arms()}
        # One object an arm: what a drafter learns of costs and texts, it keeps from task to task.
        drafters = {name: arm.drafter() for name, arm in arms.items()}
        wanted = {cell.identity(): cell for cell in cells}
        failed = {_place(row): row for row in reversed(done) if row["gate"] in (RED, NOT_RUN)}
        references: dict[tuple[str, str], Reference] = {}
        ready = 0
        for repeat in range(self.settings.repeats):
            for turn, task in enumerate(work.tasks):
                mine = self._in_turn(wanted, task, repeat, repeat + turn)
                name = task.prompt, task.mode
                if mine and name not in references:
                    context.advance(f"{task.prompt} {task.mode}: reference", ready, len(cells))
                    references[name] = Reference(server, task)
                for cell in mine:
                    arm = arms[cell.arm]
                    context.advance(f"{task.prompt} {task.mode}: {arm.name}", ready, len(cells))
                    before = failed.get((cell.arm, task.prompt, task.mode))
                    row = _repeated(cell, before) if before else None
                    row = row or measure(
                        *(server, server.policy(arm.policy), drafters[arm.name]),
                        *(task, cell, references[name]),
                    )
                    if row["gate"] in (RED, NOT_RUN):
                        failed.setdefault(_place(row), row)
                    ready += 1
                    yield row
                if mine:
                    references[name].forget()

    def tables(self, rows: Sequence[Row]) -> list[Any]:
        notice = None if self._workload is None else self._workload.notice
        return [make_table(self.summary(rows), notice)]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        return summarise(rows, [arm.name for arm in self.arms()])

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        write_requests(rows, out / "requests.csv")
        draw(self.summary(rows), rows, out)

    def _load(self, context: Context) -> Workload:
        if self._workload is None:
            self._workload = load(self.settings, list(self.arms()), context, Path(self._where))
        return self._workload

    def _in_turn(self, wanted: dict[Any, Cell], task: Task, repeat: int, turn: int) -> list[Cell]:
        """Cells of one task and repeat, the arms in an order that turns."""
        all_of = [Cell(arm.name, task.key, repeat).identity() for arm in self.arms()]
        start = turn % len(all_of)
        order = all_of[start:] + all_of[:start]
        return [wanted[identity] for identity in order if identity in wanted]


def measure(
    server: Server,
    policy: Policy,
    drafter: Drafter,
    task: Task,
    cell: Cell,
    reference: Reference,
) -> Row:
    """Serve one task by one arm: figures only if it decodes what plain decoding does."""
    try:
        made = server.serve(task, policy, drafter)
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return cell.row(NOT_RUN, "does not fit in this device's memory", describe(policy, drafter))
    verdict = server.judge(task, made, reference)
    measures = describe(policy, drafter) | verdict.measures
    if verdict.gate != RED:
        measures |= figures_of(task, made)
    return cell.row(verdict.gate, verdict.problem, measures)


def _place(row: Row) -> tuple[str, str, str]:
    return row["arm"], row["prompt"], row["mode"]


def _repeated(cell: Cell, before: Row) -> Row:
    """What was wrong once, or did not fit, is not tried again."""
    return cell.row(before["gate"], f"as in repeat {before['repeat']}: {before['problem']}")
