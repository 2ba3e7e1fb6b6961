"""The sampler audit: right rules are green, a user's wrong one is red, a lossy one never passes."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
import tiny

from treejax.audit import sampler
from treejax.audit.raised import RAISED
from treejax.audit.sampler.settings import name_of
from treejax.model import Model
from treejax.steps.rules import Match, Typical, WithoutReplacement

MODEL = Model(tiny.random_params(tiny.CONFIG), tiny.CONFIG)
SMALL = dataclasses.replace(sampler.Settings.quick(), walks=4000, seeds=2, trees=((3, 3),))


class Redrawn(Match):
    """A user's rule: ``match`` that takes the second best token where the best is not drafted."""

    name = "redrawn"

    def choose(self, tree, logits, sampling, key, position, history, q):
        choice = super().choose(tree, logits, sampling, key, position, history, q)
        other = (choice.pending + 1) % logits.shape[1]
        return choice.replace(pending=jnp.where(choice.length == 1, other, choice.pending))


def test_a_right_rule_is_green_by_all_three_proofs_and_the_report_is_json():
    seen = []
    report = sampler.run(None, [Match()], SMALL, lambda *args: seen.append(args))
    assert report.green, report.red
    names = {check.name for check in report.checks}
    assert names == {
        "total variation, enumerated",
        "streams that differ from plain",
        "conditional G-test",
        "joint G-test",
    }
    tests = [check for check in report.checks if "G-test" in check.name]
    assert {check.where["seed"] for check in tests} == {0, 1}
    assert all(check.bound == pytest.approx(1e-3 / len(tests)) for check in tests)
    assert json.loads(json.dumps(report.as_json()))["green"]
    assert seen[0][1] == 0 and seen[-1][1] == seen[-1][2]
    (row,) = report.tables[0][1]
    assert row["verdict"] == "green" and row["accepted a step"] > 0.5


class Unready(Match):
    """A user's rule that raises."""

    name = "unready"

    def choose(self, tree, logits, sampling, key, position, history, q):
        raise KeyError("no such row")


class Unasked(Unready):
    """A user's rule that cannot even say what it serves."""

    name = "unasked"

    def sharpest(self, proposals):
        raise RuntimeError("not yet\nready")


def test_a_users_wrong_rule_is_red_by_its_walks_and_one_that_raises_by_that():
    report = sampler.run(None, [Unasked(), Unready(), Redrawn()], SMALL)
    assert not report.green
    raised = [check for check in report.checks if check.name == RAISED]
    assert [(check.subject, check.where.get("while")) for check in raised] == [
        ("unasked", "asked what it serves"),
        ("unready/coupled", "walking"),
    ]
    assert not any(check.green for check in raised)
    assert "RuntimeError: not yet, raised at test_audit_sampler.py:" in raised[0].note
    assert "KeyError: 'no such row', raised at test_audit_sampler.py:" in raised[1].note
    rest = [check for check in report.checks if check not in raised]
    assert {check.name for check in rest if not check.green} >= {
        "conditional G-test",
        "joint G-test",
    }
    assert all(check.subject == "redrawn/coupled" for check in rest)
    (row,) = report.tables[0][1]
    assert row["verdict"] == "red" and row["total variation"] > 0.2


def test_a_lossy_rule_is_red_with_its_distance():
    report = sampler.run(None, [Typical()], SMALL)
    assert not report.green
    (lossy,) = [check for check in report.red if "lossy" in check.name]
    assert 0.3 < lossy.value < 1.0
    (row,) = report.tables[0][1]
    assert row["verdict"] == "lossy" and row["total variation"] > 0.3


class Broken(Typical):
    """A lossy rule that raises."""

    name = "broken"

    def choose(self, tree, logits, sampling, key, position, history, q):
        raise KeyError("no such row")


def test_a_lossy_rule_that_raises_is_red_with_what_was_measured():
    """Its distance is what was enumerated, and not the count of what it raised."""
    report = sampler.run(None, [Broken()], SMALL)
    checks = {check.name.partition(":")[0]: check for check in report.checks}
    assert checks[RAISED].value == 1 and not checks[RAISED].green
    lossy = checks["lossy by its own account"]
    assert lossy.value == checks["total variation, enumerated"].value < 1 and not lossy.green


def test_rules_that_serve_several_kinds_are_audited_for_each():
    full = sampler.Settings()
    names = [name_of(one) for one in sampler.samplers_of(WithoutReplacement(), full)]
    assert names == ["without_replacement/without_replacement", "without_replacement/iid"]
    assert len(sampler.samplers_of(Match(), full)) == 4
    assert len(sampler.samplers_of(Match(), SMALL)) == 1


def test_what_cannot_be_audited_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no rule was given"):
        sampler.run(None, [], SMALL)
    with pytest.raises(ValueError, match="worlds .* are unknown"):
        sampler.Settings(worlds=("elsewhere",))
    with pytest.raises(ValueError, match="walks is 0"):
        sampler.Settings(walks=0)
    with pytest.raises(ValueError, match="alpha 2"):
        sampler.Settings(alpha=2)
    with pytest.raises(ValueError, match="leave nothing to walk"):
        sampler.run(None, [Match()], dataclasses.replace(SMALL, worlds=()))
    params = {name: leaf for name, leaf in MODEL.params.items() if name != "mtp"}
    headless = dataclasses.replace(MODEL, params=params)
    with pytest.raises(ValueError, match="leave nothing to walk"):
        sampler.run(headless, [Match()], dataclasses.replace(SMALL, worlds=(), steps=2))
