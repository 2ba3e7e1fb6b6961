"""The benchmark of the kernels: gate, floors, errors of one line, and what it writes."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from random_trees import HYDRA27

from pallas_kernels.bench import gate, kernels, programs, run, state_error
from pallas_kernels.bench.__main__ import main
from pallas_kernels.bench.cases import base_count, conv_rows, make_case
from pallas_kernels.bench.gate import Error, Meter, Verdict
from pallas_kernels.bench.guard import MISTAKE, RED, run_command
from pallas_kernels.bench.report import Report, Row
from pallas_kernels.bench.settings import OPERATIONS, parse
from pallas_kernels.bench.timing import Summary
from pallas_kernels.bench.trees import NAMES, make_tree
from pallas_kernels.bench.truth import committed, recurrence

TINY = (
    "--batch 1 --layers 2 --value-heads 2 --key-heads 1 --key-dim 16 --value-dim 16 "
    "--implementation xla --peers none --repeats 2"
).split()


def tiny(*more):
    return parse([*TINY, *more])


# The command, end to end.


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "run.json"
    command = [sys.executable, "-m", "pallas_kernels.bench", *TINY, "--errors", "none"]
    command[command.index("xla")] = "auto"
    command[command.index("none")] = "auto"
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
    return done, json.loads(file.read_text())


def test_every_operation_is_checked_and_timed(whole_run):
    done, document = whole_run
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in document["rows"]}
    assert tuple(rows) == OPERATIONS
    for name, row in rows.items():
        assert row["gate"] == "green" and row["problems"] == []
        assert row["errors"] and all(0 <= e["rms"] < 1e-2 for e in row["errors"].values())
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["rounds"] == 2 and row["layers_run"] == 2
        assert 0 < row["host_ms"] and 0 < row["unqueued_ms"]
        assert row["bandwidth_share"] == pytest.approx(row["floor_ms"] / row["median_ms"])
        assert name in done.stdout
    assert set(rows["path_scan+replay"]["errors"]) == {"outputs", "states"}
    assert set(rows["tree_conv"]["errors"]) == {"q", "k", "v", "g", "alpha", "beta"}
    assert rows["replay"]["bitwise"] is not None and rows["wy_solve"]["bitwise"] is None


def test_the_document_says_how_it_was_made(whole_run):
    _, document = whole_run
    environment, settings = document["environment"], document["settings"]
    assert environment["platform"] == "cpu" and environment["jax"] and environment["jaxlib"]
    assert {"driver", "commit", "dirty", "date", "xla_flags"} <= set(environment)
    assert settings["layers"] == 2 and settings["seed"] == 0 and settings["tree"] == "hydra27"
    assert "block_until_ready" in document["clock"] and document["complete"]
    assert document["copy_bytes_per_s"]["1"] > 0


def test_stderr_holds_lines_of_the_project_only(whole_run):
    done, _ = whole_run
    assert done.stderr.count("running the XLA reference") == 1
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    for line in done.stderr.splitlines():
        assert line.startswith(("pallas_kernels", " "))


# Gate before speed.


def test_a_wrong_state_is_red_and_gets_no_rate(monkeypatch, tmp_path, capsys):
    honest = programs.replay
    monkeypatch.setattr(programs, "replay", lambda *a, **k: 1.00001 * honest(*a, **k))
    file = tmp_path / "run.json"
    chosen = ["--operations", "path_scan,replay", "--errors", "none", "--json", str(file)]
    assert run_command(main, [*TINY, *chosen]) == RED
    shown = capsys.readouterr()
    assert "replay RED" in shown.out and "states: relative RMS 1.0e-05" in shown.err
    wrong = {row["name"]: row for row in json.loads(file.read_text())["rows"]}["replay"]
    assert wrong["gate"] == "red" and wrong["median_ms"] is None and wrong["rounds"] == 0
    assert wrong["errors"]["states"]["rms"] > 1e-6


def test_an_operation_that_raises_costs_its_own_row_only(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no layout\nlong tail")

    monkeypatch.setattr(programs, "path_scan", broken)
    chosen = ["--operations", "path_scan,replay", "--errors", "none"]
    assert run_command(main, [*TINY, *chosen]) == RED
    shown = capsys.readouterr()
    assert "RuntimeError: no layout" in shown.err and "long tail" not in shown.err
    assert "path_scan RED" in shown.out and "replay RED" not in shown.out


@pytest.fixture(scope="module")
def case():
    return make_case(tiny("--dtype", "float32"), 2, make_tree("hydra27"), 3, "realistic")


def test_other_bits_than_decoding_are_noticed(case, monkeypatch):
    assert gate.replay_is_decode(case)
    honest = programs.replay

    def rounded_at_the_end(R, *operands, **settings):
        R = honest(R, *operands, **settings)
        return jnp.nextafter(R, jnp.inf) if operands[4].shape[1] > 1 else R

    monkeypatch.setattr(programs, "replay", rounded_at_the_end)
    assert not gate.replay_is_decode(case)
    green = Verdict({"states": Error(1e-8, 1e-7)}, ())
    assert gate.with_bits(green, False, promised=False).green
    assert not gate.with_bits(green, False, promised=True).green


def test_the_gate_sees_what_is_wrong_with_outputs(case):
    truth = run.Truth(case)
    program = programs.make_program("path_scan", case, 10**9)
    outputs, pool = program.step(case.pool, program.operands)
    assert gate.check(program, outputs, pool, truth).green

    inactive = tuple(out.at[:, -1].set(1.0) for out in outputs)
    assert "inactive" in gate.check(program, inactive, None, truth).problems[0]
    missing = (*outputs[:2], outputs[2].at[1, 5].set(jnp.nan))
    assert not gate.check(program, missing, None, truth).green
    swapped = (outputs[0], outputs[2], outputs[1])
    assert not gate.check(program, swapped, None, truth).green


def test_float64_recurrence_agrees_with_the_oracle():
    rng, tree = np.random.default_rng(3), make_tree("random64")
    rows = [rng.standard_normal((64, heads, 8)) / 3 for heads in (1, 1, 2)]
    rows += [-rng.random((64, 2)), rng.random((64, 2))]
    R0 = rng.standard_normal((2, 8, 8))
    outputs, states = recurrence(R0, tree.parents, tuple(rows), {0, 40, 63})
    expected = oracle.delta_rule_tree(R0, tree.parents, *rows)
    np.testing.assert_allclose(outputs, expected[0], rtol=1e-12, atol=1e-13)
    for node in (0, 40, 63):
        np.testing.assert_allclose(states[node], expected[1][node], rtol=1e-12, atol=1e-13)
    k, u, g = rows[1][:2], rows[2][:2], rows[3][:2]
    by_hand = np.exp(g[0] + g[1])[:, None, None] * R0
    by_hand = by_hand + np.exp(g[1])[:, None, None] * u[0][:, :, None] * k[0][:, None, :]
    by_hand = by_hand + u[1][:, :, None] * k[1][:, None, :]
    np.testing.assert_allclose(committed(R0, k, u, g), by_hand)


def test_errors_are_relative_to_the_reference():
    meter = Meter()
    meter.add("x", np.array([1.0, 3.0]), np.array([1.0, 1.0]))
    meter.add("x", np.array([1.0, 1.0]), np.array([1.0, 1.0]))
    assert meter.errors()["x"] == (1.0, 2.0)


# Operands and trees.


def test_layers_are_distinct_and_fill_the_pool(case):
    for field in (case.pool, case.stacked.k, case.stacked.v, case.stacked.g):
        flat = np.asarray(field).reshape(3, -1)
        assert not any((flat[i] == flat[j]).all() for i in range(3) for j in range(i))
    assert base_count(heads=16, layers=48) == 4  # 4 layers in 16 rotations
    assert base_count(heads=1, layers=48) == 48 and base_count(heads=8, layers=48) == 6


def test_rotated_layers_keep_value_heads_with_their_key_head():
    settings = dataclasses.replace(tiny(), key_heads=2, value_heads=6)
    case = make_case(settings, 1, make_tree("hydra27"), 8, "realistic")
    np.testing.assert_array_equal(case.stacked.k[4], jnp.roll(case.stacked.k[0], 1, 2))
    np.testing.assert_array_equal(case.stacked.v[4], jnp.roll(case.stacked.v[0], 3, 2))
    np.testing.assert_array_equal(case.pool[4], jnp.roll(case.pool[0], 3, 1))


def test_trees_are_packed_parents_first():
    assert list(make_tree("hydra27").parents) == HYDRA27
    for name, capacity in zip(NAMES, (32, 32, 64, 128), strict=True):
        tree = make_tree(name)
        assert tree.capacity == capacity and tree.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
        assert len(tree.published) == 6 and tree.published[0] == 0
    with pytest.raises(ValueError, match="oak"):
        make_tree("oak")


def test_convolution_rows_reach_into_the_history():
    rows = conv_rows(make_tree("hydra27"))
    assert rows[0].tolist() == [0, 1, 2, 3]
    assert rows[4].tolist() == [2, 3, 4, 7]  # its path is 0, 1, 4
    assert rows[11].tolist() == [3, 4, 7, 14]  # 0, 1, 4, 11: as long as the window


# Reporting.


def test_a_time_limit_keeps_what_there_is(tmp_path):
    file = tmp_path / "run.json"
    arguments = [*TINY, "--operations", "replay", "--time-limit", "0.001", "--json", str(file)]
    assert run_command(main, arguments) == 0
    document = json.loads(file.read_text())
    assert not document["complete"] and document["rows"] == []


def test_ratios_compare_the_same_work():
    report = Report(tiny())
    for batch, name, ms in ((1, "wy_solve+replay", 0.5), (1, "fla per path + replay", 3.0),
                            (8, "fla per path + replay", 9.0), (1, "fla replay", 1.0)):  # fmt: skip
        verdict = Verdict({}, ())
        time = Summary(ms, ms, ms, 1, 1, 0.1, ms)
        report.rows.append(Row(batch, name, "x", 2, 1000, verdict, time=time))
    assert report.ratio(report.rows[0]) == 6.0
    assert report.ratio(report.rows[1]) is None


def test_state_errors_of_every_method(monkeypatch):
    monkeypatch.setattr(state_error, "NAMES", ("chain28",))
    errors = list(state_error.measure_errors(tiny()))
    assert [e.method for e in errors[:2]] == ["sequential", "wy ieee"]
    assert {e.kind for e in errors} == {"realistic", "correlated"} and len(errors) == 4
    for e in errors:
        assert e.ok and 0 < e.states < 1e-2 and (e.bound is None) == (e.method != "wy ieee")

    def broken(*_, **__):
        raise RuntimeError("no registers")

    monkeypatch.setattr(programs, "wy_solve", broken)
    sequential, solve = list(state_error.measure_errors(tiny()))[:2]
    assert sequential.ok and not solve.ok and solve.problem == "RuntimeError: no registers"
    hydra, deep = make_tree("hydra27"), make_tree("random128")
    assert state_error.state_bound("wy ieee", hydra, 1e-7) == 3e-7
    assert state_error.state_bound("wy ieee", deep, 1e-7) == 4e-7
    assert state_error.state_bound("wy ieee", deep, 1e-6) == 1e-6


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--value-heads", "5", "--key-heads", "2"], "no multiple"),
        (["--implementation", "mosaic_gpu"], "need a Hopper GPU"),
        (["--json", "/no/such/folder/x.json"], "no such folder"),
        (["--seed", "-1"], "expected at least 0"),
        (["--batch", "1,x"], "'x' is no number"),
        (["--operations", "path_scan,walk"], "'walk' is unknown"),
        (["--time-limit", "nan"], "no positive number"),
        (["--tree", "oak"], "invalid choice"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    try:
        status = run_command(main, arguments)
    except SystemExit as stop:  # argparse
        status = stop.code
    shown = capsys.readouterr()
    assert status == MISTAKE and shown.out == ""
    assert message in shown.err and shown.err.count("\n") == 1


# Peers. Their kernels need a GPU; what they are given, and how they are checked, does not.


# What a device adds.


def test_kernels_are_grouped_by_name(monkeypatch):
    launches = [("solve", 0.25), ("small", 0.125), ("solve", 0.5)]
    monkeypatch.setattr(
        kernels.profiler, "measure", lambda step, aggregate: lambda *operands: (None, launches)
    )
    assert kernels.list_kernels(lambda pool, operands: pool, jnp.zeros(1), ()) == [
        ("solve", 2, 0.75), ("small", 1, 0.125),
    ]  # fmt: skip


def test_batch_sizes_share_a_time_limit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    clock = run.Clock(90.0)
    first = clock.part(3)
    now[0] = 29.0
    assert not first()
    now[0] = 30.0
    assert first() and not clock.over
    second = clock.part(2)  # half of the 60 seconds that are left
    now[0] = 59.0
    assert not second()
    now[0] = 60.0
    assert second()
    assert not run.Clock(None).part(3)()
