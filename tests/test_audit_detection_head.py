"""Faults of the drafter's head, judged by the continuation audit's own envelope."""

import dataclasses
import functools

import pytest

from treejax.audit import detection
from treejax.audit.continuation import settings as continuation_settings
from treejax.audit.faults import REGISTRY

HEAD = tuple(name for name, fault in REGISTRY.items() if fault.drafted)
# As many prefixes as there are sequences: the same programs serve both.
CONTROLS = continuation_settings.Settings(
    prefixes=6, length=24, shorter=1, cycles=2, long_tokens=0, fresh_process=False
)
SETTINGS = dataclasses.replace(detection.Settings(), seeds=5, faults=HEAD, controls=CONTROLS)


@functools.cache
def report():
    return detection.run(None, None, SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAD)
def test_a_fault_of_the_head_is_caught_in_its_cache(name):
    planted, _ = report().tables
    (row,) = [row for row in planted[1] if row["fault"] == name]
    assert row["drafter"] == "mtp"
    assert row["caught"] == row["seeds"] == SETTINGS.seeds
    assert f"drafter {SETTINGS.seeds}" in row["seen in"]


@pytest.mark.slow
def test_a_right_head_raises_no_alarm():
    (row,) = report().tables[1][1]
    assert row["caught"] == 0 and row["seeds"] == SETTINGS.batch
    assert report().green
