"""The component audit: a policy's outputs and published states against a float64 recurrence.

LumoTree's protocol (arXiv 2609.23900): calibration and held-out operand sets of 48 recurrent
instances, 32 output rows, 28 accepted paths, each block twice in each of two fresh processes, and
controls that must be noticed. Then what it leaves out: several steps in a row, so that deferred
writes and ring cursors are reached, random trees in any packing order, sequences that take no part,
and the share of planted mistakes that is caught.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from treejax.audit.base import Check, Report
from treejax.audit.component.block import WIDE, Block, Case, run_block
from treejax.audit.component.controls import FAULTS, POISONS, Scene, Stand, poisoned
from treejax.audit.component.operands import HYDRA, plant
from treejax.audit.component.process import Job, fresh_processes
from treejax.audit.component.repeats import repeats
from treejax.audit.component.rig import Rig, as_policy
from treejax.audit.component.rules import promise_of
from treejax.audit.component.settings import Settings
from treejax.audit.component.sizes import wrong_buffers
from treejax.audit.component.steps import Journey, travel
from treejax.audit.component.subject import Subject
from treejax.audit.component.tally import (
    AUDIT,
    KINDS,
    Cells,
    check_cells,
    check_whole,
    label_of,
    paper_row,
    protocol_row,
)
from treejax.audit.component.truth import Nodes, Step, errors, same_bits
from treejax.audit.elsewhere import refuse_inside, why_it_stays
from treejax.policies import Policy
from treejax.progress import Advance, silent

FULL = Settings()
SPLITS = ("calibration", "held-out")
INACTIVE = (
    "outputs are compared with all 32 rows of the tree active, as LumoTree computes its masked "
    "rows too; as served, 28 rows are active and the four inactive ones are no cells: that they "
    "change nothing is a control"
)


def run(policies: Sequence[Policy], settings: Settings = FULL, advance: Advance = silent) -> Report:
    """Audit policies.

    Args:
      policies: objects, also a user's own.
      advance: is told what runs, how much is done and how much there is.

    A policy that raises, or that gives what no policy gives, is red from there on, and the others
    are audited to the end.

    Raises:
      ValueError: an object that is no policy, or one that is given twice; one line.
    """
    refuse_inside()
    subjects = _subjects(policies)
    clock = _Clock(advance, len(subjects), settings)
    first = Case.of(settings.shape, settings.seed, 0, 0)
    for subject in subjects:
        trees = plant(settings.shape, [HYDRA] * settings.shape.batch)
        with subject.guarded({"while": f"traced at {settings.shape}"}):
            subject.rig.check(settings.shape, first.drawn, trees)
        if not subject.runs:
            continue
        with subject.guarded({"while": "buffers()"}):
            wrong = wrong_buffers(subject.rig.policy, settings.shape)
            note = f"{', '.join(wrong)}: expected bytes by name, integers of 0 or more"
            subject.add("buffers() that are no bytes", {}, len(wrong), note if wrong else "")
    cases = [[settings.seed, i, j] for i in range(len(SPLITS)) for j in range(settings.sets)]
    seeds = tuple(map(tuple, cases))
    stays = {s.label: why_it_stays(s.rig.policy) for s in subjects if s.runs}
    apart = [s for s in subjects if s.runs and stays[s.label] is None]
    job = Job(tuple(s.rig.policy for s in apart), settings.shape, seeds, settings.runs)
    steps = {s.rig.policy.implementation: s.rig.native() for s in subjects}
    with fresh_processes(job, settings.processes) as processes:
        for split, name in enumerate(SPLITS):
            _protocol(subjects, steps, settings, seeds, split, name, clock)
        _journeys(subjects, steps, settings, clock)
        _controls(subjects, steps, settings, clock)
        repeats(subjects, stays, processes, settings, seeds, clock)
    clock("component audit", 0)
    return Report(tuple(c for s in subjects for c in s.checks), _tables(subjects), _facts(settings))


def _subjects(policies: Sequence[Policy]) -> list[Subject]:
    made = [as_policy(policy) for policy in policies]
    if not made:
        raise ValueError("there is no policy to audit, expected at least one")
    labels = [label_of(policy) for policy in made]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise ValueError(f"policy {label} is given twice: leave one out, or name them apart")
    return [Subject(x, Rig(p), promise_of(p)) for x, p in zip(labels, made, strict=True)]


class _Clock:
    """Progress in equal parts: every policy at every set, shape and scene, and the repeats."""

    def __init__(self, advance: Advance, subjects: int, settings: Settings):
        s, scenes = settings, _scenes(settings)
        parts = len(SPLITS) * s.sets + s.journeys * (1 + len(s.random)) + scenes
        self._advance, self._done, self._total = advance, 0, subjects * (parts + 1)

    def __call__(self, what: str, more: int = 1) -> None:
        self._advance(what, self._done, self._total)
        self._done += more


def _scenes(settings: Settings) -> int:
    return -(-settings.strikes // settings.controls.batch)


def _protocol(
    subjects: Sequence[Subject],
    steps: dict[str, Step],
    settings: Settings,
    seeds: Sequence[tuple[int, ...]],
    split: int,
    name: str,
    clock: _Clock,
) -> None:
    """All operand sets of a split: truth once a set, native results once an implementation."""
    found: dict[str, list[tuple[Cells, ...]]] = {s.label: [] for s in subjects}
    for seed in seeds[split * settings.sets : (split + 1) * settings.sets]:
        case = Case.of(settings.shape, *seed)
        truth = case.truth()
        decoded = {how: case.decoded(step) for how, step in steps.items()}
        for subject in subjects:
            clock(f"{subject.label}: {name} operands")
            if not subject.runs:
                continue
            with subject.guarded({"split": name}):
                block = run_block(subject.rig, case)
                subject.digests.append([block.digest])
                native = decoded[subject.rig.policy.implementation]
                found[subject.label].append(_cells(block, truth, native))
    for subject in filter(lambda s: s.runs, subjects):
        wide, served, states = (list(x) for x in zip(*found[subject.label], strict=True))
        for layer in range(settings.shape.layers):
            for cells in (wide, served, states):
                form = "32 rows active" if cells is wide else "28 of 32 rows active"
                part = Cells.joined([each.of_layer(1, layer) for each in cells])
                where = {"split": name, "tree": form, "layer": layer}
                subject.checks.extend(check_cells(subject.label, subject.promise, part, where))
        pair = Cells.joined(wide), Cells.joined(states)
        for cells in pair:
            where = {"split": name}
            subject.checks.extend(check_whole(subject.label, subject.promise, cells, where))
        subject.protocol.append(protocol_row(subject.label, name, subject.promise, *pair))


def _cells(block: Block, truth: Nodes, native: Nodes) -> tuple[Cells, Cells, Cells]:
    """Of the tree with all rows active, of the one that is served, and of the states."""

    def one(kind: str, made: np.ndarray, axes: int) -> Cells:
        exact, decoded = (getattr(nodes, kind)[: len(made)] for nodes in (truth, native))
        bits = int(same_bits(made, decoded, axes).sum())
        return Cells(kind, errors(made, exact, axes), errors(decoded, exact, axes), bits)

    assert len(block.wide) >= len(WIDE)
    return (
        one("outputs", block.wide[: len(WIDE)], 2),
        one("outputs", block.outputs, 2),
        one("states", block.states, 3),
    )


def _journeys(
    subjects: Sequence[Subject], steps: dict[str, Step], settings: Settings, clock: _Clock
) -> None:
    """Several steps in a row, at the protocol's shape and at those of the random trees."""
    for shape in (settings.shape, *settings.random):
        seen: dict[str, list[Any]] = {s.label: [] for s in subjects}
        for at in range(settings.journeys):
            seed = settings.seed + 1000 * at
            ways = {h: Journey.of(shape, seed, settings.steps, s) for h, s in steps.items()}
            for subject in subjects:
                clock(f"{subject.label}: {settings.steps} steps, {shape}")
                if not subject.runs:
                    continue
                with subject.guarded({"shape": str(shape), "steps": settings.steps}):
                    way = ways[subject.rig.policy.implementation]
                    seen[subject.label].append(travel(subject.rig, way))
        for subject in filter(lambda s: s.runs, subjects):
            _travelled(subject, seen[subject.label], str(shape), settings.steps)


def _travelled(subject: Subject, seen: Sequence[Any], shape: str, steps: int) -> None:
    where: dict[str, int | str] = {"shape": shape, "steps": steps}
    pair = []
    for i, kind in enumerate(KINDS):
        every = [Cells(kind, x.made[i], x.decoded[i], x.bits[i]) for x in seen]
        pair.append(Cells.joined(every))
        subject.checks.extend(check_cells(subject.label, subject.promise, pair[-1], where))
        subject.checks.extend(check_whole(subject.label, subject.promise, pair[-1], where))
    moved, idle = (sum(getattr(x, name) for x in seen) for name in ("moved", "idle"))
    subject.add("idle sequences that changed", where, moved, f"of {idle}")
    row = protocol_row(subject.label, "", subject.promise, *pair)
    del row["split"]
    wrote = sum(x.wrote for x in seen)
    subject.steps.append(row | {"shape": shape, "verifies that wrote": wrote, "idle": idle})


def _controls(
    subjects: Sequence[Subject], steps: dict[str, Step], settings: Settings, clock: _Clock
) -> None:
    """Mistakes that must be noticed, rightly published states that must not be, and poison."""
    names = ["false alarms", *FAULTS, *(f"{poison} {kind}" for poison in POISONS for kind in KINDS)]
    counts = {s.label: {name: [0, 0] for name in names} for s in subjects}
    for at in range(_scenes(settings)):
        seed = settings.seed + 2000 + at
        scenes = {h: Scene.of(settings.controls, seed, step) for h, step in steps.items()}
        for subject in subjects:
            clock(f"{subject.label}: controls")
            if not subject.runs:
                continue
            with subject.guarded({"while": "controls"}):
                scene = scenes[subject.rig.policy.implementation]
                stand = Stand.of(scene, subject.rig, subject.promise)
                _strike(stand, counts[subject.label])
    for subject in filter(lambda s: s.runs, subjects):
        _controlled(subject, counts[subject.label])


def _strike(stand: Stand, counts: dict[str, list[int]]) -> None:
    """Add to every control's counts, seen and all, what becomes of it on a stand."""
    found: dict[str, Iterable[bool]] = {
        "false alarms": stand.seen(stand.states(stand.scene.paths)),
        **{name: fault(stand) for name, fault in FAULTS.items()},
    }
    for name, seen in found.items():
        seen = list(seen)
        counts[name][0] += int(sum(seen))
        counts[name][1] += len(seen)
    for name, value in POISONS.items():
        states, outputs = poisoned(stand, value)
        for kind, changed in (("states", states), ("outputs", outputs)):
            counts[f"{name} {kind}"][0] += changed
            counts[f"{name} {kind}"][1] += stand.scene.shape.instances


def _controlled(subject: Subject, counts: dict[str, list[int]]) -> None:
    promise = subject.promise
    for name, (seen, all_) in counts.items():
        subject.controls[name] = f"{seen} of {all_}"
        note = f"{seen} of {all_}"
        if name in FAULTS:
            # Products coarser than the fault hide it: counted in the table, and no check.
            if name != "rounded gate" or promise.exact:
                share = Check(
                    *(AUDIT, subject.label, f"noticed: {name}", {}, seen / max(all_, 1), 1.0),
                    at_least=True,
                    note=f"{note} strikes",
                )
                subject.checks.append(share)
        elif name == "false alarms":
            subject.add(name, {}, seen, f"of {all_} sequences published rightly")
        elif (
            name.startswith("huge")
            or promise.confined
            or (promise.bitwise and name == "NaN states")
        ):
            subject.add(f"changed by off-path rows: {name}", {}, seen, f"of {all_} instances")


def _tables(subjects: Sequence[Subject]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    protocol = [row for s in subjects for row in s.protocol]
    controls = [{"policy": s.label, **s.controls} for s in subjects if s.runs]
    return (
        ("Component audit over hydra27, beside LumoTree's counts", (paper_row(), *protocol)),
        ("Several steps in a row", tuple(row for s in subjects for row in s.steps)),
        ("Controls: strikes noticed, and what poison off the path changed", tuple(controls)),
    )


def _facts(settings: Settings) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "component": {
            "settings": dataclasses.asdict(settings),
            "instances": settings.shape.instances,
            "device": device.device_kind,
            "jax": jax.__version__,
            "rows": INACTIVE,
        }
    }
