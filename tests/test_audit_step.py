"""The audit's step: without a fault it is the loop's, and a fault touches what it strikes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit_cases import bench_of, places, small

from treejax.audit.faults import REGISTRY
from treejax.audit.faults.anyone import AnyOf
from treejax.audit.intake import engine_of
from treejax.audit.step import Subject, cycle, never
from treejax.policies import make_policy
from treejax.sampling import Sampling
from treejax.steps.rules import REGISTRY as RULES
from treejax.steps.together import Carry, step

DRAWS = Sampling(temperature=1.0).prepared(small().config.vocab_size)
EVERY = tuple(fault for fault in REGISTRY.values() if not fault.drafted)


def one_step(bench, subject, engine, strike, index):
    config, params = bench.model.config, bench.model.params
    how = bench.weights, engine, bench.keys, DRAWS, strike, jnp.int32(index)
    return cycle(config, subject, params, *how)


def same(a, b, row=None):
    """Names of the leaves of two states that differ, of one sequence or of all."""
    differ = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(a):
        other = dict(jax.tree_util.tree_leaves_with_path(b))[path]
        mine, theirs = np.asarray(leaf), np.asarray(other)
        if row is not None:
            axis = 0 if mine.ndim == 1 else 1
            mine, theirs = mine.take(row, axis), theirs.take(row, axis)
        if mine.tobytes() != theirs.tobytes():
            differ.append(jax.tree_util.keystr(path))
    return differ


def test_a_step_without_a_fault_is_the_loops_own():
    bench = bench_of("scripted")
    subject = Subject(make_policy("replay", "xla"), bench.drafter, RULES["match"])
    engine = engine_of(subject, bench.start, bench.plain.tokens[:, 0])
    config, params, batch = bench.model.config, bench.model.params, bench.batch
    carry = jax.tree.map(jnp.copy, Carry(engine.state, engine.memory, engine.pending))
    limit, quiet = jnp.full(batch, bench.drafter.max_depth, jnp.int32), jnp.bool_(False)
    for t in range(3):
        engine, shown = one_step(bench, subject, engine, never(batch), t)
        carry, emission = step(
            *(config, bench.drafter, subject.rule, params, bench.weights, carry, limit),
            *(bench.keys, DRAWS, quiet),
        )
        assert not same(engine.state, carry.state)
        np.testing.assert_array_equal(engine.pending, carry.pending)
        np.testing.assert_array_equal(shown.tokens, emission.tokens)
        np.testing.assert_array_equal(shown.count, emission.count)
        np.testing.assert_array_equal(shown.count, bench.course.lengths[t])


@pytest.mark.parametrize("name", [fault.name for fault in EVERY])
def test_a_fault_leaves_other_sequences_bitwise_alone_and_changes_its_own(name):
    """One program holds all faults; one sequence in two is struck."""
    bench, policy = bench_of("scripted"), make_policy("ring", "xla")
    fault, together = REGISTRY[name], AnyOf("faults", faults=EVERY)
    subject = Subject(policy, bench.drafter, RULES["match"], together)
    half = np.arange(bench.batch) % 2 == 0
    strike = places(fault, policy, bench, half)
    calm = together.strike(fault, never(bench.batch))
    engine = right = engine_of(subject, bench.start, bench.plain.tokens[:, 0])
    strike = together.strike(fault, strike)
    struck, touched = np.asarray(strike.cycle), np.zeros(bench.batch, bool)
    for t in range(bench.steps):
        engine, shown = one_step(bench, subject, engine, strike, t)
        right, expected = one_step(bench, subject, right, calm, t)
        for b in range(bench.batch):
            rows = np.asarray(shown.logits)[b], np.asarray(expected.logits)[b]
            clean = not same(engine.state, right.state, b) and np.array_equal(*rows)
            if struck[b] < 0 or t < struck[b]:
                assert clean, (b, t)
            touched[b] |= not clean
    assert (touched == (struck >= 0)).all()
    assert touched.sum() >= 2
