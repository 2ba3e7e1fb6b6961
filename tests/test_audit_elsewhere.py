"""A user's objects in fresh processes: what travels, and one clear line for what does not."""

import dataclasses
import importlib
import os
import sys
import types
from typing import Any, ClassVar

import audited_policies as audited
import pytest

import treejax.audit
from treejax.audit import component, continuation
from treejax.audit.component.operands import Shape
from treejax.audit.component.process import Job, fresh_processes
from treejax.audit.elsewhere import Unmade, ended, environment, make_again, why_it_stays
from treejax.policies import WY

TINY = Shape(1, 1, key_heads=1, value_heads=1, key_dim=8, value_dim=8)
CLASS = """
import sys
from treejax.policies import WY

class Mine(WY):
    name = "mine"

print("a module that prints, as scripts do")
if "pytest" not in sys.modules:  # the fresh process
    {}
"""
TOP_LEVEL = {
    "only_prints": "pass",
    "reads_a_file": "open('/no/such/file')",
    "reads_arguments": "import argparse; "
    "parser = argparse.ArgumentParser(); parser.add_argument('x'); parser.parse_args([])",
    "starts_an_audit": "import treejax.audit; treejax.audit.run(policy=Mine(), quick=True)",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules of a user, each imported here without harm; and one that nobody else finds."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []
    for name, code in TOP_LEVEL.items():
        (tmp_path / f"{name}.py").write_text(CLASS.format(code))
        made.append(importlib.import_module(name))
    lost = types.ModuleType("made_by_hand")
    exec(CLASS.format("pass"), vars(lost))
    monkeypatch.setitem(sys.modules, lost.__name__, lost)
    yield [*made, lost]
    for name in TOP_LEVEL:
        del sys.modules[name]


def test_code_at_a_modules_top_level_costs_one_policy_one_clear_line(modules):
    policies: Any = (*(module.Mine() for module in modules), audited.RaisesElsewhere())
    assert [why_it_stays(policy) for policy in policies] == [None] * len(policies)
    job = Job(policies, TINY, ((0, 0, 0),), 1)
    with fresh_processes(job, 1) as (process,):
        prints, *reasons, raised = process.result()
    assert len(prints) == 1 and len(prints[0]) == 64  # what it printed did no harm
    assert raised.startswith("RuntimeError, raised at audited_policies.py:")
    guard = 'put what it runs below `if __name__ == "__main__":`'
    definitions = f"; expected a module that only defines things when it is imported: {guard}"
    for reason, what, advice in zip(
        reasons,
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file', raised at "
            "reads_a_file.py:10 in <module>",
            "SystemExit: 2, raised at reads_arguments.py:10 in <module>",
            "RuntimeError: an audit was started where an audit's fresh process imports a module",
            "ModuleNotFoundError: No module named 'made_by_hand'",
        ),
        (*[definitions] * 3, "install it, or put its folder on PYTHONPATH"),
        strict=True,
    ):
        assert reason.startswith(f"a fresh process could not import what defines it: {what}")
        assert reason.endswith(advice) and "\n" not in reason


def test_a_process_that_ends_without_an_answer_is_one_clear_line():
    assert "(status 3, last words: b); expected a module that only" in ended(3, "a\nb\n")
    assert "(status 0, last words: nothing)" in ended(0, "")
    assert ended(-9, "").endswith("see that memory suffices for two processes")


@dataclasses.dataclass(frozen=True)
class Held(WY):
    """A policy that holds something."""

    name: ClassVar[str] = "held"
    what: Any = None


class Changes(Held):
    """Is another after pickling."""

    def __reduce__(self):
        return Held, ()


def of_a_notebook():
    pass


def test_what_no_other_process_can_make_stays(monkeypatch):
    assert why_it_stays(audited.Own()) is None  # without equality of its own, its bytes are equal
    assert why_it_stays(Held(what=of_a_notebook)) is None
    monkeypatch.setattr(of_a_notebook, "__module__", "__main__")
    said = "of_a_notebook is defined in __main__, which a fresh process cannot import"
    assert why_it_stays(Held(what=of_a_notebook)) == said
    unpicklable = why_it_stays(Held(what=lambda: None))
    assert unpicklable is not None and unpicklable.startswith("it cannot be pickled (")
    assert "\n" not in unpicklable
    assert "differs" in str(why_it_stays(Changes()))
    with pytest.raises(Unmade, match="could not import what defines it: "):
        make_again(b"no pickle")


def test_no_audit_starts_in_the_fresh_process_of_another(monkeypatch):
    """Or a module that audits itself when it is imported would start processes without end."""
    for name, value in environment().items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    match = "an audit was started where an audit's fresh process imports a module, expected"
    with pytest.raises(RuntimeError, match=match):
        treejax.audit.run(policy="wy", quick=True)
    with pytest.raises(RuntimeError, match=match):
        component.run([WY()])
    with pytest.raises(RuntimeError, match=match):
        continuation.run(None, [])
