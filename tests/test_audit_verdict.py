"""What the continuation audit takes for rounding, and what it does not."""

from types import SimpleNamespace

import numpy as np
import pytest
from audit_cases import small

from treejax.audit.continuation.verdict import WORDS, Tally
from treejax.audit.envelope import Envelope, bounds_from, long_bounds_from
from treejax.audit.step import Subject
from treejax.audit.surfaces import EXACT, SURFACES, Measured
from treejax.drafters import MTP
from treejax.policies.replay import Replay
from treejax.steps.rules import REGISTRY as RULES

WORST = {name: np.zeros(1) for name in (*SURFACES, "logits")}


@pytest.mark.parametrize(
    ("margin", "emitted", "schedule", "excused"),
    [
        (1e-7, 2, "cold", True),
        (3.0, 2, "cold", False),
        (1e-7, 3, "cold", False),
        (1e-4, 2, "cold", False),
        (1e-4, 2, "long", True),
        (3e-4, 2, "long", False),
    ],
    ids=[
        *("second by a hair", "second by three nats", "not even the second"),
        *("by more than rounding", "by the rounding of a long run", "by more than that"),
    ],
)
def test_only_plain_s_second_choice_at_a_near_tie_is_excused(margin, emitted, schedule, excused):
    """Plain draws 1 and then 1 again, with 2 for the second choice; the engine emits another."""
    bounds = bounds_from("float32", WORST, 4.0)
    longer = long_bounds_from("float32", WORST | {"logits": np.array([1e-4])}, 4.0)
    subject = Subject(Replay(), MTP("2,1"), RULES["match"])
    tally = Tally(small(), subject, Envelope(bounds, {}, {}, longer))
    plain = SimpleNamespace(
        tokens=np.array([[1, 1], [1, 1]]),
        second=np.full((2, 2), 2),
        margin=np.full((2, 2), margin),
    )
    distances = {name: np.zeros((2, 1, 1, 1)) for name in ("R", "C", "new K", "old K")}
    distances |= {name: np.zeros(2) for name in ("divergence", "drafter")}
    distances["row logits"] = np.zeros((2, 3))
    counts = {name: np.zeros(2, int) for name in EXACT} | {"tokens": np.array([1, 0])}
    shown = SimpleNamespace(tokens=np.array([[emitted], [1]]), count=np.array([1, 1]))
    after = tally.record(
        *(Measured(np.array([1, 1]), distances, counts), shown, plain, np.zeros(2, int)),
        *(np.ones(2, bool), {"schedule": schedule, "cycle": 0}, lambda: np.zeros(2, bool)),
    )
    assert after.tolist() == [False, True]
    assert tally.facts["near ties"] == int(excused)
    assert [check.name for check in tally.checks if not check.green] == (
        [] if excused else [WORDS["tokens"]]
    )
