"""What the sampler audit catches: planted faults over many seeds, clean samplers beside them."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from treejax.audit.base import Check, Report
from treejax.audit.prefixes import prefixes
from treejax.audit.sampler.capture import capture
from treejax.audit.sampler.enumeration import EXACT, Toy, coin_distance
from treejax.audit.sampler.faults import REGISTRY
from treejax.audit.sampler.faults.base import Bent, Sampler, SamplerFault
from treejax.audit.sampler.settings import AUDIT, FULL, Settings, carry_out, name_of
from treejax.audit.sampler.streams import different_streams
from treejax.audit.sampler.walks import Outcome, g_tests, keys_of, take_walks
from treejax.audit.sampler.worlds import DESIGNED, P, Q, World, made_up
from treejax.model import Model
from treejax.progress import Advance, silent
from treejax.steps.rules.base import CoinRule
from treejax.steps.rules.match import Match

POWER = 0.99
GROUP = 16
"""Sequences that make one seed of streams."""
_FIXTURES = (
    (Toy.constant(P, Q, 1), [-1, 0, 0, 0]),
    (Toy.random(np.random.default_rng(0), 5, 2), [-1, 0, 0, 1]),
)
"""Small trees on which a fault in a law is enumerated: of one node, and of a path."""
LUMOTREE = {
    "temperature_twice": 5,
    "neighbours_row_match": 6,
    "last_draw_fixed": 4,
    "always_accepted": 3,
    "key_at_all_depths": 1,
}
"""On how many of its six captured steps LumoTree's audit saw these faults (its appendix on the
sampler): temperature twice, rows shifted, fixed residual draw, unconditional acceptance and
correlated draws, each with 200,000 walks a step."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What the tests saw of one sampler.

    Attributes:
      outcomes: the G-tests of every seed; streams: [seeds] whether a stream was not plain's.
      exact: total variation by enumeration, where the fault lies in a rule's law.
    """

    outcomes: list[list[Outcome]] = dataclasses.field(default_factory=list)
    streams: np.ndarray | None = None
    exact: float | None = None

    @property
    def tests(self) -> int:
        return sum(map(len, self.outcomes))

    def seen(self, threshold: float, kind: str = "") -> np.ndarray | None:
        """[seeds] whether a G-test (of a kind) rejects; None without G-tests."""
        if not self.outcomes:
            return None
        return np.array(
            [
                any(one.p < threshold and one.kind.startswith(kind) for one in tests)
                for tests in self.outcomes
            ]
        )

    def caught(self, threshold: float) -> np.ndarray:
        """[seeds] whether any test of that seed rejects."""
        ways = [way for way in (self.seen(threshold), self.streams) if way is not None]
        return np.logical_or.reduce(ways)


def detect(
    names: Sequence[str] | None = None,
    settings: Settings = FULL,
    advance: Advance = silent,
    model: Model | None = None,
) -> Report:
    """Plant faults (all, or those named) and count the seeds in which they are caught.

    Every seed has walks and streams of its own. The same samplers without a fault say how often
    the tests are wrong. Faults that LumoTree planted are also tried on captured steps.

    Args:
      model: from which steps are captured; made-up steps serve where it is None.

    Raises:
      ValueError: an unknown fault.
    """
    names = list(REGISTRY) if names is None else list(names)
    unknown = [name for name in names if name not in REGISTRY]
    if unknown:
        raise ValueError(f"fault {unknown[0]!r} is unknown, expected one of: {', '.join(REGISTRY)}")
    began = time.perf_counter()
    clean = list(dict.fromkeys(_clean(REGISTRY[name]) for name in names))
    jobs: list[tuple[str, Callable[[], Any]]] = [
        (f"clean {name_of(sampler)}", lambda s=sampler, w=world, n=n: _try(s, w, settings, n))
        for n, (sampler, world) in enumerate(clean)
    ]
    jobs += [
        (name, lambda f=REGISTRY[name], n=n: _try(Sampler.with_fault(f), f.world, settings, n))
        for n, name in enumerate(names, len(clean))
    ]
    compared = [name for name in names if name in LUMOTREE and settings.steps]
    steps = _steps(model, settings) if compared else []
    jobs += [
        (f"{name} on steps", lambda f=REGISTRY[name]: _on_steps(f, steps, settings))
        for name in compared
    ]
    done = carry_out(jobs, advance)
    right, wrong = done[: len(clean)], done[len(clean) : len(clean) + len(names)]
    on_steps = dict(zip(compared, done[len(clean) + len(names) :], strict=True))
    threshold = settings.alpha / max(1, sum(found.tests for found in right))
    beside = list(zip(clean, right, strict=True))
    tables = [
        ("Sampler faults", tuple(map(_fault_row(threshold), names, wrong))),
        (
            "Clean samplers",
            tuple(_clean_row(threshold, *pair) for pair in zip(clean, right, strict=True)),
        ),
    ]
    if compared:
        rows = (_lumotree_row(name, found, threshold) for name, found in on_steps.items())
        tables.append(("Steps on which a fault is seen, beside LumoTree's", tuple(rows)))
    checks = [_power(name, found, threshold) for name, found in zip(names, wrong, strict=True)]
    checks += [_alarms(*pair, threshold) for pair in beside]
    pairs = zip(names, wrong, strict=True)
    checks += [_far(name, found) for name, found in pairs if found.exact is not None]
    facts = {
        "settings": dataclasses.asdict(settings),
        "threshold": threshold,
        "steps": "captured" if model is not None and compared else "made up",
        "seconds": time.perf_counter() - began,
    }
    return Report(tuple(checks), tuple(tables), {"sampler faults": facts})


def _clean(fault: SamplerFault) -> tuple[Sampler, str]:
    """The same sampler without the fault; where proposals are the fault, with honest ones."""
    proposals = fault.proposals
    if proposals not in fault.rule.serves:
        proposals = sorted(fault.rule.serves)[-1]
    return Sampler(fault.rule, proposals), fault.world


def _try(sampler: Sampler, world_name: str, settings: Settings, number: int) -> Found:
    """Every test of one sampler, over all seeds."""
    world, seeds, fault = DESIGNED[world_name](), settings.fault_seeds, sampler.fault
    outcomes, streams, exact = [], None, None
    if fault is None or not fault.streams_only:
        joint, _ = world.joint()
        keys = keys_of(seeds * settings.fault_walks, settings.seed, number)
        tokens, _ = take_walks(world, sampler, keys)
        parts = np.split(tokens, seeds)
        outcomes = [g_tests(part, joint, world.vocabulary) for part in parts]
    if type(sampler.rule) is Match:
        count = GROUP * seeds
        differs, _ = different_streams(
            world, sampler, count, settings.tokens, settings.seed, number
        )
        streams = differs.reshape(seeds, GROUP).any(axis=1)
    if fault is not None and fault.law is not None:
        assert isinstance(sampler.rule, CoinRule)
        law = Bent(sampler.rule, fault.law).law
        exact = max(
            coin_distance(law, sampler.proposals, toy, parents, np.random.default_rng(0), 4)
            for toy, parents in _FIXTURES
        )
    return Found(outcomes, streams, exact)


def _steps(model: Model | None, settings: Settings) -> list[World]:
    if model is None:
        return made_up(settings.steps)
    (prompt,) = prefixes(model, "held-out", 1, 64, settings.seed)
    return capture(model, prompt, settings.steps, settings.seed)


def _on_steps(fault: SamplerFault, steps: Iterable[World], settings: Settings) -> Found:
    """One repetition of full walks through every step; each step is a seed of what is found."""
    outcomes, sampler = [], Sampler.with_fault(fault)
    for place, world in enumerate(steps):
        tokens, _ = take_walks(world, sampler, keys_of(settings.walks, settings.seed, place))
        outcomes.append(g_tests(tokens, world.joint()[0], world.vocabulary))
    return Found(outcomes)


def _share(seen: np.ndarray | None) -> float | None:
    return None if seen is None else float(seen.mean())


def _fault_row(threshold: float) -> Callable[[str, Found], dict[str, Any]]:
    def row(name: str, found: Found) -> dict[str, Any]:
        fault = REGISTRY[name]
        return {
            "fault": name,
            "says": fault.says,
            "sampler": name_of(Sampler(fault.rule, fault.proposals)),
            "world": fault.world,
            "seeds": len(found.caught(threshold)),
            "exact": found.exact,
            "conditional G": _share(found.seen(threshold, "conditional")),
            "joint G": _share(found.seen(threshold, "joint")),
            "equality": _share(found.streams),
            "power": float(found.caught(threshold).mean()),
        }

    return row


def _clean_row(threshold: float, subject: tuple[Sampler, str], found: Found) -> dict[str, Any]:
    return {
        "sampler": name_of(subject[0]),
        "world": subject[1],
        "seeds": len(found.outcomes),
        "tests": found.tests,
        "smallest p": min(one.p for tests in found.outcomes for one in tests),
        "threshold": threshold,
        "streams that differ": None if found.streams is None else int(found.streams.sum()),
        "false alarms": int(found.caught(threshold).sum()),
    }


def _lumotree_row(name: str, found: Found, threshold: float) -> dict[str, Any]:
    seen = found.seen(threshold)
    assert seen is not None
    return {
        "fault": name,
        "steps": len(seen),
        "seen": int(seen.sum()),
        "LumoTree, of 6": LUMOTREE[name],
    }


def _power(name: str, found: Found, threshold: float) -> Check:
    caught = found.caught(threshold)
    return Check(
        *(AUDIT, name, "detection power", {"seeds": len(caught)}),
        value=float(caught.mean()),
        bound=POWER,
        at_least=True,
        note=REGISTRY[name].says,
    )


def _alarms(subject: tuple[Sampler, str], found: Found, threshold: float) -> Check:
    caught = found.caught(threshold)
    return Check(
        *(AUDIT, f"clean {name_of(subject[0])}", "false alarms"),
        where={"world": subject[1], "seeds": len(caught)},
        value=float(caught.sum()),
        bound=0.0,
    )


def _far(name: str, found: Found) -> Check:
    assert found.exact is not None
    return Check(
        *(AUDIT, name, "total variation, enumerated", {}),
        value=found.exact,
        bound=1e3 * EXACT,
        at_least=True,
        note="how far the fault moves the law",
    )
