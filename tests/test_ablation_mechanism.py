"""The table of mechanisms at small shapes, and with planted faults."""

import dataclasses
import sys

import jax
import pytest
from lab_cases import FAULTS, SIZES, context, rows_of

from treejax.ablation import lab_timing, mechanism
from treejax.ablation.lab import needed_bytes
from treejax.ablation.lab_arms import make_arm
from treejax.ablation.measured import places
from treejax.ablation.mechanism import Mechanism
from treejax.ablation.rows import RowFile, is_time
from treejax.config import read_toml
from treejax.policies import REGISTRY

TOML = {
    "seed": 0,
    "repeats": 2,
    "arms": ["replay", "wy", "snapshot"],
    "tree": "2,2,1",
    "capacity": 16,
    "most_depth": 4,
    "warm_up": 2,
    "rounds": 2,
    "memory_gib": 1.0,
    "model_gib": 0.5,
    "sizes": SIZES,
}


def make(**changes):
    return Mechanism.from_toml(TOML | changes, "small.toml")


def test_a_row_an_arm_and_repeat_in_every_report(tmp_path):
    experiment = make()
    rows = rows_of(experiment, context(tmp_path))
    assert [(row["arm"], row["repeat"]) for row in rows] == [
        (arm, repeat) for repeat in (0, 1) for arm in TOML["arms"]
    ]
    file = RowFile.create(tmp_path / "run", "text", {})
    for row in rows:
        file.append(row)  # keeps the rules of rows, or raises
        assert row["gate"] == "green" and row["implementation"] == "xla"
        assert 0 < row["step_ms_p10"] <= row["step_ms"] <= row["step_ms_p90"]
        assert 0 < row["verify_ms"] and 0 < row["publish_ms"]
        assert 0 < row["deepest_state_error"] < 1e-5 and row["state_error"] < 1e-6
        assert row["buffers_mib"] == pytest.approx(sum(row["buffers"].values()))
        assert row["sequences"] > 1000 and row["temporary_mib"] > 0
    snapshot = next(row for row in rows if row["arm"] == "snapshot")
    assert list(snapshot["buffers"]) == ["states"]

    lines = experiment.summary(rows)
    assert [line["arm"] for line in lines] == TOML["arms"]
    for line in lines:
        mine = [row["step_ms"] for row in rows if row["arm"] == line["arm"]]
        assert line["step_ms_min"] == min(mine) and line["step_ms_max"] == max(mine)
        assert not isinstance(line.get("buffers"), dict)
    (table,) = experiment.tables(rows)
    assert table.row_count == 3
    experiment.figures(rows, tmp_path)
    assert {path.name for path in tmp_path.glob("mechanism.*")} == {
        "mechanism.png",
        "mechanism.svg",
    }


def test_a_wrong_policy_has_no_time_and_the_others_do(tmp_path, monkeypatch):
    for name in ("sibling", "broken"):
        monkeypatch.setitem(REGISTRY, name, FAULTS[name])
    lines = []
    experiment = make(arms=["wy", "sibling", "broken"], repeats=1)
    rows = {row["arm"]: row for row in rows_of(experiment, context(tmp_path, lines))}
    assert rows["wy"]["gate"] == "green" and rows["wy"]["step_ms"] > 0
    assert rows["sibling"]["gate"] == rows["broken"]["gate"] == "red"
    assert "states: relative RMS" in rows["sibling"]["problem"]
    assert rows["broken"]["problem"] == "NotImplementedError: planted"
    for name in ("sibling", "broken"):
        assert not [key for key in rows[name] if is_time(key)]
    assert any("sibling: RED" in line for line in lines)
    summary = {line["arm"]: line for line in experiment.summary(list(rows.values()))}
    assert summary["sibling"]["step_ms"] is None
    (table,) = experiment.tables(list(rows.values()))
    assert table.row_count == 3
    experiment.figures(list(rows.values()), tmp_path)


def planted(arm, repeat, gate="green", **more):
    """A row as ``Mechanism`` makes it; a red one has no times."""
    problem = None if gate == "green" else "planted"
    row = {"arm": arm, "batch": 1, "repeat": repeat, "gate": gate, "problem": problem} | more
    if gate == "green":
        for name in ("verify_ms", "publish_ms", "step_ms"):
            row |= {name: 1.5, f"{name}_p10": 1.25, f"{name}_p90": 1.75}
        row |= {"implementation": "xla", "buffers_mib": 2.0, "sequences": 3}
    return row


def test_one_red_repeat_takes_all_times_of_the_arm(tmp_path):
    rows = [planted("wy", 0), planted("replay", 0), planted("wy", 1, "red"), planted("replay", 1)]
    experiment = make(arms=["wy", "replay"])
    lines = {line["arm"]: line for line in experiment.summary(rows)}
    assert lines["replay"]["step_ms"] == 1.5 and lines["replay"]["gate"] == "green"
    assert (lines["wy"]["gate"], lines["wy"]["problem"]) == ("red", "planted")
    assert not [name for name, x in lines["wy"].items() if is_time(name) and x is not None]
    (table,) = experiment.tables(rows)
    assert [list(column.cells) for column in table.columns][:2] == [
        ["wy", "replay"],
        ["planted", "1.5"],
    ]
    (place,) = places(rows, experiment.sizes, "cpu", 4)
    assert place["names"] == ["replay"]
    assert rows[0]["step_ms"] == 1.5  # what was measured is left as it is


def test_without_matplotlib_no_figure_and_no_error(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    make().figures([planted("wy", 0), planted("replay", 0)], tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_memory_cannot_hold_while_timing_is_not_run(tmp_path, monkeypatch):
    """The gate passes, then the arm's queued calls exhaust the device."""

    def exhausted(bench, *rest):
        if bench.name == "replay":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile planted")
        return lab_timing.time_apart(bench, *rest)

    monkeypatch.setattr(mechanism, "time_apart", exhausted)
    rows = rows_of(
        make(arms=["wy", "replay"]), dataclasses.replace(context(tmp_path), over=lambda: True)
    )
    found = {row["arm"]: (row["gate"], row["problem"]) for row in rows}
    problem = "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while planted"
    assert found == {"wy": ("green", None), "replay": ("not run", problem)}
    # Out of time: the first repeat of both arms is kept, the second was not begun.
    assert [row["repeat"] for row in rows] == [0, 0]


def test_what_does_not_fit_is_said_and_not_run(tmp_path):
    rows = rows_of(make(memory_gib=1e-5, repeats=1), context(tmp_path))
    assert [row["gate"] for row in rows] == ["not run"] * 3
    assert rows[0]["problem"] == "does not fit: needs 0.0 GiB, has 0.0"


def test_carries_of_the_other_arms_count(tmp_path):
    """Room for one arm alone, but not beside another one's carry."""
    alone = needed_bytes(make_arm("wy", "xla", "float32"), make().sizes, 1, 16)
    tight = {"repeats": 1, "memory_gib": (alone + 100) / 2**30}
    both = make(arms=["wy", "wy:precision=ieee"], **tight)
    assert [row["gate"] for row in rows_of(both, context(tmp_path))] == ["not run"] * 2
    (row,) = rows_of(make(arms=["wy"], **tight), context(tmp_path))
    assert row["gate"] == "green"


def test_only_the_asked_cells_run(tmp_path):
    experiment, where = make(), context(tmp_path)
    cells = [c for c in experiment.cells(where) if c.arm == "wy" and c.repeat == 1]
    rows = rows_of(experiment, where, cells)
    assert [(row["arm"], row["repeat"]) for row in rows] == [("wy", 1)]


def test_the_toml_for_the_h200_names_every_policy_and_its_memory(tmp_path):
    where = "configs/ablations/mechanism.toml"
    table = read_toml(where)
    assert table.pop("experiment") == Mechanism.name
    experiment = Mechanism.from_toml(table, where)
    assert {arm.partition(":")[0] for arm in experiment.arms} == set(REGISTRY)
    cells = experiment.cells(context(tmp_path, implementation="interpret"))
    assert len(cells) == len(experiment.arms) * experiment.repeats
    mib = {cell.arm: {k: v / 2**20 for k, v in cell.bytes.items()} for cell in cells}
    assert mib["snapshot"]["states"] >= 4032
    replay = sum(size for name, size in mib["replay"].items() if name != "carry")
    assert replay <= 132.5


def test_mistakes_name_file_and_key():
    with pytest.raises(ValueError, match="small.toml: unknown key 'layers'"):
        make(layers=2)
    with pytest.raises(ValueError, match="small.toml: arm 'rewind' names policy"):
        make(arms=["rewind"])
    with pytest.raises(ValueError, match="tree 2,2,1 has depth 3, above the bound 2"):
        make(most_depth=2)
    assert dataclasses.is_dataclass(make())
