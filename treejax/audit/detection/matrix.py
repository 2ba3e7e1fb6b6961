"""The fault matrix: whether the audit would notice. Every planted fault of the engine is struck in
as many random places as there are seeds, and the audit, which sees the faulty engine and plain
decoding alone, must catch it; it must find nothing in engines without a fault.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from treejax.audit.base import Check, Report
from treejax.audit.continuation import settings as continuation_settings
from treejax.audit.detection.bench import prepare, script
from treejax.audit.detection.envelope import judge_of
from treejax.audit.detection.run import Caught, joined, run_bench
from treejax.audit.detection.strikes import draw_strikes, had_effect
from treejax.audit.detection.toy import toy
from treejax.audit.faults import REGISTRY, Fault
from treejax.audit.faults.anyone import AnyOf
from treejax.audit.faults.convolution import History
from treejax.audit.prefixes import prefixes
from treejax.audit.raised import guarded
from treejax.audit.step import Subject
from treejax.drafters import MTP, Drafter
from treejax.model import Model
from treejax.policies import make_policy
from treejax.progress import Advance, silent
from treejax.steps.rules import REGISTRY as RULES

POWER = 0.99
"""The share of seeds in which a fault must be caught."""


CONTROLS = continuation_settings.Settings(prefixes=6, length=40, shorter=2, long_tokens=0)
"""Of the envelope: prefixes as short as the texts here, which rounding has less time to move."""

LOT = 30
"""Sequences at most that run side by side: a program with every fault in it needs room."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the matrix is filled.

    Attributes:
      seeds: sequences that each fault strikes, in one place each.
      faults: their names; None for all.
      policies: that every fault of the recurrent state strikes, as far as it can act on them.
      elsewhere: the policy under which the others strike.
      tree: of both drafters.
      schedule: of the scripted drafter: (levels proposed, right tokens) of each step; there are as
        many steps as entries.
      length: tokens of a prompt.
      temperature: of both texts, which draw with one noise.
      controls: of the continuation audit, whose envelope judges here too; None leaves native
        decoding's verify of these trees the only control, which compiles nothing of its own.
      factor: of the bounds over what that verify showed, on calibration texts.
      on_toy: plant in a small random model, whatever model is given.
      seed: of prompts and places.
    """

    seeds: int = 100
    faults: tuple[str, ...] | None = None
    policies: tuple[str, ...] = ("replay", "wy", "ring", "fused")
    elsewhere: str = "replay"
    tree: str = "3,2,1"
    schedule: tuple[tuple[int, int], ...] = ((3, 3), (2, 1), (3, 2), (1, 0), (3, 1), (2, 2))
    length: int = 24
    temperature: float = 1.0
    controls: continuation_settings.Settings | None = CONTROLS
    factor: float = 4.0
    on_toy: bool = False
    seed: int = 0

    @property
    def batch(self) -> int:
        """Sequences: some more than seeds, as a fault may show nowhere in one of them."""
        return self.seeds + (self.seeds + 4) // 5

    @classmethod
    def quick(cls) -> "Settings":
        """A few seeds of what needs no head, under one policy, on a toy."""
        faults = tuple(name for name, fault in REGISTRY.items() if not fault.drafted)
        policies, other = ("ring",), "ring"
        return cls(5, faults, policies, other, controls=None, on_toy=True)


def run(
    model: Model | None,
    names: Iterable[str] | None = None,
    settings: Settings = Settings(),
    advance: Advance = silent,
) -> Report:
    """Strike every fault of ``names`` (None: of the settings) and tell what was caught.

    Raises:
      ValueError: one line: an unknown fault, or one that can strike none of the policies.
    """
    chosen = settings.faults or tuple(REGISTRY) if names is None else names
    faults = [_named(name) for name in chosen]
    plan = [(fault, policy) for fault in faults for policy in policies_of(fault, settings)]
    needed = sorted({fault.drafted for fault, _ in plan})
    clean = dict.fromkeys((fault.drafted, policy) for fault, policy in plan)
    total = 1 + len(needed) + len(clean) + len(plan)
    if settings.on_toy or model is None:
        model = toy()
    scripted, heat = script(settings.tree, settings.schedule), settings.temperature
    drafters: dict[bool, Drafter] = {True: MTP(settings.tree), False: scripted}
    for fault, policy in plan:
        fault.check(model.config, make_policy(policy, "xla"), drafters[fault.drafted])

    done, benches = 0, {}
    advance("calibration", done, total)
    steps = len(settings.schedule)
    lots = -(-settings.batch // LOT)
    size = -(-settings.batch // lots)
    texts = prefixes(model, "calibration", size, settings.length, settings.seed)
    judge = judge_of(
        prepare(model, scripted, texts, steps, heat), settings.factor, settings.controls
    )
    texts = prefixes(model, "held-out", lots * size, settings.length, settings.seed)
    for drafted in needed:
        done += 1
        advance("plain decoding", done, total)
        benches[drafted] = [
            prepare(model, drafters[drafted], texts[lot * size :][:size], steps, heat)
            for lot in range(lots)
        ]
    done += 1

    def tried(drafted: bool, name: str, fault: Fault | None) -> Caught:
        policy, benched = make_policy(name, "xla"), benches[drafted]
        right = Subject(policy, drafters[drafted], RULES["match"])
        if fault is None:
            return joined([run_bench(bench, right, judge) for bench in benched])
        together = AnyOf(
            "faults", faults=tuple(f for f, p in plan if f.drafted == drafted and p == name)
        )
        subject, parts = dataclasses.replace(right, fault=together), []
        for lot, bench in enumerate(benched):
            seed = settings.seed, lot
            strike = draw_strikes(fault, policy, bench, seed, judge.decided(bench))
            strike = together.strike(fault, strike)
            made = run_bench(bench, subject, judge, strike)
            missed = made.struck & ~made.caught
            parts.append(made.among(had_effect(bench, subject, strike, missed)))
        made = joined(parts)
        return made.among(np.cumsum(made.struck) <= settings.seeds)

    alarms, rows, raised = [], [], list[Check]()
    for drafted, policy in clean:
        advance(f"no fault under {policy}", done, total)
        done += 1
        drafter = drafters[drafted]
        with guarded("faults", f"{policy}/{drafter.name}", {}, raised):
            alarms.append(_row(Fault(), policy, drafter, tried(drafted, policy, None)))
    for fault, policy in plan:
        advance(f"{fault.name} under {policy}", done, total)
        done += 1
        drafter = drafters[fault.drafted]
        with guarded("faults", f"{policy}/{drafter.name} with {fault.name}", {}, raised):
            rows.append(_row(fault, policy, drafter, tried(fault.drafted, policy, fault)))
    checks = [_alarm(row) for row in alarms] + [_power(row) for row in rows] + raised
    tables = (
        ("Planted faults of the engine", tuple(map(_shown, rows))),
        ("Runs without a fault", tuple(map(_shown, alarms))),
    )
    bounds = {name: list(values) for name, values in judge.bounds.items()}
    return Report(tuple(checks), tables, {"detection": {"bounds": bounds}})


def policies_of(fault: Fault, settings: Settings) -> list[str]:
    """Under which policies a fault is planted: those that it can strike.

    Raises:
      ValueError: one line: it can strike none of them.
    """
    wide = fault.needs == "recurrent" and not isinstance(fault, History)
    asked = settings.policies if wide else (settings.elsewhere,)
    able = [name for name in asked if fault.policies is None or name in fault.policies]
    if not able:
        raise ValueError(
            f"fault {fault.name!r} can strike none of the policies {', '.join(asked)}, "
            f"expected of: {', '.join(fault.policies or ())}"
        )
    return able


def _named(name: str) -> Fault:
    if name not in REGISTRY:
        raise ValueError(f"fault {name!r} is unknown, expected of: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def _row(fault: Fault, policy: str, drafter: Drafter, made: Caught) -> dict[str, Any]:
    """One line of the matrix."""
    caught = made.caught & made.struck
    surfaces = Counter(name for b in np.flatnonzero(caught) for name in made.seen[b])
    return {
        "fault": fault.name,
        "policy": policy,
        "drafter": drafter.name,
        "seeds": int(made.struck.sum()),
        "caught": int(caught.sum()),
        "seen in": dict(surfaces.most_common()),
        "weakest": float(made.ratio[caught].min()) if caught.any() else 0.0,
    }


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line as a reader reads it."""
    seen = ", ".join(f"{name} {count}" for name, count in row["seen in"].items())
    clear = "exact" if row["weakest"] == float("inf") else f"{row['weakest']:.3g} x bound"
    return {**row, "seen in": seen, "weakest": clear if row["caught"] else ""}


def _power(row: Mapping[str, Any]) -> Check:
    """Detection power against ``POWER``; no seed struck is none caught."""
    value = row["caught"] / row["seeds"] if row["seeds"] else 0.0
    return Check(
        audit="faults",
        subject=f"{row['policy']}/{row['drafter']} with {row['fault']}",
        name="detection power",
        where={"seeds": row["seeds"]},
        value=value,
        bound=POWER,
        at_least=True,
        note=REGISTRY[row["fault"]].says,
    )


def _alarm(row: Mapping[str, Any]) -> Check:
    return Check(
        audit="faults",
        subject=f"{row['policy']}/{row['drafter']}",
        name="false alarms",
        where={"seeds": row["seeds"]},
        value=float(row["caught"]),
        bound=0.0,
        note="runs without a fault",
    )
