"""What a report says: verdict, worst numbers, text and JSON; every number is a check's own."""

import json
import math

import audit_reports as made
import numpy as np
import pytest

from treejax.audit.base import Check, Report
from treejax.audit.report import (
    MOST_SHOWN,
    as_json,
    lines,
    nearest,
    part_of_bound,
    shaped,
    share,
    show,
    used,
    verdict,
)


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
    assert str(empty).strip().endswith(verdict(empty))


def test_text_says_who_what_and_what_not():
    text = str(made.red(made.NAN))
    for part in ("python-11m <script>", "Planted faults", "KV remap", "Not audited", "bfloat16"):
        assert part in text
    assert "failed: component wy: outputs nan, at most 1e-06 [layer 2, row 7]" in text
    assert text.rstrip().splitlines()[-1] == verdict(made.red(made.NAN))
    assert "\x1b" not in text


def test_text_shows_some_failed_checks_and_counts_the_others():
    text = str(made.red(*[made.NAN] * 57))
    assert text.count("failed: component") == MOST_SHOWN
    assert f"and {57 - MOST_SHOWN} more" in text


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
