"""``python -m treejax.ablate`` around an experiment that counts: resuming, stopping, mistakes.

The experiment lives in ``counting.py`` and measures nothing, so that killing a run costs no time.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import counting
import jax
import pytest

from treejax import ablate
from treejax.ablation import EXPERIMENTS, Cell
from treejax.ablation.figures import HINT
from treejax.cli.guard import run_command
from treejax.cli.progress import progress

CONFIGS = Path(__file__).parent.parent / "configs" / "ablations"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """The command sets JAX's cache folder: a temporary one, and as it was afterwards."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(EXPERIMENTS, "counting", counting.Counting)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "count.toml"
    path.write_text(counting.TOML)
    return path


@pytest.fixture
def command(capsys):
    """Run the command in this process: (exit status, stdout, stderr)."""

    def run(*arguments):
        try:
            status = run_command(ablate.NAME, ablate.main, [str(each) for each in arguments])
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return run


def rows_in(out):
    lines = (out / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def places(out):
    return [(row["arm"], row["n"], row["repeat"]) for row in rows_in(out)]


def start(config, out, *arguments):
    """The command as a process of its own, slow enough to be killed."""
    here = Path(counting.__file__)
    command = [sys.executable, here, config, "--out", out, *arguments]
    return subprocess.Popen(
        [str(each) for each in command],
        env=os.environ | {"COUNTING_PAUSE_S": "0.2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(out, count):
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if (out / "rows.jsonl").exists() and len(rows_in(out)) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} rows after a minute")


def test_a_killed_run_resumes_without_repeating_rows(command, config, tmp_path):
    out = tmp_path / "out"
    process = start(config, out)
    wait_for_rows(out, 3)
    process.kill()
    process.communicate()
    with (out / "rows.jsonl").open("a") as file:
        file.write('{"arm": "half')  # what a kill in the middle of a write leaves
    kept = rows_in_whole(out)
    assert 3 <= len(kept) < 12
    status, shown, _ = command(config, "--out", out, "--resume")
    assert status == 0 and "12 rows" in shown
    assert rows_in(out)[: len(kept)] == kept  # not measured again
    assert len(places(out)) == len(set(places(out))) == 12
    status, _, _ = command(config, "--out", out, "--resume")
    assert status == 0 and len(places(out)) == 12


def rows_in_whole(out):
    lines = (out / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:-1]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_leave_a_folder_that_can_be_used(command, config, tmp_path, number):
    out = tmp_path / "out"
    process = start(config, out)
    wait_for_rows(out, 2)
    process.send_signal(number)
    shown, err = process.communicate(timeout=60)
    assert process.returncode == 130
    count = len(rows_in(out))
    assert f"interrupted with {12 - count} of 12 rows missing (" in err
    assert "): --resume goes on from here" in err
    assert "Traceback" not in err and f"{count} rows" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert sum(row["count"] for row in summary["rows"]) == count
    status, _, _ = command(config, "--out", out, "--resume")
    assert status == 0 and len(set(places(out))) == 12


def test_a_time_limit_ends_a_run_between_rows(command, config, tmp_path):
    out = tmp_path / "out"
    status, _, err = command(config, "--out", out, "--time-limit", "0")
    assert status == 1 and len(rows_in(out)) == 1  # as of an audit that did not end
    missing = "11 of 12 rows missing (4 of a, 4 of b, 3 of always)"
    assert f"out of time with {missing}: --resume goes on from here" in err
    assert command(config, "--out", out, "--resume")[0] == 0 and len(rows_in(out)) == 12


def test_many_arms_with_missing_rows_are_counted():
    left = [Cell(f"arm{i}", {}, repeat) for i in range(8) for repeat in range(2)]
    assert ablate._by_arm(left[:12]).endswith("2 of arm4, 2 of arm5")
    assert ablate._by_arm(left[:14]).endswith("2 of arm5, and 2 of 1 other arm")
    assert ablate._by_arm(left).endswith("2 of arm5, and 4 of 2 other arms")


def test_a_changed_toml_or_option_is_refused(command, config, tmp_path):
    out = tmp_path / "out"
    assert command(config, "--out", out)[0] == 0
    before = (out / "rows.jsonl").read_bytes()
    status, _, err = command(config, "--out", out)
    assert status == 2 and "holds a run already" in err and err.count("\n") == 1
    status, _, err = command(config, "--out", out, "--resume", "--dtype", "bfloat16")
    assert status == 2 and "made with dtype None, not 'bfloat16'" in err
    config.write_text(counting.TOML.replace("seed = 3", "seed = 4"))
    status, _, err = command(config, "--out", out, "--resume")
    assert status == 2 and "made with another configuration" in err and err.count("\n") == 1
    assert (out / "rows.jsonl").read_bytes() == before


def test_summaries_hold_the_environment_and_the_same_numbers(command, config, tmp_path):
    out = tmp_path / "out"
    status, shown, err = command(config, "--out", out, "--repeats", "1", "--arms", "b")
    assert (status, err) == (0, "") and "4 rows" in shown
    assert places(out) == [("always", 1, 0), ("b", 1, 0), ("always", 2, 0), ("b", 2, 0)]
    summary = json.loads((out / "summary.json").read_text())
    seen = summary["environment"]
    assert seen["config"] == counting.TOML and seen["seed"] == 3
    assert seen["arguments"][0] == str(config) and "--repeats" in seen["arguments"]
    assert {"commit", "dirty", "device", "jax", "jaxlib", "python", "date"} <= set(seen)
    with (out / "summary.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(line["arm"], int(line["count"])) for line in table] == [
        (row["arm"], row["count"]) for row in summary["rows"]
    ]
    assert (out / "drawn").exists()


def test_a_red_row_is_said_and_gives_exit_status_1(command, config, tmp_path):
    config.write_text(counting.TOML + 'red = "a"\n')
    out = tmp_path / "out"
    status, _, err = command(config, "--out", out)
    assert status == 1 and "a, 1, repeat 0: planted" in err
    status, _, _ = command(config, "--out", out, "--resume")
    assert status == 1 and len(rows_in(out)) == 12  # red rows are not repeated either


def test_a_dry_run_prints_the_plan_and_writes_nothing(command, config, tmp_path):
    out = tmp_path / "out"
    status, shown, err = command(config, "--out", out, "--dry-run")
    assert (status, err) == (0, "") and not out.exists()
    assert "12 cells, 12 to run" in shown
    lines = {line.split()[1]: line.split() for line in shown.splitlines() if "│" in line}
    assert lines["a"][1:8:2] == ["a", "4", "4", "1.5"]  # cells, cells to run, MiB
    command(config, "--out", out, "--time-limit", "0")
    assert "12 cells, 11 to run" in command(config, "--out", out, "--dry-run", "--resume")[1]


def test_without_matplotlib_there_is_one_line_and_no_figure(command, config, tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "can_draw", lambda: False)
    status, _, err = command(config, "--out", tmp_path / "out")
    assert status == 0 and err == f"{ablate.NAME}: {HINT}\n"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, ["--out", "x"], "no such configuration file"),
        ("experiment =", ["--out", "x"], "is not valid TOML"),
        ("", ["--out", "x"], "missing key 'experiment', expected one of: requests"),
        ('experimint = "x"', ["--out", "x"], "step_cost, counting; it has experimint"),
        ('experiment = "x"', ["--out", "x"], "experiment is 'x', expected one of"),
        (counting.TOML, [], "--out DIR is missing"),
        (counting.TOML, ["--out", "x", "--arms", "c"], "--arms c: no such arm"),
        (counting.TOML, ["--out", "x", "--repeats", "0"], "repeats is 0, expected an integer"),
        (counting.TOML, ["--out", "x", "--wheel", "w"], "--wheel: the experiment 'counting'"),
        (counting.TOML, ["--out", "x", "--requests", "w"], "cannot use it, leave it out"),
        (counting.TOML, ["--out", "x", "--implementation", "cuda"], "invalid choice: 'cuda'"),
        (counting.TOML, ["--out", "x", "--time-limit", "soon"], "invalid float value: 'soon'"),
        (counting.TOML + "extra = 1", ["--out", "x"], "count.toml: unknown key 'extra'"),
        (counting.TOML, ["--out", "x", "--time-limit", "nan"], "--time-limit is nan, expected sec"),
        (counting.TOML.replace("seed = 3", ""), ["--out", "x"], "count.toml: missing key 'seed'"),
        (
            counting.TOML.replace("seed = 3", "sed = 3").replace("repeats", "repeat"),
            ["--out", "x"],
            "unknown key 'repeat', expected one of: red, repeats, seed; missing keys 'seed'",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command, config, text, arguments, message):
    if text is None:
        config.unlink()
    else:
        config.write_text(text)
    status, shown, err = command(config, *arguments)
    assert (status, shown) == (2, "") and message in err and err.count("\n") == 1


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys, monkeypatch):
    """Nothing for short runs; then what is done, of how much, and the time left."""
    now = [0.0]
    monkeypatch.setattr(ablate.time, "monotonic", lambda: now[0])
    with progress(ablate.NAME, terminal=False) as advance:
        advance("wy", 0, 100)
        now[0] = 29.0
        advance("wy", 10, 100)
        assert capsys.readouterr().err == ""
        now[0] = 60.0
        advance("replay", 25, 100)
    assert capsys.readouterr().err == f"{ablate.NAME}: replay: 25 of 100, 3 min left\n"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_committed_configuration_is_one(path):
    """FC-26: what is configured is there: experiment, policies, drafters and their trees."""
    options = ablate.make_parser().parse_args([str(path), "--dry-run"])
    experiment, text, seed = ablate.read_experiment(options)
    assert text == path.read_text() and seed >= 0
    assert type(experiment) in EXPERIMENTS.values()
