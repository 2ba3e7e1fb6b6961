"""The fault matrix in its quick profile: every fault is caught, and an engine without one is not.

One run serves all tests: its programs hold every fault at once.
"""

import functools
import json

import numpy as np
import pytest
from audit_cases import bench_of, places

from treejax.audit import detection
from treejax.audit.detection import matrix
from treejax.audit.detection.run import Caught, Judge
from treejax.audit.faults import REGISTRY
from treejax.audit.raised import RAISED
from treejax.audit.step import never
from treejax.audit.surfaces import Measured
from treejax.model import prefill
from treejax.policies import make_policy
from treejax.state import init_state

QUICK = detection.Settings.quick()


@functools.cache
def report():
    return detection.run(None, None, QUICK)


def line(name, table="Planted faults of the engine"):
    (row,) = [row for row in dict(report().tables)[table] if row["fault"] == name]
    return row


@pytest.mark.parametrize("name", QUICK.faults)
def test_a_fault_is_caught_wherever_it_strikes(name):
    row = line(name)
    assert row["seeds"] == QUICK.seeds
    assert row["caught"] == row["seeds"], row


@pytest.mark.parametrize(
    ("name", "surface"),
    [
        ("packed parent", "row logits"),
        ("rows mixed up", "row logits"),
        ("conv gather skipped", "C"),
        ("sibling published", "R"),
        ("rounded state", "R"),
        ("KV remap", "new K"),
        ("KV written early", "old rows"),
        ("rotary by row", "new K"),
        ("bonus lost", "length"),
    ],
)
def test_a_fault_is_seen_in_the_surface_that_it_strikes(name, surface):
    assert f"{surface} {QUICK.seeds}" in line(name)["seen in"]


def test_fc07_a_gate_that_is_rounded_in_the_commit_alone_is_caught():
    """FC-07: decay and write strength take a round trip through bfloat16 on one path."""
    row = line("rounded gate")
    assert row["caught"] == QUICK.seeds
    assert row["seen in"] == f"R {QUICK.seeds}"


def test_an_engine_without_a_fault_raises_no_alarm():
    row = line("none", "Runs without a fault")
    assert row["seeds"] == QUICK.batch > QUICK.seeds
    assert row["caught"] == 0


def test_the_report_is_green_json_and_says_what_every_check_is_about():
    made = report()
    assert made.green
    assert len(made.checks) == len(QUICK.faults) + 1
    power = [check for check in made.checks if check.name == "detection power"]
    assert all(check.at_least and check.bound == 0.99 and check.note for check in power)
    assert json.loads(json.dumps(made.as_json()))["green"] is True


def test_what_raises_under_a_fault_is_red_and_the_matrix_is_filled(monkeypatch):
    """One fault of two; neither the other nor the engine without one is lost."""
    batch = QUICK.batch
    found = Caught(
        *(np.ones(batch, bool), np.zeros(batch, int), (frozenset({"R"}),) * batch, np.ones(batch))
    )

    def draw(fault, *_):
        if fault.name == "stale root":
            raise KeyError("no such step")
        return never(batch)

    judge = Judge({})
    for name, answer in (
        ("prepare", lambda *_: None),  # nothing runs: the bench is not looked at
        ("judge_of", lambda *_: judge),
        ("draw_strikes", draw),
        ("run_bench", lambda *_: found),
        ("had_effect", lambda *_: np.ones(batch, bool)),
    ):
        monkeypatch.setattr(matrix, name, answer)
    monkeypatch.setattr(Judge, "decided", lambda *_: np.ones(batch, bool))
    made = detection.run(None, ("stale root", "commit skipped"), QUICK)
    (raised,) = [check for check in made.checks if check.name == RAISED]
    assert raised.subject.endswith("/scripted with stale root") and not raised.green
    assert "KeyError: 'no such step', raised at test_audit_detection.py:" in raised.note
    power = [check for check in made.checks if check.name == "detection power"]
    assert power and all(check.green and "commit skipped" in check.subject for check in power)
    assert sum(check.name == "false alarms" for check in made.checks) == len(power)


def test_bounds_come_without_any_fault():
    bounds = report().facts["detection"]["bounds"]
    assert {"R", "C", "new K", "old K", "divergence", "drafter", "row logits"} <= set(bounds)
    for name in ("R", "C", "new K", "old K", "row logits"):  # rounding of float32, nothing wider
        assert all(2**-18 <= bound < 1e-4 for bound in bounds[name]), name


def test_a_number_that_is_not_finite_or_a_count_is_a_finding_whatever_the_bound():
    judge = Judge({"R": (1.0, 100.0), "row logits": (1.0,)})
    distances = {"R": np.array([[[0.5], [50.0]], [[2.0], [50.0]], [[0.0], [np.nan]]])}
    distances["row logits"] = np.array([[0.1, 0.2], [0.3, 3.0], [0.0, np.inf]])
    found = judge.findings(Measured(np.zeros(3), distances, {"length": np.array([0, 0, 1])}))
    assert found["R"].tolist() == [0.5, 2.0, np.inf]
    assert found["row logits"].tolist() == [0.2, 3.0, np.inf]
    assert found["length"].tolist() == [0.0, 0.0, np.inf]


def test_no_seed_struck_is_no_detection():
    row = {"fault": "stale root", "policy": "wy", "drafter": "x", "seeds": 0, "caught": 0}
    assert not matrix._power(row).green


def test_logits_of_rows_are_those_of_a_prompt_that_ends_there():
    """Every row of a step's trees against the chunked rule over prompt, text and the row's path."""
    bench = bench_of("scripted")
    t, trees = 2, bench.course
    width = 12 + bench.offsets.max() + 4
    for row in (0, 1, 5, 9):
        tokens, lengths, paths = np.zeros((bench.batch, width), np.int32), [], []
        for b in range(bench.batch):
            path, node = [], row
            while node >= 0:
                path.insert(0, int(trees.tokens[t, b, node]))
                node = int(trees.parents[t, b, node])
            prompt = _prompts()[b]
            text = [*prompt, *bench.plain.tokens[b, : bench.offsets[t, b]], *path]
            tokens[b, : len(text)] = text
            paths.append(tuple(path))
            lengths.append(len(text))
        state = init_state(bench.model.config, bench.batch, width, policy="replay")
        out, _ = prefill(bench.model, state, tokens, lengths)
        here = np.flatnonzero(trees.sizes[t] > row)
        assert len(here)
        for b in here:
            place = b, bench.offsets[t, b], paths[b]
            np.testing.assert_allclose(bench.expected[place], out.logits[b], rtol=1e-3, atol=2e-3)


def _prompts():
    from audit_cases import SEQUENCES

    from treejax.audit.prefixes import prefixes

    return prefixes(bench_of("scripted").model, "held-out", SEQUENCES, 12, 0)


def test_the_trees_to_come_are_scattered_and_cut_as_the_schedule_says():
    bench = bench_of("scripted")
    assert bench.course.lengths.T.tolist() == [[4, 2, 3, 1, 2, 3]] * bench.batch
    assert bench.course.scattered.any(axis=(1, 2)).any()
    assert (bench.course.sizes[1] < bench.course.sizes[0]).all()


def test_places_of_strikes_are_spread_over_steps():
    bench = bench_of("scripted")
    cycles = {
        int(c)
        for fault in REGISTRY.values()
        for c in np.asarray(places(fault, make_policy("ring", "xla"), bench).cycle)
    }
    assert cycles >= {0, 1, 2, 4, 5}
