"""The table of mechanisms at small shapes, and with planted faults."""

import dataclasses

import pytest
from lab_cases import FAULTS, SIZES, context, rows_of

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


def test_what_does_not_fit_is_said_and_not_run(tmp_path):
    rows = rows_of(make(memory_gib=1e-5, repeats=1), context(tmp_path))
    assert [row["gate"] for row in rows] == ["not run"] * 3
    assert rows[0]["problem"] == "does not fit: needs 0.0 GiB, has 0.0"


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
