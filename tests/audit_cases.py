"""Benches that the tests of the audit's faults share: made once a process."""

import functools

import numpy as np

from treejax.audit.detection.bench import prepare, script
from treejax.audit.detection.strikes import draw_strikes
from treejax.audit.detection.toy import toy
from treejax.audit.prefixes import prefixes
from treejax.drafters import MTP

TREE, SCHEDULE = "3,2,1", ((3, 3), (2, 1), (3, 2), (1, 0), (3, 1), (2, 2))
SEQUENCES = 6


@functools.cache
def bench_of(drafter, split="held-out"):
    """Six sequences of the toy, six steps of a scripted drafter or of the head."""
    model = toy()
    made = script(TREE, SCHEDULE) if drafter == "scripted" else MTP(TREE)
    return prepare(model, made, prefixes(model, split, SEQUENCES, 12, 0), len(SCHEDULE))


def places(fault, policy, bench, among=None):
    """A strike in each of the sequences ``among`` [B] in which the fault shows."""
    strike = draw_strikes(fault, policy, bench, (0,), bench.margins > 0)
    if among is None:
        return strike
    return strike.replace(cycle=np.where(among, strike.cycle, -1).astype(np.int32))
