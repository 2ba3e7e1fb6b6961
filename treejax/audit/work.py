"""Audits that run part by part, so that a run that ends early keeps what it had."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treejax.audit import component, continuation, detection, sampler
from treejax.audit.asked import Asked
from treejax.audit.base import Check, Report
from treejax.audit.elsewhere import refuse_inside
from treejax.audit.envelope import Envelope
from treejax.audit.plan import Plan, make_plan
from treejax.audit.provenance import audited, made_with
from treejax.audit.raised import failed, said
from treejax.audit.sampler import detection as sampler_detection
from treejax.checkpoint import load_model
from treejax.model import Model
from treejax.progress import Advance

_SETTINGS: dict[str, Any] = {
    "component": component.Settings,
    "continuation": continuation.Settings,
    "sampler": sampler.Settings,
    "engine faults": detection.Settings,
    "sampler faults": sampler.Settings,
}
_FAULTS = {"continuation": "engine faults", "sampler": "sampler faults"}
_TOGETHER = 2  # parts of the quick profile: one compiles while another is traced
_SEEDS = {"sampler faults": "fault_seeds"}  # what "seeds" is called there


class OutOfTime(BaseException):
    """The time limit has passed. Like Ctrl-C it is nothing that an audited object has raised."""


@dataclasses.dataclass
class Work:
    """What is to be run, and what there is of it.

    Attributes:
      settings: of every part that is to run.
      envelope: that errors are held against; None until one is calibrated.
      done: reports by part, as far as it came.
      ended: why it ended early, if it did.
    """

    asked: Asked
    plan: Plan
    model: Model | None
    settings: dict[str, Any]
    envelope: Envelope | None = None
    done: dict[str, Report] = dataclasses.field(default_factory=dict)
    ended: str | None = None

    @classmethod
    def prepare(cls, asked: Asked) -> "Work":
        """Load what is needed and make sure that all of it can be served.

        Raises:
          ValueError: one line.
          RuntimeError: one line: this is the fresh process of an audit.
        """
        refuse_inside()
        settings = make_settings(asked)
        model: Model | None = None
        if isinstance(asked.model, Model):
            model = asked.model
        elif set(settings) != {"component"}:
            model = load_model(asked.model, asked.dtype or "float32")
        envelope = None
        if asked.envelope is not None and model is not None:
            envelope = Envelope.load(asked.envelope)
            envelope.check_use(model, settings["continuation"].long_tokens)
        return cls(asked, make_plan(asked, model), model, settings, envelope)

    def parts(self, advance: Advance, time_limit: float | None = None) -> Iterator[Report]:
        """The report of one part after the other; of the quick profile two run side by side.

        Ctrl-C, the end of the time limit (seconds) or a mistake of the user ends it early: the part
        that was running is lost, ``ended`` says why, and the report of the whole is red. A part
        that fails otherwise is a failed check, and the others run.

        Raises:
          ValueError, OSError: one line: what was asked for cannot be.
        """
        started, shares = time.monotonic(), dict.fromkeys(self.settings, 0.0)

        def tell(part: str, description: str, done: int, total: int) -> None:
            if self.ended is not None or (
                time_limit is not None and time.monotonic() - started >= time_limit
            ):
                raise OutOfTime
            shares[part] = done / max(total, 1)
            advance(f"{part}: {description}", round(100 * sum(shares.values())), 100 * len(shares))

        pool = ThreadPoolExecutor(_TOGETHER)
        jobs: dict[str, Callable[[], Report]] = {}
        for name in self.settings:
            job = functools.partial(self._run, name, functools.partial(tell, name))
            jobs[name] = pool.submit(job).result if self.asked.quick else job
        try:
            for name, job in jobs.items():
                self.done[name] = _sound(name, job)
                yield self.done[name]
        except OutOfTime:
            self.ended = f"out of time after {time_limit:g} s"
        except KeyboardInterrupt:
            self.ended = "interrupted"
        except Exception as error:  # the report says it, and it goes on upwards
            self.ended = f"failed: {error}"
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, name: str, advance: Advance) -> Report:
        advance("begins", 0, 1)
        plan, settings, model = self.plan, self.settings[name], self.model
        if name == "component":
            return component.run(plan.policies, settings, advance)
        assert model is not None
        if name == "continuation":
            if self.asked.calibrate is not None:
                advance("envelope", 0, 1)
                self.envelope = continuation.calibrate(model, settings)
                self.envelope.save(self.asked.calibrate)
            return continuation.run(model, plan.subjects, settings, self.envelope, advance)
        if name == "sampler":
            return sampler.run(model, plan.rules, settings, advance)
        if name == "engine faults":
            return detection.run(model, self._planted("continuation"), settings, advance)
        return sampler_detection.detect(self._planted("sampler"), settings, advance, model)

    def _planted(self, audit: str) -> tuple[str, ...] | None:
        """Faults that were named; None leaves it to the settings."""
        return self.asked.planted(audit) if self.asked.faults else None

    def _not_planted(self) -> Iterator[str]:
        """Faults that the settings leave out where none was named."""
        settings = self.settings.get(_FAULTS["continuation"])
        if settings is not None and settings.faults is not None and not self.asked.faults:
            left = [n for n in self.asked.planted("continuation") if n not in settings.faults]
            if left:
                yield f"faults {', '.join(left)}"

    def _never_published(self) -> Iterable[str]:
        """Lengths of path that no draft of the continuation audit came to."""
        report = self.done.get("continuation")
        if report is None or not report.facts:
            return
        for name, seen in report.facts["continuation"]["subjects"].items():
            if lengths := seen["never published"]:
                rows = ", ".join(map(str, lengths))
                yield f"paths of {rows} rows under {name}: none was accepted"

    def report(self) -> Report:
        """All that is there, with who was audited and what was not.

        A part that did not end, or that checked nothing, is a failed check.
        """
        left = [name for name in self.settings if name not in self.done]
        missing = [f"{name}: {self.ended}" for name in left]
        missing += [*self.plan.missing, *self._not_planted(), *self._never_published()]
        lost = [_at_least_one(name, "finished", str(self.ended)) for name in left]
        lost += [
            _at_least_one(name, "checks", "nothing was checked")
            for name, report in self.done.items()
            if not report.checks
        ]
        joined = Report.joined(self.done.values())
        facts = {
            "audited": audited(self.asked, self.plan, self.model),
            "not audited": missing,
            "made with": made_with(self.asked, self.model),
        }
        for name, report in self.done.items():
            (*_, told) = report.facts.values() if len(report.facts) == 1 else [report.facts]
            facts[name] = told
        return Report((*joined.checks, *lost), joined.tables, facts)


def _sound(name: str, job: Callable[[], Report]) -> Report:
    """The report of a part; that of its failure, unless what failed is a mistake in what was asked
    for: an error of one line, by the project's rule."""
    try:
        return job()
    except Exception as error:  # whatever a part fails of, the others still tell their findings
        if isinstance(error, ValueError | OSError) and "\n" not in str(error):
            raise
        return Report((failed(name, "all of it", {}, said(error)),))


def _at_least_one(part: str, what: str, note: str) -> Check:
    """The failed check of a part of which there is nothing."""
    return Check(part, "all of it", what, {}, 0.0, 1.0, at_least=True, note=note)


def make_settings(asked: Asked) -> dict[str, Any]:
    """Settings of every part that is to run, in order.

    Raises:
      ValueError: seed or seeds would not act in any of them.
    """
    names = list(asked.chosen)
    names += [part for audit, part in _FAULTS.items() if asked.planted(audit)]
    made = {name: _SETTINGS[name].quick() if asked.quick else _SETTINGS[name]() for name in names}
    for option in ("seed", "seeds"):
        value = getattr(asked, option)
        if value is None:
            continue
        fields = {name: _SEEDS.get(name, option) if option == "seeds" else option for name in names}
        takers = {name: field for name, field in fields.items() if hasattr(made[name], field)}
        if not takers:
            raise ValueError(f"{option} cannot act in {' and '.join(names)}: leave it out")
        for name, field in takers.items():
            made[name] = dataclasses.replace(made[name], **{field: value})
    return made
