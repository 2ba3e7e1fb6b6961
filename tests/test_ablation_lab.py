"""The laboratory: trees, operands, programs, gate and times, on a CPU with plain JAX."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from lab_cases import FAULTS, SIZES

from pallas_kernels.bench.timing import Timed, choose_calls
from treejax.ablation.base import Cell
from treejax.ablation.compilations import count_compilations
from treejax.ablation.lab import (
    GIB,
    Bench,
    compile_together,
    device_bytes,
    does_not_fit,
    frontiers,
    make_step,
    needed_bytes,
    sequences_that_fit,
)
from treejax.ablation.lab_arms import check_arms, make_arm
from treejax.ablation.lab_gate import Truth, Verdict, check
from treejax.ablation.lab_operands import Sizes, draw, rows_of
from treejax.ablation.lab_sweep import compilations_over_trees
from treejax.ablation.lab_timing import Cycle, measure, most_calls, period, time_apart, time_step
from treejax.ablation.lab_trees import Shape, full_tree, make_shape, pack
from treejax.policies import REGISTRY, Ring

CAPACITY, DEPTH, BATCH = 16, 7, 2
TREE = make_shape("best", 15, DEPTH)


@functools.cache
def drawn(kind="realistic"):
    return draw(Sizes(**SIZES, operands=kind), BATCH, CAPACITY, 0, "xla")


@functools.cache
def steps():
    return frontiers(TREE, BATCH, CAPACITY, DEPTH)


@functools.cache
def truth():
    return Truth(drawn(), [steps()[i] for i in (0, 5, 9, 14, 2)])


@functools.cache
def bench(arm):
    """Compiled: verify and publish apart for ring alone, since each program takes a second."""
    made = Bench(arm, make_arm(arm, "xla", "float32"), drawn(), steps()[0])
    assert compile_together([made], arm == "ring", lambda name: None) == {}
    return made


@pytest.mark.parametrize("arm", [*REGISTRY, "ring:length=2,rows=9"])
def test_every_policy_passes_the_gate_in_one_program(arm):
    verdict = check(bench(arm), truth(), together=True)
    assert verdict.green, verdict.problem
    assert verdict.outputs.rms < 1e-6 and verdict.states.rms < 1e-6
    assert 0 < verdict.deepest_state < 1e-5 and 0 < verdict.deepest_output < 1e-5


def test_verify_and_publish_apart_pass_too():
    assert check(bench("ring"), truth(), together=False).green


def test_the_kernels_pass_the_same_gate():
    """Pallas' GPU interpreter, bfloat16 operands and keys, rows sorted inside; two steps."""
    sizes = Sizes(**SIZES | {"layers": 1, "dtype": "bfloat16"})
    made = draw(sizes, 1, 8, 0, "interpret")
    shape = make_shape("2", 0, 1)
    both = [make_step(shape, path, 1, 8, 1) for path in ([0, 2], [0])]
    policy = make_arm("ring:rows=16", "interpret", "bfloat16")
    verdict = check(Bench("ring", policy, made, both[0]), Truth(made, both), together=True)
    assert verdict.green, verdict.problem


@pytest.mark.parametrize("fault", ["sibling", "swapped"])
def test_a_wrong_policy_is_red(fault):
    made = Bench(fault, FAULTS[fault](), drawn(), steps()[0])
    assert compile_together([made], False, lambda name: None) == {}
    verdict = check(made, truth(), together=True)
    assert not verdict.green and "from float64, expected 1e-05" in str(verdict.problem)


def test_a_policy_that_fails_costs_nobody_else_a_row():
    broken = Bench("broken", FAULTS["broken"](), drawn(), steps()[0])
    seen = []
    problems = compile_together([broken, bench("wy")], False, seen.append)
    assert problems == {"broken": "NotImplementedError: planted"} and seen == ["broken", "wy"]


def test_truth_is_the_oracles():
    """NumPy against NumPy, written twice: outputs of the tree and the state of a path."""
    layer, row = drawn().layers[1], BATCH - 1
    q, k, v, g, beta = rows_of(layer, row, TREE.size, [0])
    R0 = np.asarray(drawn().R[1, row], np.float64)
    outputs, states = oracle.delta_rule_tree(R0, list(TREE.parents), q, k, v, g, beta)
    first_outputs, first_states = truth().expected[0]
    np.testing.assert_allclose(first_outputs[-1], outputs, rtol=1e-12, atol=1e-14)
    last = steps()[0].published[-1]
    np.testing.assert_allclose(first_states[-1], states[last], rtol=1e-12, atol=1e-14)


def test_changing_trees_compile_nothing_and_the_counter_would_notice():
    others = [
        make_step(shape, shape.deepest, BATCH, CAPACITY, DEPTH)
        for shape in (make_shape("random", size, DEPTH, size) for size in (1, 7, 16))
    ]
    assert compilations_over_trees(bench("wy"), [*steps(), *others]) == 0
    deeper = make_step(TREE, TREE.deepest, BATCH, CAPACITY, DEPTH + 1)  # a static bound
    assert compilations_over_trees(bench("wy"), [steps()[0], deeper]) >= 1
    with count_compilations() as seen:
        pass
    jax.jit(lambda x: x * 3.0)(jnp.ones(3))  # after the block: nobody listens any more
    assert not seen


def test_times_come_from_the_cycle_of_frontiers():
    made = bench("ring")
    made.reset()
    entries = [time_step(made, steps(), 10**9), *time_apart(made, steps(), 10**9)]
    times = measure(entries, None, 3, 2, lambda done: None)
    assert set(times) == {"ring step", "ring verify", "ring publish"}
    for found in times.values():
        assert 0 < found.low <= found.median <= found.high and found.rounds == 2
    cycle = Cycle(steps())
    assert [cycle.next()[0] for _ in range(16)] == [*range(15), 0]


@pytest.mark.parametrize("memory", [10**9, 1])
def test_a_sample_of_a_ring_holds_whole_periods(memory):
    """Also where memory holds one call at a time; then the device catches up in between."""
    made = Bench("three", make_arm("ring:length=3", "xla", "float32"), drawn(), steps()[0])
    calls = []
    waits = []

    class Fake:
        name, policy, drawn, carry = made.name, made.policy, made.drawn, None

        def step(self, step):
            calls.append(step)

        def wait(self):
            waits.append(len(calls))

        def release(self):
            raise AssertionError("nothing failed")

    timed = time_step(Fake(), steps(), memory)
    assert timed.multiple == period(made.policy) == 3
    choose_calls(timed, None)
    assert timed.calls % 3 == 0 and timed.calls >= 3
    calls.clear()
    waits.clear()
    timed.sample()
    assert len(calls) == timed.calls
    assert waits == ([1, 2] if memory == 1 else [])
    assert [period(policy()) for policy in REGISTRY.values()].count(1) == len(REGISTRY) - 1


def test_a_lack_of_memory_is_said_and_anything_else_is_raised():
    text = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"

    def fail(calls):
        raise error

    good = Timed("good", lambda calls: lambda: time.sleep(1e-4), most_calls=2)
    error = jax.errors.JaxRuntimeError(text)
    times = measure([Timed("bad", fail), good], None, 1, 2, lambda done: None)
    assert times["bad"] == f"JaxRuntimeError: {text}" and times["good"].rounds == 2
    error = ValueError("planted")
    with pytest.raises(ValueError, match="planted"):
        measure([Timed("bad", fail), good], None, 1, 2, lambda done: None)


@pytest.mark.parametrize(
    ("error", "gate"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "not run"),
        (ValueError("width 256 needs 300000 bytes of shared memory, 232448 are there"), "not run"),
        (ValueError("planted"), "red"),
    ],
)
def test_what_lacks_memory_is_not_red(error, gate, monkeypatch):
    made = Bench("wy", make_arm("wy", "xla", "float32"), drawn(), steps()[0])

    def fail(*arguments):
        raise error

    monkeypatch.setattr(made, "reset", fail)
    verdict = check(made, truth(), together=True)
    monkeypatch.setattr(made, "compile_jobs", fail)
    problems = compile_together([made], False, lambda name: None)
    for found in (verdict, Verdict.failed(problems["wy"])):
        row = found.row(Cell("wy", {}, 0))
        assert (row["gate"], row["problem"]) == (gate, f"{type(error).__name__}: {error}")


def test_deferred_writes_happen_as_often_apart_as_together():
    """Verify is timed at the marks of a real cycle, in which a ring of two is due at times."""
    made = bench("ring")
    made.reset()
    seen = []
    for _ in range(2):
        seen = []
        for step in steps():
            verified = made.verify(step)
            seen.append(bool(np.asarray(made.programs.join(*verified.carry).written).all()))
            made.publish(verified.scratch, step)
    assert isinstance(made.policy, Ring)
    assert 15 // made.policy.length - 1 <= sum(seen) <= 15 // made.policy.length + 1


def test_calls_in_a_row_are_bounded_by_memory():
    snapshot = bench("snapshot")
    buffers = sum(snapshot.policy.buffers(drawn().sizes.config, CAPACITY, BATCH).values())
    assert most_calls(snapshot, 1) == 1
    assert most_calls(snapshot, 10 * buffers) < 10


def test_layers_differ_and_parts_are_the_whole():
    whole = draw(Sizes(**SIZES | {"layers": 3, "value_heads": 4, "key_heads": 2}), 2, 16, 1, "xla")
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(whole.layers[i].v, whole.layers[j].v)
        assert not np.array_equal(whole.R[i], whole.R[j])
    part = whole.cut(1, 8)
    assert part.R.shape[:2] == (3, 1) and part.layers[0].k.shape[:2] == (1, 8)
    np.testing.assert_array_equal(part.layers[2].q, whole.layers[2].q[:1, :8])
    assert whole.cut(2, 16) is whole


def test_plain_jax_holds_bfloat16_values_as_float32():
    sizes = Sizes(**SIZES | {"dtype": "bfloat16"})
    for implementation, held in (("xla", "float32"), ("interpret", "bfloat16")):
        made = draw(sizes, 1, 8, 0, implementation).layers[0].v
        assert made.dtype == held
        np.testing.assert_array_equal(made, made.astype("bfloat16").astype(held))
    assert sizes.item_bytes("xla") == 4 and sizes.item_bytes("mosaic_gpu") == 2


def test_memory_of_a_27b_model():
    """LumoTree's figures: 4,032 MiB of snapshots and more; replay far below 132.5 MiB."""
    sizes, MIB = Sizes(), 2**20
    snapshot, replay = (make_arm(arm, "interpret", "bfloat16") for arm in ("snapshot", "replay"))
    assert sizes.state_bytes == 3 * MIB
    assert needed_bytes(snapshot, sizes, 1, 32) > 4032 * MIB
    available = 100 * GIB
    assert does_not_fit(needed_bytes(snapshot, sizes, 1, 32), available) is None
    problem = does_not_fit(needed_bytes(snapshot, sizes, 32, 128), available)
    assert problem is not None and problem.startswith("does not fit: needs 593.4 GiB")
    assert problem.endswith("GiB, has 100.0")
    fitting = [sequences_that_fit(policy, sizes, 32, available) for policy in (snapshot, replay)]
    assert fitting[0] < 25 and fitting[1] > 300
    assert device_bytes(2.0) == 2 * GIB and does_not_fit(5, None) is None


def test_forms_of_trees():
    hydra = make_shape("hydra27", 0, 11)
    assert (hydra.size, hydra.max_depth, hydra.leaves, hydra.branching) == (28, 11, 11, 5)
    for form, size in (("best", 28), ("caterpillar3", 64), ("kary3", 40), ("random", 128)):
        shape = make_shape(form, size, 31)
        assert shape.size == size and list(shape.depths) == sorted(shape.depths)
    assert [full_tree([k] * 3).size for k in (1, 2, 3)] == [4, 15, 40]
    assert make_shape("2,2,2,2,2,2", 0, 7).size == 127
    assert make_shape("chain", 8, 31).max_depth == 7 and make_shape("chain", 64, 31).size == 32
    assert make_shape("star", 5, 1).parents == (-1, 0, 0, 0, 0)
    assert make_shape("random", 16, 7, 1) != make_shape("random", 16, 7, 2)
    assert pack("x", [-1, 0, 1, 0]).parents == (-1, 0, 0, 1)


def test_mistakes_are_one_line():
    with pytest.raises(ValueError, match="tree 'bush' is unknown, expected one of: hydra27"):
        make_shape("bush", 8, 7)
    with pytest.raises(ValueError, match="tree hydra27 has depth 11, above the bound 7"):
        make_shape("hydra27", 28, 7)
    with pytest.raises(ValueError, match="tree odd is not packed by depth"):
        make_step(Shape("odd", (-1, 0, 1, 0)), [0], 1, 8, 7)
    with pytest.raises(ValueError, match="a path of 3 rows exceeds the bound of 2"):
        make_step(full_tree([1, 1]), [0, 1, 2], 1, 8, 1)
    with pytest.raises(ValueError, match="setting 'speed=9' is unknown, expected key=value of: pr"):
        make_arm("wy:speed=9", "xla", "float32")
    with pytest.raises(ValueError, match="length is 'two', expected a number"):
        make_arm("ring:length=two", "xla", "float32")
    with pytest.raises(ValueError, match="x.toml: arm 'rewind' names policy 'rewind', expected"):
        check_arms(("wy", "rewind"), "x.toml")
    with pytest.raises(ValueError, match="dtype is 'float16', expected one of: float32, bfloat16"):
        Sizes(dtype="float16")
    with pytest.raises(ValueError, match="operands 'easy' are unknown"):
        Sizes(operands="easy")


def test_keys_of_a_ring_have_the_operands_dtype():
    assert make_arm("ring", "interpret", "bfloat16").keys == "bfloat16"
    assert make_arm("ring", "xla", "bfloat16").keys == "float32"
    assert make_arm("ring:keys=float32,length=3", "interpret", "bfloat16").length == 3
