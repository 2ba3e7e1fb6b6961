"""A model and benches that the tests of the audits share: made once a process."""

import dataclasses
import functools

import numpy as np
import tiny

from treejax.audit.detection.bench import prepare, script
from treejax.audit.detection.strikes import draw_strikes
from treejax.audit.detection.toy import CONFIG
from treejax.audit.prefixes import prefixes
from treejax.config import FULL, LINEAR
from treejax.drafters import MTP
from treejax.model import Model

TREE, SCHEDULE = "3,2,1", ((3, 3), (2, 1), (3, 2), (1, 0), (3, 1), (2, 2))
SEQUENCES = 6


@functools.cache
def small(seed=0):
    """The audit's toy with one layer of each kind, as fewer compile sooner: six tokens, so that an
    untrained head is often right, and logits far apart."""
    config = dataclasses.replace(CONFIG, layer_types=(LINEAR, FULL), max_position_embeddings=256)
    params = tiny.random_params(config, seed)
    params["lm_head"] = 6.0 * params["lm_head"]
    return Model(params, config)


@functools.cache
def bench_of(drafter, split="held-out"):
    """Six sequences, six steps of a scripted drafter or of the head."""
    model = small()
    made = script(TREE, SCHEDULE) if drafter == "scripted" else MTP(TREE)
    return prepare(model, made, prefixes(model, split, SEQUENCES, 12, 0), len(SCHEDULE))


def places(fault, policy, bench, among=None):
    """A strike in each of the sequences ``among`` [B] in which the fault shows."""
    strike = draw_strikes(fault, policy, bench, (0,), bench.margins > 0)
    if among is None:
        return strike
    return strike.replace(cycle=np.where(among, strike.cycle, -1).astype(np.int32))
