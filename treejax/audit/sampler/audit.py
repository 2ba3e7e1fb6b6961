"""The sampler audit: acceptance rules against the exact law of plain decoding.

Three proofs for each rule and each way to draft that it serves: every outcome of small trees
enumerated in float64; many walks of many steps held against exact laws by G-tests; and for
``match`` equality with plain draws, token for token. ``detection`` shows what they catch.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from treejax.audit.base import Check, Report
from treejax.audit.prefixes import prefixes
from treejax.audit.raised import RAISED, guarded
from treejax.audit.sampler.capture import capture
from treejax.audit.sampler.detection import detect
from treejax.audit.sampler.enumeration import (
    EXACT,
    Toy,
    coin_distance,
    depths,
    enumerable,
    match_distance,
    ordered_trees,
)
from treejax.audit.sampler.faults.base import Sampler
from treejax.audit.sampler.settings import AUDIT, FULL, Settings, carry_out, name_of
from treejax.audit.sampler.streams import different_streams
from treejax.audit.sampler.walks import Outcome, g_tests, keys_of, take_walks
from treejax.audit.sampler.worlds import DESIGNED, World
from treejax.model import Model
from treejax.progress import Advance, silent
from treejax.steps.rules.base import CoinRule, Rule
from treejax.steps.rules.match import Match

__all__ = ["Settings", "detect", "run"]

_KINDS = ("coupled", "without_replacement", "iid", "fixed")
"""Kinds of candidates; the first that a rule serves stands for all where little is done."""


@dataclasses.dataclass(frozen=True)
class Walked:
    """One repetition of the walks of a sampler through a world."""

    sampler: Sampler
    world: World
    seed: int
    accepted: float
    outcomes: list[Outcome]
    distance: float


def run(
    model: Model | None,
    rules: Sequence[Rule],
    settings: Settings = FULL,
    advance: Advance = silent,
) -> Report:
    """Audit acceptance rules, ours or a user's own objects.

    A rule that says it is lossy is measured, and its report is red: it changes the law. So is that
    of a rule that raises, and the others are audited to the end.

    Args:
      model: whose verified rows are walked through as well; None for toy targets alone.

    Raises:
      ValueError: no rule, or nothing to walk through.
    """
    if not rules:
        raise ValueError("no rule was given, expected at least one to audit")
    began = time.perf_counter()
    worlds = [DESIGNED[name]() for name in settings.worlds]
    captured = "none: no model was given, or no steps were asked for"
    if model is not None and settings.steps and "mtp" not in model.params:
        captured = "none: the model has no MTP head, whose rows would be the drafter's"
    elif model is not None and settings.steps:
        captured = f"{settings.steps} of one generation"
        advance("capturing steps", 0, 1)
        (prompt,) = prefixes(model, "held-out", 1, 64, settings.seed)
        worlds += capture(model, prompt, settings.steps, settings.seed)
    if not worlds:
        raise ValueError(
            "no worlds and no captured steps leave nothing to walk through: name a world, or give "
            "a model and steps"
        )
    samplers: list[Sampler] = []
    raised: list[Check] = []
    for rule in rules:
        with guarded(AUDIT, rule.name, {"while": "asked what it serves"}, raised):
            samplers += samplers_of(rule, settings)
    jobs = [
        (what, functools.partial(_sound, name_of(sampler), {"while": what, **where}, job))
        for place, sampler in enumerate(samplers)
        for what, where, job in _jobs(sampler, worlds, settings, place)
    ]
    done = [*raised, *carry_out(jobs, advance)]
    walked = [one for made in done if isinstance(made, list) for one in made]
    checks = [made for made in done if isinstance(made, Check)]
    honest = [one for one in walked if one.sampler.rule.lossless]
    threshold = settings.alpha / max(1, sum(len(one.outcomes) for one in honest))
    checks += [check for one in honest for check in _checks(one, threshold)]
    checks += _lossy(samplers, checks, walked)
    return Report(
        checks=tuple(checks),
        tables=(("Sampler: walks", tuple(_rows(walked, threshold))),),
        facts={
            AUDIT: {
                "settings": dataclasses.asdict(settings),
                "captured steps": captured,
                "worlds": [world.name for world in worlds],
                "threshold": threshold,
                "seconds": time.perf_counter() - began,
            }
        },
    )


def _jobs(
    sampler: Sampler, worlds: Sequence[World], settings: Settings, place: int
) -> Iterable[tuple[str, dict[str, int | str], Callable[[], Any]]]:
    """What is done with a sampler: a word for it, where, and the work."""
    if enumerable(sampler.rule):
        yield "enumerating", {}, functools.partial(enumerate_trees, sampler, settings)
    for world in worlds:
        there: dict[str, int | str] = {"world": world.name}
        number = (settings.seed, place)
        yield "walking", there, functools.partial(_walk, sampler, world, settings, number)
        if type(sampler.rule) is Match:
            yield "comparing streams", there, functools.partial(_compare, sampler, world, settings)


def _sound(subject: str, where: dict[str, int | str], job: Callable[[], Any]) -> Any:
    """What the job gives; a failed check if the rule raises."""
    raised: list[Check] = []
    with guarded(AUDIT, subject, where, raised):
        return job()
    return raised[0]


def samplers_of(rule: Rule, settings: Settings) -> list[Sampler]:
    """The rule with every kind of candidates that it serves, and its form for each."""
    kinds = [kind for kind in _KINDS if kind in rule.serves]
    if settings.shrunk or not rule.lossless:
        kinds = kinds[:1]
    pairs = [(form, kind) for kind in kinds for form in (rule, rule.sharpest(kind))]
    return [Sampler(form, kind) for form, kind in dict.fromkeys(pairs)]


def enumerate_trees(sampler: Sampler, settings: Settings) -> Check:
    """The largest distance from plain over every tree of the settings' sizes."""
    rule, rng, worst, count = sampler.rule, np.random.default_rng(settings.seed), 0.0, 0
    for vocabulary, rows in settings.trees:
        for size in range(1, rows + 1):
            for parents in ordered_trees(size):
                if rule.chains_only and len(set(parents)) < size:
                    continue
                toy, count = Toy.random(rng, vocabulary, max(depths(parents))), count + 1
                if isinstance(rule, CoinRule):
                    found = coin_distance(rule.law, sampler.proposals, toy, parents, rng, rows)
                else:
                    found = match_distance(toy, parents, rng, rows)
                worst = max(worst, found)
    return Check(
        *(AUDIT, name_of(sampler), "total variation, enumerated", {"trees": count}),
        value=worst,
        bound=EXACT,
        note="every draft, coin and last draw" if isinstance(rule, CoinRule) else "every draw",
    )


def _walk(
    sampler: Sampler, world: World, settings: Settings, number: tuple[int, ...]
) -> list[Walked]:
    joint, _ = world.joint()
    found = []
    for seed in range(settings.seeds):
        keys = keys_of(settings.walks, *number, seed, *world.name.encode())
        tokens, accepted = take_walks(world, sampler, keys)
        tests = g_tests(tokens, joint, world.vocabulary)
        distance = distance_of(tokens, joint, world.vocabulary)
        found.append(Walked(sampler, world, seed, accepted, tests, distance))
    return found


def distance_of(tokens: np.ndarray, joint: np.ndarray, vocabulary: int) -> float:
    """Total variation between walks as counted and their law, over the first three tokens."""
    kept = joint.reshape(vocabulary**3, -1).sum(axis=1)
    code = np.clip(tokens[:, :3], 0, vocabulary - 1) @ vocabulary ** np.arange(2, -1, -1)
    counts = np.bincount(code, minlength=len(kept))
    return float(np.abs(counts / len(tokens) - kept).sum() / 2)


def _compare(sampler: Sampler, world: World, settings: Settings) -> Check:
    differs, accepted = different_streams(
        world, sampler, settings.sequences, settings.tokens, settings.seed
    )
    return Check(
        *(AUDIT, name_of(sampler), "streams that differ from plain", {"world": world.name}),
        value=float(differs.sum()),
        bound=0.0,
        note=f"of {len(differs)}; {accepted:.2f} candidates accepted a step",
    )


def _checks(one: Walked, threshold: float) -> Iterable[Check]:
    for test in one.outcomes:
        yield Check(
            audit=AUDIT,
            subject=name_of(one.sampler),
            name=f"{test.kind} G-test",
            where={"world": one.world.name, "of": test.of, "seed": one.seed},
            value=test.p,
            bound=threshold,
            at_least=True,
            note=f"G {test.g:.4g}, {test.freedom} degrees of freedom",
        )


def _lossy(
    samplers: Iterable[Sampler], checks: Sequence[Check], walked: Sequence[Walked]
) -> Iterable[Check]:
    """A red check for every rule that says it is lossy, with how far it goes."""
    for sampler in samplers:
        if sampler.rule.lossless:
            continue
        mine = [check for check in checks if check.subject == name_of(sampler)]
        far = [check.value for check in mine if check.name != RAISED]
        far += [one.distance for one in walked if one.sampler == sampler]
        yield Check(
            *(AUDIT, name_of(sampler), "lossy by its own account: total variation", {}),
            value=max(1.0 if not far else 0.0, *far, 2 * EXACT),
            bound=EXACT,
            note="the output is not the target's; largest distance over worlds and trees",
        )


def _rows(walked: Sequence[Walked], threshold: float) -> Iterable[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Walked]] = {}
    for one in walked:
        groups.setdefault((name_of(one.sampler), one.world.name), []).append(one)
    for (sampler, world), made in groups.items():
        p = [min(test.p for test in one.outcomes) for one in made]
        lossless = made[0].sampler.rule.lossless
        yield {
            "sampler": sampler,
            "world": world,
            "seeds": len(made),
            "tests": sum(len(one.outcomes) for one in made),
            "smallest p": min(p),
            "threshold": threshold,
            "accepted a step": float(np.mean([one.accepted for one in made])),
            "total variation": float(np.mean([one.distance for one in made])),
            "verdict": "lossy" if not lossless else "green" if min(p) >= threshold else "red",
        }
