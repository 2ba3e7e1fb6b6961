"""The benchmark of tree attention: gate before speed, what it writes, and errors of one line."""

import json

import numpy as np
import pytest

from pallas_kernels.bench.attention import programs
from pallas_kernels.bench.attention.__main__ import main
from pallas_kernels.bench.attention.cases import BEYOND_CACHE, make_case, make_cell
from pallas_kernels.bench.attention.settings import parse
from pallas_kernels.bench.guard import MISTAKE, RED, run_command

TINY = "--heads 4 --key-heads 2 --width 64 --layers 2 --repeats 2 --context 50 --batch 2".split()


def test_every_cell_is_checked_and_timed(tmp_path, capsys):
    """On a CPU by the reference; cuDNN's attention refuses, and says why."""
    file = tmp_path / "run.json"
    assert run_command(main, [*TINY, "--rows", "1,28", "--json", str(file)]) == 0
    shown, document = capsys.readouterr(), json.loads(file.read_text())
    rows = {(row["rows"], row["name"]): row for row in document["rows"]}
    names = (programs.KERNEL, programs.XLA, programs.CUDNN)
    assert set(rows) == {(n, name) for n in (1, 28) for name in names}
    for (count, name), row in rows.items():
        assert row["bytes"] == 2 * 2 * (2 * (50 + count) * 2 * 64 + 2 * count * 4 * 64)
        if name == programs.CUDNN:
            assert "cuDNN" in row["problem"] and row["median_ms"] is None
            continue
        assert row["implementation"] == "xla" and row["problem"] is None and row["rounds"] == 2
        assert 0 < row["error"] < 5e-3 and 0 < row["p10_ms"] <= row["median_ms"]
        share = row["bytes"] / row["copy_bytes_per_s"] / row["median_ms"] * 1e3
        assert row["bandwidth_share"] == pytest.approx(share)
        assert name in shown.out
    assert document["settings"]["heads"] == 4 and document["environment"]["platform"] == "cpu"


def test_a_wrong_output_is_red_and_gets_no_time(monkeypatch, tmp_path):
    honest = programs.tree_attention
    monkeypatch.setattr(programs, "tree_attention", lambda *a, **k: 1.03125 * honest(*a, **k))
    file = tmp_path / "run.json"
    chosen = ["--rows", "6", "--peers", "none", "--json", str(file)]
    assert run_command(main, [*TINY, *chosen]) == RED
    (row,) = json.loads(file.read_text())["rows"]
    assert "relative RMS 3.1e-02" in row["problem"] and row["median_ms"] is None


def test_a_call_reads_more_than_an_l2_holds():
    """Or short contexts would be timed from there; and one sequence's rows are another's never."""
    settings = parse([])
    for context in settings.context:
        cell = make_cell(settings, 1, context, 28)
        assert cell.layers * cell.bytes > min(BEYOND_CACHE, 200e6)
        assert cell.tree.capacity == 32
    case = make_case(make_cell(parse(TINY), 2, 50, 6), 0)
    layers = np.asarray(case.keys.astype("float32")).reshape(4, -1)
    assert len(np.unique(layers[:, 0])) == 4
    rows = case.keys.shape[0] * case.keys.shape[1] * case.keys.shape[2]
    assert rows % 8 == 0 and case.keys.shape[2] > 50


@pytest.mark.parametrize("arguments, message", [
    (["--heads", "5", "--key-heads", "2"], "no multiple"),
    (["--rows", "7"], "--rows 7 is unknown, expected some of: 1, 6, 28, 64"),
    (["--implementation", "mosaic_gpu"], "need a Hopper GPU"),
    (["--json", "/no/such/folder/x.json"], "no such folder"),
    (["--context", "1,x"], "'x' is no number"),
])  # fmt: skip
def test_a_mistake_is_one_line(arguments, message, capsys):
    try:
        status = run_command(main, arguments)
    except SystemExit as stop:  # argparse
        status = stop.code
    shown = capsys.readouterr()
    assert status == MISTAKE and shown.out == ""
    assert message in shown.err and shown.err.count("\n") == 1
