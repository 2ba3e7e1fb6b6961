"""Planted faults by hand: what they refuse, where they show, and which entries they touch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit_cases import bench_of

from treejax.audit import detection
from treejax.audit.detection.strikes import draw_strikes, had_effect
from treejax.audit.detection.toy import CONFIG
from treejax.audit.faults import DEFERRED, REGISTRY, Course, Hit
from treejax.audit.faults.base import nth, struck
from treejax.audit.faults.carries import decayed, graft
from treejax.audit.faults.recurrent import narrowed
from treejax.audit.faults.ring import ring_course
from treejax.audit.step import Subject
from treejax.drafters import MTP
from treejax.policies import REGISTRY as POLICIES
from treejax.policies import make_policy
from treejax.policies.ring import Ring
from treejax.state import init_state
from treejax.steps.rules import REGISTRY as RULES
from treejax.steps.select import Choice


def hit(now, layer=0, head=0, row=0):
    """Strikes at one place; ``now`` says in which sequences."""
    batch = len(now)
    nowhere = jnp.zeros(batch, jnp.int32)
    before = Choice(nowhere[:, None], nowhere, nowhere)
    return Hit(jnp.array(now), nowhere + layer, nowhere + head, nowhere + row, before)


def course(parents, paths, tokens=None, tails=None):
    """A course of one sequence from its steps' parents and paths."""
    capacity, longest = max(map(len, parents)), max(map(len, paths))
    made = np.full((len(parents), 1, capacity), -1)
    walked = np.full((len(paths), 1, longest), -1)
    depths = np.zeros_like(made)
    for t, (above, path) in enumerate(zip(parents, paths, strict=True)):
        made[t, 0, : len(above)], walked[t, 0, : len(path)] = above, path
        for row, parent in enumerate(above):
            depths[t, 0, row] = 0 if parent < 0 else depths[t, 0, parent] + 1
    return Course(
        parents=made,
        depths=depths,
        sizes=np.array([[len(above)] for above in parents]),
        tokens=np.arange(made.size).reshape(made.shape) if tokens is None else tokens,
        tails=np.full((len(parents), 1, 3), 99) if tails is None else tails,
        paths=walked,
        lengths=(walked >= 0).sum(axis=2),
    )


def randomly(carry, seed):
    """A carry of random float32 numbers; drawn by NumPy, so that nothing is compiled."""
    random = np.random.default_rng(seed)

    def fill(x):
        if x.dtype != jnp.float32:
            return x
        return jnp.asarray(random.standard_normal(x.shape), jnp.float32)

    return jax.tree.map(fill, carry)


def test_names_are_the_registrys_and_all_say_what_goes_wrong():
    assert all(fault.name == name and fault.says for name, fault in REGISTRY.items())
    assert all(set(fault.policies or ()) <= set(POLICIES) for fault in REGISTRY.values())


@pytest.mark.parametrize("name", ["ring cursor twice", "ring out of step"])
def test_faults_of_the_ring_refuse_other_policies_in_one_line(name):
    fault, drafter = REGISTRY[name], MTP("chain2")
    for policy in POLICIES:
        if policy in DEFERRED:
            fault.check(CONFIG, make_policy(policy, "xla"), drafter)
            continue
        with pytest.raises(ValueError, match=f"{name}.*{policy}.*ring, fused") as error:
            fault.check(CONFIG, make_policy(policy, "xla"), drafter)
        assert "\n" not in str(error.value)


def test_faults_of_the_head_refuse_a_drafter_without_one():
    scripted = bench_of("scripted").drafter
    with pytest.raises(ValueError, match="drafter 'scripted' keeps none"):
        REGISTRY["drafter one row off"].check(CONFIG, make_policy("wy", "xla"), scripted)


def test_a_fault_without_layers_to_strike_is_refused():
    only = dataclasses.replace(CONFIG, layer_types=("linear_attention",))
    with pytest.raises(ValueError, match="attention layers and the model has none"):
        REGISTRY["KV remap"].check(only, make_policy("wy", "xla"), MTP("chain2"))


def test_a_fault_that_no_asked_policy_can_suffer_is_refused():
    settings = detection.Settings(policies=("wy",), on_toy=True)
    with pytest.raises(ValueError, match="can strike none of the policies wy, expected of: ring"):
        detection.run(None, ["ring out of step"], settings)
    with pytest.raises(ValueError, match="fault 'rust' is unknown, expected of: stale root"):
        detection.run(None, ["rust"], settings)


def test_nth_counts_round():
    mask = jnp.array([[False, True, False, True], [False, False, False, False]])
    for number, place in [(0, 1), (1, 3), (2, 1), (7, 3)]:
        assert nth(mask, jnp.full(2, number)).tolist() == [place, 0]


def test_one_layer_and_head_of_one_sequence_is_struck_and_large_numbers_wrap_round():
    marked = np.asarray(struck(hit([True, False], layer=7, head=9), 3, 4))
    assert np.argwhere(marked).tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("policy", ["wy", "ring"])
def test_a_graft_changes_one_layer_and_head_of_what_the_policy_reads(policy):
    state = init_state(CONFIG, 2, 8, policy=policy)
    made = [randomly(state.recurrent, seed) for seed in (1, 2)]
    if policy == "ring":
        made = [carry.replace(count=jnp.full((1, 2), 3, jnp.int32)) for carry in made]
    read = state.policy.read
    mixed = np.asarray(read(graft(*made, hit([False, True], layer=1, head=2))))
    right, wrong = (np.asarray(read(carry)) for carry in made)
    heads = [2] if policy == "wy" else [0, 1]  # of the third key head of two: the first
    expected = right.copy()
    expected[1, 1, heads] = wrong[1, 1, heads]
    np.testing.assert_array_equal(mixed, expected)


def test_a_decay_after_a_rings_rows_is_one_of_the_state():
    policy = Ring(length=2, rows=8)
    state = init_state(CONFIG, 3, 8, policy=policy)
    carry = randomly(state.recurrent, 3)
    carry = carry.replace(count=jnp.array([[0, 3, 8]], jnp.int32))
    logs = -jnp.asarray(np.random.default_rng(0).random(carry.R.shape[:3]), jnp.float32)
    expected = policy.read(carry) * jnp.exp(logs)[..., None, None]
    np.testing.assert_allclose(policy.read(decayed(carry, logs)), expected, rtol=1e-5, atol=1e-5)


def test_fc07_the_rounded_gate_rounds_as_a_bfloat16_round_trip_does():
    """FC-07: 0.3769531 in place of sigmoid(-0.5) = 0.3775407."""
    assert float(narrowed(jax.nn.sigmoid(jnp.float32(-0.5)))) == 0.376953125
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    round_trip = values.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(narrowed)(values), round_trip)


def test_what_stays_in_a_ring_and_when_it_is_written():
    """Commits of 2, 1, 3 and 1 rows; two commits fill a ring of length 2."""
    steps = course([[-1, 0, 1]] * 4, [[0, 1], [0], [0, 1, 2], [0]])
    kept, due, filled = (each[:, 0].tolist() for each in ring_course(Ring(length=2), steps))
    assert kept == [0, 2, 0, 3]
    assert due == [False, False, True, False]
    assert filled == [0, 2, 3, 3]
    shows = REGISTRY["ring cursor twice"].shows(Ring(length=2), steps)[:, 0]
    assert not shows.any()  # no slot beyond the newest row ever held one
    shows = REGISTRY["ring out of step"].shows(Ring(length=2), steps)[:, 0]
    assert shows.tolist() == [False, False, True, False]


def test_where_faults_show():
    """FC-04's tree: the path 0, 2, 5 is scattered, the path 0, 1 is not; node 5 has a sibling."""
    tree = [-1, 0, 0, 1, 2, 2]
    steps = course([tree, tree, tree, [-1, 0]], [[0, 2, 5], [0, 1], [0], [0, 1]])

    def shows(name, policy="replay"):
        return REGISTRY[name].shows(make_policy(policy, "xla"), steps)[:, 0].tolist()

    assert shows("KV remap") == [True, False, False, False]
    assert shows("conv in storage order") == [True, False, False, False]
    assert shows("sibling published") == [True, True, False, False]
    assert shows("filler decays") == [False, False, False, True]
    assert shows("bonus lost") == [True, False, False, True]
    assert shows("commit by previous count") == [False, True, True, True]
    # Rows beyond a ring's count are never read: only a count that is too small can show.
    assert shows("commit by previous count", "ring") == [False, False, False, True]
    assert shows("packed parent") == [True, True, True, False]


def test_a_history_that_the_wrong_window_leaves_right_is_not_struck():
    """A text of one token alone: the window holds the same inputs wherever it lies."""
    loop = course([[-1, 0, 0]] * 2, [[0, 2], [0]])
    same = np.full_like(loop.tokens, 7)
    steps = course([[-1, 0, 0]] * 2, [[0, 2], [0]], same, np.full((2, 1, 3), 7))
    for name in ("conv gather skipped", "conv in storage order", "conv by previous count"):
        assert not REGISTRY[name].shows(make_policy("wy", "xla"), steps).any(), name
        assert REGISTRY[name].shows(make_policy("wy", "xla"), loop).any(), name


def test_strikes_are_reproducible_and_where_the_fault_shows():
    bench, policy = bench_of("scripted"), make_policy("ring", "xla")
    among = np.arange(bench.batch) != 1
    for fault in REGISTRY.values():
        strike = draw_strikes(fault, policy, bench, (5,), among)
        cycle = np.asarray(strike.cycle)
        assert (cycle >= 0).sum() >= 3 and cycle[1] == -1
        shown = fault.shows(policy, bench.course)
        assert all(shown[t, b] for b, t in enumerate(cycle) if t >= 0)
        again = draw_strikes(fault, policy, bench, (5,), among)
        assert jax.tree.all(jax.tree.map(np.array_equal, strike, again))


def test_a_strike_that_changes_nothing_had_no_effect():
    """A history kept as it was has an effect; the same strike in no step of the run has none."""
    bench, policy = bench_of("scripted"), make_policy("replay", "xla")
    fault = REGISTRY["conv gather skipped"]
    subject = Subject(policy, bench.drafter, RULES["match"], fault)
    strike = draw_strikes(fault, policy, bench, (0,), np.ones(bench.batch, bool))
    late = np.arange(bench.batch) == 2
    strike = strike.replace(cycle=np.where(late, bench.steps, strike.cycle).astype(np.int32))
    everyone = np.ones(bench.batch, bool)
    assert (had_effect(bench, subject, strike, everyone) == ~late).all()
    assert had_effect(bench, subject, strike, ~late).all()
