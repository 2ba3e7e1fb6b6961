"""width_sweep, atlas and write_timing at small shapes."""

import dataclasses
import json
from pathlib import Path

import byte_model
import pytest
from lab_cases import FAULTS, SIZES, context, rows_of

from treejax.ablate import measure
from treejax.ablation import acceptance, atlas_report, width_sweep
from treejax.ablation.atlas import Atlas
from treejax.ablation.atlas_report import cells_of, crossings
from treejax.ablation.lab import needed_bytes
from treejax.ablation.lab_arms import make_arm
from treejax.ablation.rows import RowFile, is_time
from treejax.ablation.width_sweep import WidthSweep
from treejax.ablation.write_timing import WriteTiming
from treejax.config import read_toml
from treejax.policies import REGISTRY

pytestmark = pytest.mark.compiles_fast

ROOT = Path(__file__).parent.parent
COMMON = {"seed": 0, "repeats": 1, "warm_up": 1, "rounds": 1, "sizes": SIZES}

SWEEP = COMMON | {
    "arms": ["snapshot", "wy"],
    "widths": ["1,1,1", "2,2,1"],
    "capacities": [4, 16],
    "most_depth": 4,
}
ATLAS = COMMON | {
    "arms": ["wy", "snapshot"],
    "nodes": [3, 4],
    "trees": ["chain", "kary3"],
    "batches": [1, 2],
    "published": [1, 0],
    "capacities": [4],
    "most_depth": 3,
}
TIMING = COMMON | {
    "arms": ["wy", "ring:length=2,rows=8"],
    "batches": [1, 2],
    "tree": "2,1",
    "capacity": 8,
    "most_depth": 2,
    "published": 2,
    "gated": 4,
}


def test_widths_store_flat_but_for_snapshot_and_compile_nothing(tmp_path):
    experiment = WidthSweep.from_toml(SWEEP, "small.toml")
    rows = rows_of(experiment, context(tmp_path))
    assert {(r["arm"], r["widths"], r["nodes"], r["capacity"]) for r in rows} == {
        (arm, *place)
        for arm in ("snapshot", "wy")
        for place in (("1,1,1", 4, 4), ("2,2,1", 11, 16))
    }
    for row in rows:
        assert row["gate"] == "green" and row["step_ms"] > 0
        assert row["compilations"] == 0 and row["trees"] == 32
        assert row["stored_blocks"] == (row["nodes"] + 1 if row["arm"] == "snapshot" else 1)
    fits = {(row["arm"], row["widths"]): row["sequences"] for row in rows}
    assert fits["wy", "2,2,1"] > fits["snapshot", "2,2,1"]
    titles = [table.title for table in experiment.tables(rows)]
    assert "compilations while trees changed" in titles and len(titles) == 5
    experiment.figures(rows, tmp_path)
    assert (tmp_path / "width_sweep.svg").exists()


def test_a_compilation_makes_the_row_red(tmp_path, monkeypatch):
    monkeypatch.setattr(width_sweep, "compilations_over_trees", lambda bench, steps: 2)
    changed = SWEEP | {"arms": ["wy"], "widths": ["1,1,1"]}
    (row,) = rows_of(WidthSweep.from_toml(changed, "small.toml"), context(tmp_path))
    assert row["gate"] == "red" and not [name for name in row if is_time(name)]
    assert row["problem"] == "2 compilations while trees changed, expected 0"


def test_acceptance_is_gated_by_plain_decoding(tmp_path, monkeypatch):
    """The smallest hybrid in place of the model that ships."""
    monkeypatch.setattr(acceptance, "load_model", lambda path, dtype, fused: byte_model.model())
    settings = {"prompts": "beartype.toml", "widths": ["1,1"], "most_prompts": 1, "tokens": 12}
    table = SWEEP | {"acceptance": settings}
    where = str(ROOT / "configs/prompts/small.toml")  # prompts lie beside it
    experiment = WidthSweep.from_toml(table, where)
    cells = [c for c in experiment.cells(context(tmp_path)) if c.arm == width_sweep.ACCEPTANCE]
    (row,) = rows_of(experiment, context(tmp_path), cells)
    assert row["gate"] in ("green", "near tie") and row["prompts"] == 1
    assert 1.0 <= row["acceptance_length"] <= 3.0
    (line,) = experiment.summary([row])
    assert line["nodes"] == 3 and line["acceptance_length"] == row["acceptance_length"]


def test_the_atlas_has_a_row_a_cell_and_times_beside_the_model(tmp_path):
    experiment = Atlas.from_toml(ATLAS, "small.toml")
    # Three chain nodes and three of kary3 differ, and so do four; each publishes 1 row or all.
    assert set(experiment.shapes()) == {(n, f) for n in (3, 4) for f in ("chain", "kary3")}
    where = context(tmp_path)
    rows = rows_of(experiment, where)
    assert len(rows) == len(experiment.cells(where)) == 2 * 2 * 4 * 2
    for row in rows:
        assert row["gate"] == "green" and row["step_ms"] > 0 and row["model_ms"] > 0
        longest = row["nodes"] if row["tree"] == "chain" else 2
        assert row["published"] in (1, longest) and row["depth"] == longest - 1
    lines = experiment.summary(rows)
    assert sum(line["fastest"] for line in lines) == len(lines) // 2
    assert [table.title for table in experiment.tables(rows)][1:] == [
        "crossing points along the nodes",
        "measured by modelled time: median (range)",
        "not run",
    ]
    experiment.figures(rows, tmp_path)
    assert (tmp_path / "atlas.png").exists() and (tmp_path / "atlas_nodes.png").exists()
    # Nothing is lost on the way to the digest: a record a place, with every arm.
    made = json.loads((tmp_path / "atlas.json").read_text())
    assert len(made["places"]) == len(experiment.places()) == len(lines) // 2
    for line in lines:
        (place,) = [x for x in made["places"] if all(x[n] == line[n] for n in atlas_report.PLACE)]
        assert place["ms"][line["arm"]] == pytest.approx(line["step_ms"], rel=1e-3)
        assert place["model_ms"][line["arm"]] == pytest.approx(line["model_ms"], rel=1e-3)
    for ratio in made["measured_by_model"]:
        mine = [x for x in lines if (x["arm"], x["batch"]) == (ratio["arm"], ratio["batch"])]
        assert ratio["places"] == len(mine) == 4 * 2
        assert ratio["max"] == pytest.approx(
            max(x["step_ms"] / x["model_ms"] for x in mine), rel=0.01
        )


def test_cells_that_do_not_fit_and_red_ones_have_no_times(tmp_path, monkeypatch):
    monkeypatch.setitem(REGISTRY, "sibling", FAULTS["sibling"])
    one = ATLAS | {"nodes": [3], "trees": ["chain"], "batches": [1]}
    unfit = Atlas.from_toml(one | {"memory_gib": 1e-6}, "small.toml")
    rows = rows_of(unfit, context(tmp_path))
    assert {row["gate"] for row in rows} == {"not run"}
    assert rows[0]["problem"].startswith("does not fit: needs")
    assert unfit.tables(rows)[-1].row_count == 2
    unfit.figures(rows, tmp_path)
    # The byte model never asks for the form of a policy that is red.
    red = Atlas.from_toml(one | {"arms": ["sibling", "wy"]}, "small.toml")
    rows = rows_of(red, context(tmp_path))
    assert {(row["arm"], row["gate"]) for row in rows} == {("sibling", "red"), ("wy", "green")}
    assert not [n for row in rows if row["arm"] == "sibling" for n in row if is_time(n)]


def test_crossing_points_are_interpolated_between_neighbours():
    def row(arm, nodes, ms):
        place = {"nodes": nodes, "tree": "best", "batch": 1, "published": 1, "repeat": 0}
        return {"arm": arm, **place, "gate": "green", "problem": None, "step_ms": ms}

    times = {4: (1.0, 2.0), 16: (2.0, 1.0), 64: (3.0, 1.0)}
    rows = [row(arm, n, ms[i]) for n, ms in times.items() for i, arm in enumerate(("a", "b"))]
    longest = {(n, "best"): 3 for n in times}
    lines = cells_of(rows, longest)
    assert {line["path"] for line in lines} == {"1"}  # the longest path has no row here
    (found,) = crossings(lines)
    assert (found.before, found.after, found.between) == ("a", "b", (4, 16))
    assert found.nodes == pytest.approx(8.0)  # halfway on logarithms
    assert found.ratios == pytest.approx((0.5, 2.0))


def test_an_arm_that_is_red_on_one_tree_has_no_time_on_another(tmp_path):
    experiment = Atlas.from_toml(ATLAS, "small.toml")
    rows = []
    for cell in experiment.cells(context(tmp_path)):
        if cell.arm == "wy" and cell.key["tree"] == "chain" and cell.key["nodes"] == 4:
            rows.append(cell.row("red", "planted"))
        else:
            measures = {"step_ms": 1.0, "model_ms": 0.5, "implementation": "xla"}
            rows.append(cell.row("green", None, measures))
    for line in experiment.summary(rows):
        wrong = line["arm"] == "wy"
        assert (line["gate"], line["problem"]) == (("red", "planted") if wrong else ("green", None))
        assert (line["step_ms"] is None) == wrong and line["fastest"] != wrong
    assert list(experiment.tables(rows)[0].columns[1].cells) == [""]
    experiment.figures(rows, tmp_path)
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured and all(place["names"] == ["snapshot"] for place in measured)


def test_arms_left_out_need_no_memory(tmp_path, monkeypatch):
    """Room for wy alone: snapshot's carry counts only where snapshot is asked for too."""
    one = ATLAS | {"nodes": [3], "trees": ["chain"], "batches": [1], "published": [0]}
    whole = Atlas.from_toml(one, "small.toml")
    needed = needed_bytes(make_arm("wy", "xla", "float32"), whole.sizes, 1, 4)
    tight = Atlas.from_toml(one | {"memory_gib": (needed + 100) / 2**30}, "small.toml")
    cells = tight.cells(context(tmp_path))
    assert {row["gate"] for row in rows_of(tight, context(tmp_path), cells)} == {"not run"}
    (row,) = rows_of(tight, context(tmp_path), [cell for cell in cells if cell.arm == "wy"])
    assert row["gate"] == "green"


@pytest.mark.parametrize(
    ("kind", "table", "kept"),
    [
        (WidthSweep, SWEEP | {"widths": ["1,1", "1,1,1", "2,2"], "capacities": [4, 8]}, 4),
        (Atlas, ATLAS | {"nodes": [3], "batches": [1]}, 4),
        (WriteTiming, TIMING, 2),
    ],
)
def test_out_of_time_a_group_keeps_all_its_rows(kind, table, kept, tmp_path):
    """Under the command: what was measured together is written, and the next group not begun."""
    experiment = kind.from_toml(table | {"arms": ["wy", "replay"], "repeats": 2}, "small.toml")
    where = dataclasses.replace(context(tmp_path), time_limit=0.0)
    file = RowFile.create(tmp_path / "run", "text", {})
    cells = experiment.cells(where)
    assert measure(experiment, where, cells, file) == "out of time"
    assert len(file.rows) == kept < len(cells)
    assert {(row["arm"], row["repeat"]) for row in file.rows} == {("wy", 0), ("replay", 0)}


def test_write_timing_by_batch_with_the_bytes_of_the_model(tmp_path):
    experiment = WriteTiming.from_toml(TIMING, "small.toml")
    rows = rows_of(experiment, context(tmp_path))
    assert [(row["arm"], row["batch"]) for row in rows] == [
        (arm, batch) for batch in (1, 2) for arm in TIMING["arms"]
    ]
    assert all(row["gate"] == "green" and row["step_ms"] > 0 for row in rows)
    moved = {(row["arm"], row["batch"]): row["model_mb"] for row in rows}
    assert moved["wy", 2] == pytest.approx(2 * moved["wy", 1])
    assert [table.row_count for table in experiment.tables(rows)] == [2, 2]
    experiment.figures(rows, tmp_path)
    assert (tmp_path / "write_timing.png").exists()


@pytest.mark.parametrize("kind", [WidthSweep, Atlas, WriteTiming])
def test_tomls_for_the_h200(kind, tmp_path):
    where = str(ROOT / f"configs/ablations/{kind.name}.toml")
    table = read_toml(where)
    assert table.pop("experiment") == kind.name
    experiment = kind.from_toml(table, where)
    cells = experiment.cells(context(tmp_path, implementation="interpret"))
    identities = {cell.identity() for cell in cells}
    assert len(identities) == len(cells) > 20
    if kind is WidthSweep:
        assert set(experiment.arms) == set(REGISTRY)
        assert {c.key.get("capacity") for c in cells} - {None} == {8, 16, 32, 64, 128}
        assert Path(experiment.acceptance.prompts).resolve().exists()
    if kind is Atlas:
        programs = {(c.arm, experiment._capacity(c.key["nodes"]), c.key["batch"]) for c in cells}
        assert len(programs) == 48  # three of snapshot do not fit an H200


def test_mistakes_name_file_and_key():
    with pytest.raises(ValueError, match="small.toml: nodes hold 9 and the largest of capacities"):
        Atlas.from_toml(ATLAS | {"nodes": [9]}, "small.toml")
    with pytest.raises(ValueError, match="small.toml: published holds -1, expected 0 or more"):
        Atlas.from_toml(ATLAS | {"published": [-1]}, "small.toml")
    with pytest.raises(ValueError, match="small.toml: published is 9, expected 1..3"):
        WriteTiming.from_toml(TIMING | {"published": 9}, "small.toml")
    with pytest.raises(ValueError, match="tree 3,3,3 has 40 nodes, at most 16 fit"):
        WidthSweep.from_toml(SWEEP | {"widths": ["3,3,3"]}, "small.toml")
    with pytest.raises(ValueError, match="small.toml.acceptance: unknown key 'speed'"):
        WidthSweep.from_toml(SWEEP | {"acceptance": {"speed": 1}}, "small.toml")
