"""What a whole step costs beside a plain one, at the shapes of a large model with random weights.

    python -m treejax.ablate configs/ablations/step_cost_27b.toml --out runs/step_cost

Arms are a state policy, a tree and perhaps a change undone (``step_cost_arms``). Each is held
against plain decoding first (``step_cost_gate``) and then timed beside it, interleaved: the whole
step as the loop compiles it, at every acceptance length that a script fixes; its phases; visits of
a host that waits for the tokens. Groups of arms share batch, contexts and the size of the state;
within a group the arms run in lots, so that a run which ends early has whole rows, and ``--resume``
goes on. ``configs/ablations/step_cost_small.toml`` is the same on a CPU in a minute or two.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
from rich.table import Table

from pallas_kernels.bench.timing import MOST_CALLS
from treejax.ablation import step_cost_report as report
from treejax.ablation.base import GREEN, NOT_RUN, Cell, Context, Row
from treejax.ablation.lab_timing import copy_bandwidth
from treejax.ablation.step_cost_arms import (
    PLAIN,
    Arm,
    check_names,
    check_reached,
    make_step_arm,
    make_tree,
)
from treejax.ablation.step_cost_bench import Bench
from treejax.ablation.step_cost_lot import Lot
from treejax.ablation.step_cost_model import (
    REFRAIN,
    ModelSizes,
    abstract_params,
    all_bytes,
    make_model,
)
from treejax.ablation.step_cost_peer import PEER, run_peer
from treejax.ablation.step_cost_rows import state_memory
from treejax.cli.kernels import choose_implementation
from treejax.config import from_mapping
from treejax.model import Model

MARGIN = 256
"""Rows of a state beyond the longest context: for what is published while it is measured."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Arms that share a batch and the size of their states, which every context fits in.

    Plain decoding runs beside them whether it is among them or not.

    Attributes:
      phases: time draft, verify, select and publish apart too, and check them.
      loop: time the loop's own program too, which makes many steps between two visits of the host;
        whole decoding is then its. Otherwise the host visits after every step.
      lengths: what a script emits a step, if not what the experiment says.
    """

    arms: tuple[str, ...]
    contexts: tuple[int, ...]
    batch: int = 1
    phases: bool = True
    loop: bool = False
    lengths: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return max(self.contexts) + MARGIN

    def holds(self, cell: Cell) -> bool:
        """Whether a cell is one of this group's."""
        place = self.batch, self.rows
        return cell.arm in self.arms and (cell.key["batch"], cell.key["rows"]) == place


@dataclasses.dataclass(frozen=True)
class Peer:
    """Plain decoding by transformers, as cells of their own.

    Attributes:
      tokens: that ``generate`` makes; the time of its first one is taken off.
    """

    contexts: tuple[int, ...] = (1024,)
    batch: int = 1
    tokens: int = 64
    limit_s: float = 240.0


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The experiment's settings.

    Attributes:
      plain: the policy of plain decoding.
      lengths: tokens that a scripted step emits, accepted ones and the one drawn after them; an
        arm takes those that its tree reaches, and of each some tree must reach it.
      lot: arms that are compiled, held and interleaved at a time, beside plain.
      calls, rounds: of a sample, and samples in a repeat.
    """

    name: ClassVar[str] = "step_cost"
    options: ClassVar[frozenset[str]] = frozenset({"implementation"})
    always: ClassVar[tuple[str, ...]] = (PLAIN,)
    ends_itself: ClassVar[bool] = True

    seed: int
    repeats: int
    model: ModelSizes
    groups: tuple[Group, ...]
    plain: str = "replay"
    lengths: tuple[int, ...] = (2, 3, 4, 5)
    lot: int = 4
    calls: int = 6
    rounds: int = 7
    peer: Peer | None = None

    @classmethod
    def from_toml(cls, table: dict[str, Any], where: str) -> "StepCost":
        made = from_mapping(cls, table, where)
        _ = made.model.config  # refuse sizes that no model has
        if not made.groups or any(not group.contexts for group in made.groups):
            raise ValueError(f"{where}: groups need at least one, each with arms and contexts")
        for lengths in (made.lengths, *(group.lengths or (1,) for group in made.groups)):
            if min(lengths, default=0) < 1 or list(lengths) != sorted(set(lengths)):
                raise ValueError(f"{where}: lengths are {lengths}, expected 1 or more, ascending")
        counts = {name: getattr(made, name) for name in ("repeats", "rounds", "lot")}
        counts |= {f"groups[{i}].batch": group.batch for i, group in enumerate(made.groups)}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{where}: {name} is {count}, expected an integer of at least 1")
        if made.model.vocabulary <= REFRAIN:
            size = made.model.vocabulary
            raise ValueError(f"{where}: model.vocabulary is {size}, expected above {REFRAIN}")
        if not 1 <= made.calls <= MOST_CALLS:
            raise ValueError(f"{where}: calls is {made.calls}, expected 1 to {MOST_CALLS}")
        seen: set[tuple[Any, ...]] = set()
        for group in made.groups:
            check_names(group.arms, made.plain, where)
            for arm in group.arms:
                if group.batch > 1 and arm.split()[-1].startswith("mtp"):
                    raise ValueError(
                        f"{where}: arm {arm!r} at batch {group.batch}: what a head accepts differs "
                        "from sequence to sequence, expected batch 1"
                    )
            for place in ((arm, group.batch, group.rows) for arm in group.arms):
                if place in seen:
                    raise ValueError(f"{where}: arm {place[0]!r} is asked for twice at one place")
                seen.add(place)
            check_reached(group.lengths, group.arms, where)
        if "lengths" in table:
            rest = [arm for group in made.groups if not group.lengths for arm in group.arms]
            if not rest:
                raise ValueError(
                    f"{where}: every group has lengths of its own, so that those of the file would "
                    "do nothing: leave them out"
                )
            check_reached(made.lengths, rest, where)
        return made

    def cells(self, context: Context) -> list[Cell]:
        made = []
        if self.peer is not None:
            for tokens in self.peer.contexts:
                key = {"batch": self.peer.batch, "context": tokens, "rows": 0}
                made += [Cell(PEER, key, repeat) for repeat in range(self.repeats)]
        weights = all_bytes(abstract_params(self.model))
        for group in self.groups:
            for arm in self._arms(group, context).values():
                if arm.name not in group.arms:
                    continue
                sizes = state_memory(arm, self.model, group.batch, group.rows)
                for tokens in group.contexts:
                    key = {"batch": group.batch, "context": tokens, "rows": group.rows}
                    cells = [
                        Cell(arm.name, key, repeat, {"weights": weights} | sizes)
                        for repeat in range(self.repeats)
                    ]
                    made += cells
        return made

    def _arms(self, group: Group, context: Context) -> dict[str, Arm]:
        """Every arm of a group, plain first."""
        config = self.model.config
        trees = [make_tree(arm.split()[1]) for arm in group.arms if arm != PLAIN]
        largest = max((tree.capacity for tree in trees), default=1)
        how = choose_implementation(context.implementation, config, largest).implementation
        names = dict.fromkeys((PLAIN, *group.arms))
        given = self.plain, group.lengths or self.lengths, how, config
        return {name: make_step_arm(name, *given) for name in names}

    def run(self, context: Context, cells: Sequence[Cell], done: Sequence[Row]) -> Iterator[Row]:
        mine = [cell for cell in cells if cell.arm == PEER]
        if mine and self.peer is not None:
            yield from self._run_peer(context, mine)  # first: it wants the memory for itself
            if context.over():
                return
        cells = [cell for cell in cells if cell.arm != PEER]
        if not cells:
            return
        bandwidth = copy_bandwidth()  # first: its buffers must not be the peak of all memory
        started = time.perf_counter()
        model = jax.block_until_ready(make_model(self.model, self.seed).params)
        model = Model(model, self.model.config)
        size = all_bytes(model.params) / 2**30
        context.say(f"{size:.1f} GiB of weights in {time.perf_counter() - started:.1f} s")
        for group in self.groups:
            wanted = [cell for cell in cells if group.holds(cell)]
            if wanted:
                yield from self._run_group(context, model, group, wanted, bandwidth)
                if context.over():
                    return

    def _run_peer(self, context: Context, cells: Sequence[Cell]) -> Iterator[Row]:
        assert self.peer is not None
        for cell in cells:
            batch, tokens = self.peer.batch, int(cell.key["context"])
            context.say(f"{PEER}: batch {batch}, context {tokens}")
            made = run_peer(
                self.model, batch, tokens, self.peer.tokens, self.rounds, self.peer.limit_s
            )
            problem = made.pop("problem", None)
            if problem is not None:
                yield cell.row(NOT_RUN, problem)
                continue
            ms = made.pop("ms")
            rate = {"step_ms": ms, "visit_ms": ms, "tokens_per_s": 1e3 * batch / ms}
            rate |= {"step_ms_p10": made.pop("ms_min"), "step_ms_p90": made.pop("ms_max")}
            yield cell.row(GREEN, None, rate | made)

    def _run_group(
        self, context: Context, model: Model, group: Group, cells: list[Cell], bandwidth: float
    ) -> Iterator[Row]:
        """The group's arms in lots, plain beside each."""
        arms = self._arms(group, context)
        names = list(dict.fromkeys(cell.arm for cell in cells))
        plain = self._bench(arms[PLAIN], model, group)
        others = [name for name in names if name != PLAIN]
        lots = [others[i : i + self.lot] for i in range(0, len(others), self.lot)] or [[]]
        for at, few in enumerate(lots):
            context.advance(f"batch {group.batch}, {group.rows} rows", at, len(lots))
            benches = [self._bench(arms[name], model, group) for name in few]
            mine = [c for c in cells if c.arm in few or (c.arm == PLAIN and at == 0)]
            how = group.contexts, group.phases, self.calls, self.rounds, bandwidth
            yield from Lot(plain, benches, *how).run(context, mine)
            if context.over():
                return

    def _bench(self, arm: Arm, model: Model, group: Group) -> Bench:
        return Bench(arm, model, self.model, group.batch, group.rows, self.seed, group.loop)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return report.tables(rows, self.model)

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        return report.summary(rows)

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        report.figures(rows, out)
