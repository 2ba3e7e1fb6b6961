"""Planted faults of samplers are seen by the tests, and nothing else is seen.

The power over many seeds is the audit's own full run.
"""

import dataclasses

import numpy as np
import pytest

from treejax.audit import sampler
from treejax.audit.sampler.detection import Found, detect
from treejax.audit.sampler.walks import Outcome

pytestmark = pytest.mark.compiles_fast

SMALL = dataclasses.replace(
    sampler.Settings.quick(), fault_seeds=3, fault_walks=4000, steps=2, walks=4000
)


def test_faults_are_caught_and_clean_samplers_are_not():
    """Under one rule and one world, so that few programs are compiled."""
    names = ["bonus_redrawn", "key_in_every_step", "neighbours_row_match"]
    report = sampler.detect(names, SMALL)
    assert report.green, report.red
    faults, clean, beside = (rows for _, rows in report.tables)
    assert [row["fault"] for row in faults] == names
    assert all(row["power"] == row["equality"] == 1.0 for row in faults)
    assert faults[0]["joint G"] == 1.0 and faults[2]["conditional G"] == 1.0
    (row,) = clean
    assert (row["false alarms"], row["streams that differ"], row["seeds"]) == (0, 0, 3)
    (row,) = beside
    assert row["fault"] == "neighbours_row_match" and row["seen"] == row["steps"] == 2
    assert row["LumoTree, of 6"] == 6


def test_cuts_that_go_wrong_show_in_what_is_handed():
    report = detect(["stops_ignored", "one_token_too_many"], SMALL)
    faults = report.tables[0][1]
    assert [row["equality"] for row in faults] == [1.0, 1.0]
    assert all(row["conditional G"] is None for row in faults)
    assert report.green


def test_a_fault_that_is_not_caught_is_red_and_so_is_a_false_alarm():
    quiet = [[Outcome("joint", "all", 1.0, 3, 0.5)], [Outcome("joint", "all", 90.0, 3, 1e-15)]]
    found = Found(quiet, streams=np.array([False, False]))
    np.testing.assert_array_equal(found.caught(1e-6), [False, True])
    np.testing.assert_array_equal(found.seen(1e-6, "conditional"), [False, False])
    with pytest.raises(ValueError, match="fault 'nothing' is unknown"):
        sampler.detect(["nothing"], SMALL)
