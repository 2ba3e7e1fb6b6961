"""What a report says: verdict, worst numbers, text and JSON; every number is a check's own."""

import json
import math

import audit_reports as made
import numpy as np
import pytest
from rich.console import Console

from treejax.audit.base import Check, Report
from treejax.audit.report import (
    MOST_SHOWN,
    as_json,
    headline,
    lines,
    nearest,
    part_of_bound,
    shaped,
    share,
    show,
    used,
    verdict,
)
from treejax.audit.text import checks_table, fitting


def check(value, bound, at_least=False):
    return Check("component", "wy", "outputs", {}, value, bound, at_least)


@pytest.mark.parametrize(
    ("value", "bound", "at_least", "part"),
    [
        (0.5, 1.0, False, 0.5),
        (1.0, 1.0, False, 1.0),
        (3.0, 1.0, False, 3.0),
        (0.0, 0.0, False, 0.0),
        (1e-9, 0.0, False, math.inf),
        (math.nan, 1.0, False, math.inf),
        (-math.inf, 1.0, False, math.inf),
        (0.5, 0.1, True, 0.2),
        (0.1, 0.1, True, 1.0),
        (0.05, 0.1, True, 2.0),
        (0.0, 0.1, True, math.inf),
        (math.nan, 0.1, True, math.inf),
    ],
)
def test_how_much_of_its_bound_a_number_uses(value, bound, at_least, part):
    each = check(value, bound, at_least)
    assert used(each) == pytest.approx(part)
    assert each.green == (used(each) <= 1)  # what is shown never says other than the verdict


def test_lines_gather_what_measured_the_same_and_show_the_worst():
    found = {(line.audit, line.name): line for line in lines(made.red(made.REJECTED))}
    assert set(found) == {
        *(("continuation", name) for name in made.SURFACES),
        ("sampler", "joint G-test"),
        ("component", "states"),
    }
    surface = found["continuation", "R"]
    assert (surface.count, surface.failed, surface.worst.where["cycle"]) == (12, 0, 3)
    tests = found["sampler", "joint G-test"]
    assert (tests.count, tests.failed, tests.worst) == (7, 1, made.REJECTED)


def test_a_failed_check_is_the_worst_whatever_the_others_used():
    report = Report((check(math.nan, 1.0), check(50.0, 1.0), check(0.1, 1.0)))
    (line,) = lines(report)
    assert line.failed == 2 and math.isnan(line.worst.value)


def test_the_nearest_check_is_one_that_can_be_nearer():
    full, exact = check(1.0, 1.0, at_least=True), check(0.0, 0.0)
    assert nearest([full, exact, check(0.2, 1.0), check(0.3, 1.0)]).value == 0.3
    assert nearest([full, exact]) is exact and nearest([full]) is full
    assert nearest([check(0.9, 1.0), check(0.98, 0.99, at_least=True)]).value == 0.98
    parts = [part_of_bound(each) for each in (full, exact, check(0.3, 1.0), check(2.0, 1.0))]
    assert parts == ["", "exact", "30 %", "200 %"]


def test_verdicts():
    count = len(made.checks())
    assert verdict(made.green()) == (
        f"GREEN: all {count} checks of continuation, sampler, component passed"
    )
    assert verdict(made.red(made.NAN)).startswith(f"RED: 1 of {count + 1} checks")


def test_a_report_of_nothing_is_red():
    """FC-26: an audit in which nothing ran proves nothing."""
    empty = Report(())
    assert not empty.green and verdict(empty).startswith("RED: nothing was checked")
    assert headline(empty) == verdict(empty)
    assert str(empty).splitlines() == [verdict(empty), "", "", verdict(empty)]


def test_text_says_who_what_and_what_not():
    text = str(made.red(made.NAN))
    for part in ("python-11m <script>", "Planted faults", "KV remap", "Not audited", "bfloat16"):
        assert part in text
    assert "failed: component wy: outputs nan, at most 1e-06 [layer 2, row 7]" in text
    assert "\x1b" not in text


def test_text_says_the_verdict_first_and_last():
    count = len(made.checks())
    for report, said in (
        (made.green(), "passed, the nearest at 90 % of its bound"),
        (made.red(made.NAN), "failed, the worst: outputs (wy)"),
        (made.red(made.REJECTED, made.NAN), "failed, the worst: outputs (wy)"),
        (Report((check(0.0, 0.0),)), "passed, all exactly"),
    ):
        first, *_, last = str(report).splitlines()
        assert first == last == headline(report) and first.startswith(verdict(report))
        assert first.endswith(said), first
    green = str(made.green()).splitlines()
    assert green[0].startswith(f"GREEN: all {count} checks of continuation, sampler, component")
    (nearest,) = [line for line in green if line.startswith("nearest:")]
    assert "component wy: states 9e-07, at most 1e-06 [layer 1]" in nearest


def test_what_failed_is_in_full_and_no_kind_of_it_hides_another():
    """Under the verdict, before anything that is green."""
    text = str(made.red(*[made.NAN] * 57, made.REJECTED))
    assert text.count("failed: component") == MOST_SHOWN
    assert f"and {57 - MOST_SHOWN} more of this kind, all of which report.json names" in text
    assert "failed: sampler block: joint G-test 1e-09, at least 0.0001 [step 0]" in text
    assert text.index("failed: sampler") < text.index("policies:")


def test_equal_green_lines_are_one_and_what_failed_stands_by_itself():
    names = "noticed: sibling", "noticed: stale path", "false alarms", "noticed: zero replay"
    checks = [Check("component", "wy", name, {}, 1.0, 1.0, True) for name in names]
    rows = checks_table(lines(Report(tuple(checks))))
    assert [row["what"] for row in rows] == [
        "noticed: sibling, stale path, zero replay; false alarms"
    ]
    assert rows[0]["checks"] == 4 and "failed" not in rows[0]
    missed = Check("component", "wy", "noticed: wrong parent", {}, 0.5, 1.0, True)
    other = Check("continuation", "wy", "noticed: other", {}, 1.0, 1.0, True)
    rows = checks_table(lines(Report((*checks, missed, missed, other))))
    assert [(row["what"], row["failed"]) for row in rows[1:]] == [
        ("noticed: wrong parent", 2),
        ("noticed: other", 0),
    ]


def test_text_fits_a_hundred_columns_whatever_is_in_it():
    """Tables of many columns are turned, words are not cut; long ones are shortened and say so."""
    long = "a policy that raised: " + "something went wrong " * 20
    failed = Check("component", "wy", "exceptions raised", {"while": long}, 1, 0, note=long)
    few = tuple(
        {"policy": name, **{f"column {i}": "calibration" for i in range(9)}} for name in "ab"
    )
    few[1]["column 3"] = "held-out and more of it, as texts go"
    many = tuple(
        {"row": i, "is": "equal", "split": "calibration", "at": 1 / (i + 1)} for i in range(99)
    )
    report = Report((*made.checks(), failed), (("few", few), ("many", many)), made.FACTS)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert " ".join(text.split()).count(" ".join(long.split())) == 2  # in full, in several lines
    assert "many (is equal, split calibration)" in text and "and 39 rows more" in text
    assert "few (column 0 calibration, " in text and "held-out and more of it" in text


def test_a_table_that_is_too_wide_is_turned_if_that_fits():
    console = Console(width=60)
    wide = [{"policy": name, **{f"number {i}": i for i in range(8)}} for name in ("wy", "ring")]
    assert [column.header for column in fitting(wide, console).columns] == ["policy", "wy", "ring"]
    assert len(fitting(wide, Console(width=200)).columns) == 9
    assert len(fitting(wide * 5, console).columns) == 9  # many rows stay rows


def test_json_is_of_the_standard_and_holds_every_check():
    report = made.red(made.NAN)
    facts = {"scores": np.float32(0.5), "sizes": (1, np.int64(2)), "rows": np.arange(2)}
    report = Report(report.checks, report.tables, {**report.facts, **facts})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    said = json.loads(as_json(report), parse_constant=refuse)
    assert (said["green"], len(said["checks"])) == (False, len(report.checks))
    last = said["checks"][-1]
    assert (last["value"], last["green"], last["where"]) == ("nan", False, {"layer": 2, "row": 7})
    assert said["tables"][0]["rows"][1]["fault"] == "KV remap"
    assert (said["facts"]["scores"], said["facts"]["sizes"]) == (0.5, [1, 2])
    assert said["facts"]["rows"] == [0, 1]


def test_save_writes_three_files(tmp_path):
    folder = tmp_path / "a" / "b"
    report = made.green()
    report.save(folder)
    assert {path.name for path in folder.iterdir()} == {"report.txt", "report.json", "report.html"}
    assert (folder / "report.txt").read_text() == str(report)
    assert json.loads((folder / "report.json").read_text())["green"] is True


def test_repr_is_one_line():
    assert repr(made.green()) == f"<{verdict(made.green())}>"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (np.bool_(False), "no"),
        (12345, "12,345"),
        (0.123456, "0.123"),
        (123456.0, "1.235e+05"),
        (math.inf, "inf"),
        (np.float32(0.5), "0.5"),
        ({"a": 1, "b": None}, "a 1, b -"),
        (["x", 2], "x, 2"),
    ],
)
def test_cells(value, text):
    assert show(value) == text


def test_a_wide_table_of_few_rows_is_turned():
    wide = [{"policy": name, **{f"c{i}": i for i in range(12)}} for name in ("wy", "wy")]
    turned = shaped(wide)
    assert len(turned) == 12 and turned[3] == {"policy": "c3", "wy (1)": 3, "wy (2)": 3}
    narrow = [{"policy": "wy", "a": 1}]
    assert shaped(narrow) == narrow and shaped(wide * 6) == wide * 6


def test_shares_of_a_bound():
    shares = [share(part) for part in (0.0, 0.001, 0.5, 1.0, 9.0, 200.0, math.inf)]
    assert shares == ["0 %", "< 1 %", "50 %", "100 %", "900 %", "200 x", "beyond"]
