"""The file of rows: nothing is lost, nothing is repeated, nothing of another run is mixed in."""

import json

import numpy as np
import pytest

from treejax.ablation.base import Cell, select_arms
from treejax.ablation.plan import plan_table
from treejax.ablation.report import environment, problems, write_summary
from treejax.ablation.rows import FILE, RowFile, is_time, missing, read_rows

TOML = 'experiment = "x"\n'
OPTIONS = {"dtype": None, "requests": None}


def cells(arms="ab", repeats=2):
    return [Cell(arm, {"nodes": n}, r) for r in range(repeats) for n in (4, 8) for arm in arms]


def begin(tmp_path, count):
    file = RowFile.create(tmp_path, TOML, OPTIONS)
    for cell in cells()[:count]:
        file.append(cell.row("green", measures={"decode_s": 1.5}))
    return tmp_path / FILE


def test_a_resumed_file_asks_for_what_is_missing_alone(tmp_path):
    begin(tmp_path, 3)
    file = RowFile.resume(tmp_path, TOML, OPTIONS)
    assert [row["arm"] for row in file.rows] == ["a", "b", "a"]
    assert file.missing(cells()) == cells()[3:]
    for cell in file.missing(cells()):
        file.append(cell.row("red", "wrong"))
    again = RowFile.resume(tmp_path, TOML, OPTIONS)
    assert len(again.rows) == 8 and not again.missing(cells())  # red rows are rows too
    assert again.missing(cells(repeats=3)) == cells(repeats=3)[8:]  # more repeats, later


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_last_line_cut_short_is_dropped_and_measured_again(tmp_path, cut):
    path = begin(tmp_path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    file = RowFile.resume(tmp_path, TOML, OPTIONS)
    assert len(file.rows) == 2 and file.missing(cells()) == cells()[2:]
    file.append(cells()[2].row("green", measures={"decode_s": 1.5}))
    assert path.read_bytes() == whole


def test_a_first_line_cut_short_begins_anew(tmp_path):
    path = begin(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:10])
    assert RowFile.resume(tmp_path, TOML, OPTIONS).rows == []
    assert json.loads(path.read_text())["config"] == TOML


def test_another_run_is_refused_in_one_line(tmp_path):
    path = begin(tmp_path, 1)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="holds a run already: --resume goes on"):
        RowFile.create(tmp_path, TOML, OPTIONS)
    with pytest.raises(ValueError, match="another configuration"):
        RowFile.resume(tmp_path, TOML + "# a remark\n", OPTIONS)
    with pytest.raises(ValueError, match="dtype None, not 'bfloat16'"):
        RowFile.resume(tmp_path, TOML, OPTIONS | {"dtype": "bfloat16"})
    assert path.read_bytes() == before
    path.write_bytes(b"{}\n")
    with pytest.raises(ValueError, match="is no file of rows"):
        RowFile.resume(tmp_path, TOML, OPTIONS)
    path.write_bytes(before.replace(b'{"arm"', b'["arm"'))
    with pytest.raises(ValueError, match=f"{FILE}, line 2: not a JSON object"):
        RowFile.resume(tmp_path, TOML, OPTIONS)


def test_rows_keep_the_rules_of_the_gate(tmp_path):
    """A red row has neither time nor rate; whoever is red or not run says why."""
    file, cell = RowFile.create(tmp_path, TOML, OPTIONS), cells()[0]
    for row, message in [
        (cell.row("red", "wrong", {"tokens_per_s": 3.0}), "a red row of a has tokens_per_s"),
        (cell.row("red", "wrong", {"verify_ms_min": 3.0}), "a red row of a has verify_ms_min"),
        (cell.row("red"), "its problem is None"),
        (cell.row("green", "but"), "its problem is 'but'"),
        (cell.row("maybe"), "known gate"),
        ({"arm": "a", "repeat": 0, "gate": "green"}, "problem"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            file.append(row)
    assert read_rows(tmp_path) == []
    file.append(cell.row("red", "wrong", {"tokens_per_s": None, "steps": 4, "bits": 2}))
    assert len(read_rows(tmp_path)) == 1
    assert not any(map(is_time, ("steps", "tokens", "arms", "state_mib", "margin_nats")))


def test_numbers_survive_as_json(tmp_path):
    file = RowFile.create(tmp_path, TOML, OPTIONS)
    measures = {"error": np.float32(0.5), "worst": float("nan"), "parts": [np.int64(3), np.inf]}
    file.append(cells()[0].row("green", measures=measures))
    (row,) = read_rows(tmp_path)
    assert (row["error"], row["worst"], row["parts"]) == (0.5, None, [3, None])
    assert file.rows == [row]  # what is reported now is what a resumed run would report


def test_arms_are_selected_by_name_or_beginning():
    plan = cells(("plain", "wy/chain1", "wy/chain15", "replay/chain1"), repeats=1)

    def arms(*wanted, always=()):
        return {cell.arm for cell in select_arms(plan, wanted, always)}

    assert arms() == {"plain", "wy/chain1", "wy/chain15", "replay/chain1"}
    assert arms("wy/chain1") == {"wy/chain1"}  # an exact name is that arm alone
    assert arms("wy", always=("plain",)) == {"plain", "wy/chain1", "wy/chain15"}
    with pytest.raises(ValueError, match="--arms ring: no such arm, expected one of: plain, wy"):
        arms("ring")


def test_the_plan_counts_cells_and_adds_up_memory():
    plan = [Cell("a", {"n": n}, 0, {"state": 2**20 * n, "keys": 2**19}) for n in (1, 2)]
    plan.append(Cell("b", {"n": 1}, 0))
    table = plan_table(plan, plan[1:])
    columns = {c.header: list(c.cells) for c in table.columns}
    assert columns["arm"] == ["a", "b"] and columns["cells"] == ["2", "1"]
    assert columns["to run"] == ["1", "1"]
    assert columns["MiB"] == ["2.5", ""] and columns["state"] == ["2.0", ""]


def test_the_environment_names_commit_versions_and_settings(tmp_path):
    made = environment(TOML, 7, ["--out", "x"])
    assert (made["config"], made["seed"], made["arguments"]) == (TOML, 7, ["--out", "x"])
    assert made["device"].startswith("cpu") and made["jax"] and made["jaxlib"] and made["date"]
    assert made["commit"] is None or (len(made["commit"]) == 40 and made["dirty"] in (True, False))
    write_summary(tmp_path, made, [{"arm": "a", "x": 1}, {"arm": "b", "y": 2.5}])
    whole = json.loads((tmp_path / "summary.json").read_text())
    assert whole == {"environment": made, "rows": [{"arm": "a", "x": 1}, {"arm": "b", "y": 2.5}]}
    assert (tmp_path / "summary.csv").read_text().splitlines() == ["arm,x,y", "a,1,", "b,,2.5"]


def test_a_red_row_is_named_by_what_makes_it_unique():
    rows = [cells()[0].row("green"), cells()[1].row("red", "off by 2")]
    assert problems(rows) == ["b, 4, repeat 0: off by 2"]
    assert missing(cells(), rows) == cells()[2:]
