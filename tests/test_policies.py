"""Every policy of the registry against the float64 oracle, over random trees.

Two layers, a batch of three different trees and a capacity above every size; two steps in a row, so
that a policy which defers work must still get the second step right. The last sequence publishes
nothing in the first step and must keep its bytes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_trees
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import DEFERRED

from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.policies import REGISTRY, WY, Path, Replay, make_policy
from treejax.policies.fused import Fused
from treejax.policies.neumann import Neumann
from treejax.policies.ring import Ring
from treejax.policies.solve_replay import SolveReplay
from treejax.tree import Tree, describe

LAYERS, BATCH, CAPACITY = 2, 3, 32
DK, DV = 8, 6

# Relative RMS in float32: the design's contract for published states, and as much for outputs,
# which are products of states with unit vectors. Over 1,500 random trees the worst state was at
# 6.5e-7 and the worst output at 3.6e-7, both of them wy's.
TOLERANCE = 1e-5

NAMED = list(REGISTRY.values())
LANES = [functools.partial(Replay, lanes=1), functools.partial(Replay, lanes=32)]
# Trees of 32 rows may be deeper than the default buffers: these two defer every write.
BUFFERED = [functools.partial(Fused, rows=32), functools.partial(Ring, length=3, rows=70)]
MORE = LANES + BUFFERED
POLICIES = NAMED + MORE
SHAPES = [(1, 3), (2, 2), (2, 4), (1, 4)]  # key and value heads: ratios 3, 1, 2 and 4
CASES = [(make, heads) for make in NAMED for heads in SHAPES] + [(make, (2, 4)) for make in MORE]


def name_of(make):
    policy = make()
    settings = {k: v for k, v in dataclasses.asdict(policy).items() if k != "implementation"}
    return "-".join([policy.name, *(f"{k}{v}" for k, v in settings.items())])


def relative_rms(actual, expected):
    difference = np.asarray(actual, np.float64) - expected
    return np.sqrt(np.mean(difference**2) / np.mean(np.square(expected)))


@functools.partial(jax.jit, static_argnames="policy")
def step(policy, carry, operands, tree, path):
    """Scan every layer and commit one path, as verify and publish do it."""
    plan = policy.plan(describe(tree))
    outputs, scratch = [], []
    for i in range(LAYERS):
        out, record, carry = policy.scan(carry, i, operands[i], plan)
        outputs.append(out)
        scratch.append(record)
    return jnp.stack(outputs), policy.commit(carry, scratch, path), scratch


def random_operands(rng, key_heads, value_heads, sizes):
    """Overlapping keys, decays from none to strong; rows past a tree's size hold other numbers."""
    shape = (LAYERS, BATCH, CAPACITY)
    shared = rng.normal(size=(LAYERS, BATCH, 1, key_heads, DK))
    g = -np.exp(rng.uniform(-6, 1, (*shape, value_heads)))
    made = dict(
        q=oracle.unit(rng.normal(size=(*shape, key_heads, DK))) * DK**-0.5,
        k=oracle.unit(shared + rng.normal(size=(*shape, key_heads, DK))),
        v=rng.normal(size=(*shape, value_heads, DV)),
        g=g,
        beta=rng.uniform(0, 1, (*shape, value_heads)),
    )
    made = {name: array.astype(np.float32) for name, array in made.items()}
    made["alpha"] = np.exp(made["g"])
    for b, size in enumerate(sizes):
        for name in ("q", "k", "v"):
            made[name][:, b, size:] *= 100.0
    return made


def pack_path(parents, last):
    nodes = np.full(CAPACITY, -1, np.int32)
    path = [] if last is None else oracle.path_to(parents, last)
    nodes[: len(path)] = path
    return nodes, len(path)


def check_step(policy, carry, R, operands, trees, accepted):
    """One step of ``policy`` and of the oracle; returns the new carry and the oracle's states."""
    tree = Tree.from_parents([range(len(p)) for p in trees], trees, capacity=CAPACITY)
    nodes, lengths = zip(*map(pack_path, trees, accepted), strict=True)
    path = Path(nodes=jnp.array(nodes), length=jnp.array(lengths, jnp.int32))
    by_layer = [
        Operands(**{name: jnp.asarray(array[i]) for name, array in operands.items()})
        for i in range(LAYERS)
    ]
    outputs, new_carry, _ = step(policy, carry, by_layer, tree, path)
    published, after = np.asarray(policy.read(new_carry)), R.copy()
    before = np.asarray(policy.read(carry))
    for i in range(LAYERS):
        for b, parents in enumerate(trees):
            rows = {name: operands[name][i, b, : len(parents)] for name in "q k v g beta".split()}
            expected, states = oracle.delta_rule_tree(R[i, b], parents, **rows)
            assert relative_rms(outputs[i, b, : len(parents)], expected) < TOLERANCE
            if accepted[b] is None:
                if policy.name in DEFERRED:
                    assert relative_rms(published[i, b], before[i, b]) < 1e-6
                else:
                    np.testing.assert_array_equal(published[i, b], before[i, b])
            else:
                after[i, b] = states[accepted[b]]
                assert relative_rms(published[i, b], after[i, b]) < TOLERANCE
    return new_carry, after


@pytest.mark.parametrize(
    "make, heads", CASES, ids=[f"{name_of(make)}-Hk{h[0]}-Hv{h[1]}" for make, h in CASES]
)
@settings(max_examples=12)
@given(
    st.lists(random_trees.parent_lists(31), min_size=2 * BATCH, max_size=2 * BATCH),
    st.integers(0, 2**32 - 1),
)
def test_outputs_and_published_states(make, heads, trees, seed):
    policy, rng = make(), np.random.default_rng(seed)
    R = rng.normal(size=(LAYERS, BATCH, heads[1], DV, DK)).astype(np.float32)
    carry = policy.init(jnp.asarray(R), heads[0])
    R = R.astype(np.float64)
    for first, silent in ((0, True), (BATCH, False)):
        now = trees[first : first + BATCH]
        operands = random_operands(rng, *heads, [len(p) for p in now])
        accepted = [int(rng.integers(len(p))) for p in now]
        if silent:
            accepted[-1] = None
        carry, R = check_step(policy, carry, R, operands, now, accepted)


@pytest.mark.parametrize("make", POLICIES, ids=name_of)
def test_hydra27_at_every_frontier(make):
    """Each of the 28 nodes as the accepted one, in the published packing and children first."""
    policy, rng = make(), np.random.default_rng(11)
    hydra = random_trees.HYDRA27
    trees = [hydra, random_trees.children_first(hydra)[0], random_trees.shuffle(hydra, rng)[0]]
    R = rng.normal(size=(LAYERS, BATCH, 4, DV, DK)).astype(np.float32)
    carry = policy.init(jnp.asarray(R), 2)
    operands = random_operands(rng, 2, 4, [28, 28, 28])
    for last in range(28):
        check_step(policy, carry, R.astype(np.float64), operands, trees, [last] * BATCH)


@pytest.mark.parametrize("make", POLICIES, ids=name_of)
def test_fc09_extreme_gates_and_degenerate_keys_in_a_tree(make):
    """FC-09: chains of 31 that decay to exp(-930), write 31 equal keys in full, hold zero keys."""
    policy, rng = make(), np.random.default_rng(12)
    trees = [random_trees.chain(31)] * BATCH
    R = rng.normal(size=(LAYERS, BATCH, 4, DV, DK)).astype(np.float32)
    operands = random_operands(rng, 2, 4, [31] * BATCH)
    operands["g"][:, 0] = -30.0
    operands["k"][:, 1] = operands["k"][:, 1, :1]
    operands["beta"][:, 1], operands["g"][:, 1] = 1.0, -1e-4
    operands["k"][:, 2] = 0.0
    operands["alpha"] = np.exp(operands["g"])
    carry = policy.init(jnp.asarray(R), 2)
    check_step(policy, carry, R.astype(np.float64), operands, trees, [30, 30, 30])


@pytest.mark.parametrize("make", POLICIES, ids=name_of)
def test_buffers_are_the_bytes_that_scan_returns(make):
    """All buffers but those that live only inside the scan are scratch, byte for byte."""
    policy = make()
    config = ModelConfig(
        family="qwen3_5",
        vocab_size=8,
        hidden_size=8,
        layer_types=("linear_attention",) * LAYERS,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=DK,
        linear_value_head_dim=DV,
    )
    rng = np.random.default_rng(0)
    operands = random_operands(rng, 2, 4, [1] * BATCH)
    carry = policy.init(jnp.zeros((LAYERS, BATCH, 4, DV, DK)), 2)
    tree = Tree.from_parents([[0]] * BATCH, [[-1]] * BATCH, capacity=CAPACITY)
    nodes, length = pack_path([-1], 0)
    path = Path(jnp.tile(nodes, (BATCH, 1)), jnp.full(BATCH, length, jnp.int32))
    layers = [
        Operands(**{n: jnp.asarray(a[i]) for n, a in operands.items()}) for i in range(LAYERS)
    ]
    scratch = jax.eval_shape(functools.partial(step, policy), carry, layers, tree, path)[2]
    buffers = policy.buffers(config, CAPACITY, BATCH)
    lasting = sum(size for name, size in buffers.items() if name != "cut_states")
    assert lasting == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(scratch))


@pytest.mark.parametrize("solving", [WY, SolveReplay, Neumann])
def test_solving_refuses_a_precision_that_nobody_has(solving):
    with pytest.raises(ValueError, match="'fp8' is unknown, expected one of: ieee, bf16x3, tf32"):
        solving(precision="fp8")


@pytest.mark.parametrize("solving", [WY, Neumann])
def test_products_are_float32_unless_on_a_gpu(solving):
    """XLA's faster products exist on GPUs alone: asked for elsewhere, one line says so."""
    policy = solving(precision="bf16x3")
    operands = Operands(*(jnp.zeros((1, 1, 1, 8)),) * 3, *(jnp.zeros((1, 1, 1)),) * 3)
    plan = policy.plan(describe(Tree.from_parents([0], [-1])))
    with pytest.raises(ValueError, match="'bf16x3' needs a GPU, the device is a cpu: use 'ieee'"):
        policy.scan(jnp.zeros((1, 1, 1, 8, 8)), 0, operands, plan)


def test_make_policy_resolves_the_implementation_once():
    """A name follows the call, an object its own field; what cannot run is one line."""
    assert make_policy("wy", "interpret") == WY(implementation="interpret")
    assert make_policy(Replay(lanes=2, implementation="auto")) == Replay(lanes=2)
    assert make_policy(WY(implementation="mosaic_gpu")).implementation == "mosaic_gpu"
    assert make_policy(WY(implementation="auto"), "interpret") == WY(implementation="interpret")
    with pytest.raises(ValueError, match="'mosaic_gpu': the kernels need a Hopper GPU"):
        make_policy("wy", "mosaic_gpu")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        make_policy("wy", "cuda")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        make_policy(WY(implementation="cuda"))
    with pytest.raises(ValueError, match="is 'xla' and 'interpret' was asked for"):
        make_policy(WY(), "interpret")
    with pytest.raises(ValueError, match="interpret': too wide; use"):
        make_policy("wy", "interpret", "too wide")


def test_make_policy_takes_a_name_or_an_object():
    assert make_policy("replay") == Replay()
    assert make_policy(Replay(lanes=2)) is not None and make_policy(Replay(lanes=2)).lanes == 2
    with pytest.raises(ValueError, match="object is no policy: it lacks name, implem"):
        make_policy(object())
    with pytest.raises(ValueError, match=r"WY \(a class\) is no policy: it must be an object"):
        make_policy(WY)
    with pytest.raises(ValueError, match="unknown policy 'rewind', expected one of: snapshot"):
        make_policy("rewind")
