"""The continuation audit: an engine's steps through the whole model against plain decoding.

Prefixes x schedules x cycles, every surface and the drafter's own state, held against an envelope
that was calibrated on other prefixes and frozen before (the audit of LumoTree, section 5 (b) of its
paper, with bounds that are calibrated by layer). Tokens, lengths and old attention rows are exact.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.base import Check, Report
from treejax.audit.continuation import fresh, long_run, tightness
from treejax.audit.continuation.calibration import calibrate, depth_of, plain_of
from treejax.audit.continuation.schedules import Course, End, compile_step, follow_schedule
from treejax.audit.continuation.settings import FULL, SCHEDULES, Settings
from treejax.audit.continuation.verdict import LONG, Tally
from treejax.audit.elsewhere import refuse_inside
from treejax.audit.envelope import LUMOTREE, Envelope
from treejax.audit.faults.base import Fault
from treejax.audit.prefixes import digest
from treejax.audit.rows import RowLogits
from treejax.audit.step import Subject
from treejax.model import Model
from treejax.progress import Advance, silent
from treejax.steps.rules.base import Rule
from treejax.steps.rules.match import Match

__all__ = ["SCHEDULES", "Envelope", "Settings", "calibrate", "run"]


def run(
    model: Model,
    subjects: Sequence[Subject],
    settings: Settings = FULL,
    envelope: Envelope | None = None,
    advance: Advance = silent,
) -> Report:
    """Audit every subject on held-out prefixes.

    Args:
      subjects: policies with drafters and rules, of any origin.
      envelope: bounds that were calibrated before; None calibrates first, on prefixes of its own,
        and the report says so.
      advance: is told what runs, how much is done and how much there is.

    A subject that raises is red, and all else is audited to the end.

    Raises:
      ValueError: one line: an envelope of another model, dtype, config or device, a subject whose
        stream is not plain's, or settings that the model has no room for.
    """
    refuse_inside()
    for subject in subjects:
        _check_subject(subject, settings)
        settings.rows(model, depth_of(subject.drafter))  # refused before anything runs
    calibrated = envelope is None
    if envelope is not None:
        envelope.check_use(model, settings.long_tokens)
    advance("envelope", 0, len(subjects) + 1)
    with _compiling() as pool:
        ready = [pool.submit(compile_step, model, subject, settings) for subject in subjects]
        if envelope is None:
            envelope = calibrate(model, settings)
            envelope.check_use(model, settings.long_tokens)
        frozen = envelope.digest
        texts = settings.texts(model, "held-out")
        if digest(texts) == envelope.provenance["prefixes"]:
            raise ValueError(
                "the envelope was calibrated on the held-out prefixes: change the seed"
            )
        checks: list[Check] = []
        tables: list[Any] = []
        facts: dict[str, Any] = {}
        references: dict[Any, Any] = {}
        for done, subject in enumerate(subjects, 1):
            advance(subject.name, done, len(subjects) + 1)
            tally = Tally(model, subject, envelope)
            with tally.guarded({"while": "prepared"}):
                if subject.drafter not in references:  # the last one alone: records are large
                    plain = plain_of(model, texts, subject.drafter, settings)
                    references = {subject.drafter: RowLogits(model, plain)}
                ready[done - 1].result()
                course = Course(model, subject, texts, references[subject.drafter], settings)
                long = functools.partial(advance, f"{subject.name}, long run")
                tables += _follow(course, tally, long)
            checks += tally.checks
            tables += [("largest distances", tuple(tally.rows()))]
            if tally.left_out:
                tables += [("left out", tuple(tally.left_out))]
            if tally.drift:
                tables += [("long run, by cycle", tuple(tally.drift))]
            facts[subject.name] = tally.facts | {"never published": tally.never_published()}
        advance("continuation", len(subjects) + 1, len(subjects) + 1)
        return Report(
            checks=tuple(checks),
            tables=(*_bounds(envelope), *_merged(tables)),
            facts={
                "continuation": {
                    "settings": settings.as_dict(),
                    "envelope": frozen,
                    "calibrated": "in this run, before the held-out prefixes"
                    if calibrated
                    else "before",
                    "provenance": dict(envelope.provenance),
                    "controls": {name: dict(seen) for name, seen in envelope.controls.items()},
                    "held-out prefixes": digest(texts),
                    "dtype": jnp.dtype(model.dtype).name,
                    "device": jax.devices()[0].device_kind,
                    "subjects": facts,
                }
            },
        )


@contextlib.contextmanager
def _compiling() -> Iterator[ThreadPoolExecutor]:
    """A thread in which one program compiles while others run; none is begun once that ended."""
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _follow(course: Course, tally: Tally, advance: Callable[[int, int], None]) -> list[Any]:
    """All that a subject goes through, each part whether or not another raised; tables of it."""
    settings, ends = course.settings, dict[str, End]()
    for name in settings.schedules:
        with tally.guarded({"schedule": name}):
            ends[name] = follow_schedule(course, name, tally)
    if settings.fresh_process and "resumed" in ends:
        with tally.guarded({"schedule": "fresh process"}):
            fresh.continue_elsewhere(course, ends["resumed"], tally)
    where = {"schedule": settings.schedules[-1]}
    last = [(where, course.expected, ends[name]) for name in where.values() if name in ends]
    if settings.long_tokens:
        where = {"schedule": LONG}
        with tally.guarded(where):
            last += [(where, *long_run.run(course.model, course.subject, settings, tally, advance))]
    rows: list[dict[str, Any]] = []
    for where, expected, end in last if settings.tightness else ():
        how = tally.bounds_at(where), end, ", long run" if where["schedule"] == LONG else ""
        rows += tightness.smallest_caught(course.model, course.subject, expected, *how)
    return [("smallest perturbation caught", tuple(rows))] if rows else []


def _check_subject(subject: Subject, settings: Settings) -> None:
    if subject.fault != Fault():
        raise ValueError(
            f"subject {subject.name!r} has a planted fault, expected none: the fault matrix "
            "(audit.detection) plants them"
        )
    refuse_lossy(subject.rule)
    warm = np.any(np.asarray(settings.sampling.temperature) > 0)
    if warm and not isinstance(subject.rule, Match):
        raise ValueError(
            f"rule {subject.rule.name!r} draws a stream of its own, expected 'match' when sampling "
            "(the sampler audit is for the others)"
        )


def refuse_lossy(rule: Rule) -> None:
    """Refuse, in one line, a rule whose stream is not plain's."""
    if not rule.lossless:
        raise ValueError(
            f"rule {rule.name!r} is lossy and its stream is not plain's, expected a lossless rule: "
            "leave the rule out"
        )


def _bounds(envelope: Envelope) -> list[tuple[str, tuple[Any, ...]]]:
    """The envelope as a table: what the controls did, and the bounds, beside LumoTree's; those of
    long runs as another, beside the others."""
    short, long = list[dict[str, Any]](), list[dict[str, Any]]()
    for bounds, rows in ((envelope.bounds, short), (envelope.long, long)):
        for surface, values in bounds.items():
            row: dict[str, Any] = {"surface": surface if rows is short else f"{surface}, long run"}
            for name, control in envelope.controls.items():
                if (name == LONG) == (rows is long):
                    row[f"control {name}"] = control.get(surface)
            row |= {"smallest bound": min(values, default=None)}
            row |= {"largest bound": max(values, default=None)}
            if rows is long:
                pairs = zip(values, envelope.bounds[surface], strict=True)
                row["of the short bound"] = max((a / b for a, b in pairs), default=None)
            if surface != "margin":
                row["LumoTree"] = LUMOTREE["nats" if surface == "divergence" else "relative"]
            rows.append(row)
    return [("envelope", tuple(short)), *([("envelope of long runs", tuple(long))] if long else [])]


def _merged(tables: Sequence[tuple[str, tuple[Any, ...]]]) -> list[tuple[str, tuple[Any, ...]]]:
    """Tables of one title as one."""
    titles = dict.fromkeys(title for title, _ in tables)
    return [(t, tuple(r for title, rows in tables if title == t for r in rows)) for t in titles]
