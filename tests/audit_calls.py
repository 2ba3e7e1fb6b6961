"""Audits that answer from memory, for tests of the command and of the call around them."""

import functools

import audit_reports as made
import jax

from treejax.audit import work
from treejax.audit.base import Report

PARTS = {
    "component": "run",
    "continuation": "run",
    "sampler": "run",
    "detection": "run",
    "sampler_detection": "detect",
}


class Calls:
    """What the audits were given; what they answer with."""

    def __init__(self):
        self.given = {}
        self.answers = {}

    def answer(self, name, *arguments):
        self.given[name] = arguments
        next(a for a in arguments if callable(a))(name, 0, 2)  # progress
        audit = {"detection": "continuation", "sampler_detection": "sampler"}.get(name, name)
        checks = tuple(c for c in made.checks() if c.audit == audit)
        seen = arguments[1] if name == "continuation" else ()
        told = {name: {"subjects": {subject.name: {"never published": [2]} for subject in seen}}}
        answer = self.answers.get(name, Report(checks, facts=told))
        if isinstance(answer, BaseException):
            raise answer
        return answer


def answering(monkeypatch, tmp_path):
    """Every audit answers from memory; the command's cache is a temporary one."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen = Calls()
    for name, function in PARTS.items():
        answer = functools.partial(seen.answer, name)
        monkeypatch.setattr(getattr(work, name), function, answer)
    yield seen
    jax.config.update("jax_compilation_cache_dir", before)


def subjects(calls):
    return [subject.name for subject in calls.given["continuation"][1]]
