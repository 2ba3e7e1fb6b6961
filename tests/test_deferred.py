"""Policies that defer their writes: ring and fused against wy over many commits, and when they
write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_trees
import tiny
from kernel_cases import relative_rms
from oracle import path_to
from stepping import Surfaces, choose, relative

import pallas_kernels.wy_solve
from pallas_kernels.bench.operands import Shape, make_operands
from treejax.delta_rule import Operands
from treejax.model import prefill
from treejax.policies import WY, Path
from treejax.policies.fused import Fused
from treejax.policies.ring import Ring
from treejax.saving import restore_checkpoint, save_checkpoint
from treejax.state import init_state, reset, with_policy
from treejax.steps.publish import publish
from treejax.steps.verify import verify
from treejax.tree import Tree, describe

BATCH, HEADS, DIM, CAPACITY, DEPTH = 2, (1, 2), 8, 8, 4


@functools.partial(jax.jit, static_argnames="policy")
def step(policy, carry, operands, tree, path):
    plan = policy.plan(describe(tree))
    out, scratch, carry = policy.scan(carry, 0, operands, plan)
    return out, policy.commit(carry, (scratch,), path)


def depths(parents):
    return [len(path_to(parents, node)) for node in range(len(parents))]


def draw(rng, in_order=False):
    """A tree a sequence, operands of its rows, and a path to a random node; now and then none.

    in_order: parents come before children, as kernels want their rows.
    """
    parents = [
        random_trees.random_parents(rng, int(rng.integers(1, CAPACITY + 1)), DEPTH)
        for _ in range(BATCH)
    ]
    if in_order:
        parents = [random_trees.permute(p, np.argsort(depths(p), kind="stable")) for p in parents]
    tree = Tree.from_parents(
        [range(len(p)) for p in parents], parents, capacity=CAPACITY, max_depth=DEPTH
    )
    shape = Shape(BATCH, CAPACITY, *HEADS, DIM, DIM)
    made = make_operands(shape, "realistic", int(rng.integers(2**31)))
    rows = [getattr(made, name) for name in ("q", "k", "v", "g", "alpha", "beta")]
    operands = Operands(*(jnp.asarray(x, jnp.float32) for x in rows))
    nodes, length = np.full((BATCH, DEPTH + 1), -1, np.int32), np.zeros(BATCH, np.int32)
    for b, above in enumerate(parents):
        if rng.random() < 0.1:
            continue
        path = path_to(above, int(rng.integers(len(above))))
        nodes[b, : len(path)], length[b] = path, len(path)
    return operands, tree, Path(jnp.asarray(nodes), jnp.asarray(length))


def start(policies, seed=0):
    R = np.random.default_rng(seed).normal(size=(1, BATCH, HEADS[1], DIM, DIM))
    return [policy.init(jnp.asarray(R, jnp.float32), HEADS[0]) for policy in policies]


def test_ring_is_wy_over_two_thousand_commits():
    """Any length, one of them cut short by the ring's rows: states within the design's 1e-5."""
    rings = [
        Ring(length=1, rows=5),
        Ring(length=4, rows=24),
        Ring(length=9, rows=17),
        Fused(rows=5),
    ]
    carries, rng = start([WY(), *rings]), np.random.default_rng(1)
    commits = 0
    while commits < 2000:
        operands, tree, path = draw(rng)
        commits += int((path.length > 0).sum())
        made = [
            step(policy, carry, operands, tree, path)
            for policy, carry in zip([WY(), *rings], carries, strict=True)
        ]
        carries = [carry for _, carry in made]
        if commits % 50 < BATCH or commits >= 2000:
            for policy, (out, carry) in zip(rings, made[1:], strict=True):
                active = np.arange(CAPACITY) < np.asarray(tree.size)[:, None]
                assert relative_rms(out[active], np.asarray(made[0][0], np.float64)[active]) < 1e-5
                R = np.asarray(made[0][1], np.float64)
                assert relative_rms(policy.read(carry), R) < 1e-5


@pytest.mark.parametrize("length", [1, 3])
def test_the_matrix_is_written_every_length_commits(length):
    """In between its bytes stay; each sequence counts its own commits, and one that takes no part
    does not write."""
    policy, rng = Ring(length=length, rows=40), np.random.default_rng(2)
    (carry,), since = start([policy]), np.zeros(BATCH, int)
    for _ in range(30):
        operands, tree, path = draw(rng)
        before, R = np.asarray(carry.R), np.asarray(policy.read(carry))
        _, carry = step(policy, carry, operands, tree, path)
        for b in range(BATCH):
            if since[b] == length:
                np.testing.assert_allclose(carry.R[:, b], R[:, b], rtol=1e-5, atol=1e-6)
                assert not np.array_equal(carry.R[:, b], before[:, b])
                since[b] = 0
            else:
                np.testing.assert_array_equal(carry.R[:, b], before[:, b])
            since[b] += int(path.length[b]) > 0
            assert int(carry.commits[0, b]) == since[b]
    sleeping = tree.trim(jnp.array([DEPTH, -1]))
    nothing = Path(path.nodes, path.length.at[1].set(0))
    for _ in range(2 * length):
        before = carry
        _, carry = step(policy, carry, operands, sleeping, nothing)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(carry), strict=True):
            np.testing.assert_array_equal(new[:, 1], old[:, 1])


def test_a_path_that_may_exceed_the_ring_is_written_at_once():
    """Whatever was buffered before by shallower trees."""
    policy, rng = Ring(length=9, rows=12), np.random.default_rng(3)
    (carry, reference) = start([policy, WY()])
    for number in range(6):
        operands, tree, path = draw(rng)
        if number % 2:  # the same trees under a larger bound
            tree = tree.replace(max_depth=14)
            nodes = jnp.pad(path.nodes, ((0, 0), (0, 15 - path.nodes.shape[1])), constant_values=-1)
            path = path.replace(nodes=nodes)
        _, carry = step(policy, carry, operands, tree, path)
        _, reference = step(WY(), reference, operands, tree, path)
        assert relative_rms(policy.read(carry), np.asarray(reference, np.float64)) < 1e-6
        assert (number % 2 == 0) or not carry.count.any()


@pytest.mark.parametrize("name", ["fused", "ring"])
def test_a_state_whose_writes_wait_is_a_state_like_any_other(name, tmp_path):
    """Read, continued by a prompt, under another policy, reset and saved, with rows in the ring:
    as a state that holds no such rows."""
    model = tiny.model()
    states = {}
    for policy in (name, "replay"):
        state = init_state(model.config, 2, 64, policy=policy)
        _, state = prefill(model, state, np.array([[3, 1, 4, 1], [5, 9, 2, 6]]), [4, 3])
        tree = Tree.from_parents([[7, 8, 9], [7, 8, 9]], [[-1, 0, 1], [-1, 0, 0]], capacity=4)
        _, scratch = verify(model, state, tree)
        choice = choose([[0, 1, 2], [0, 2]], tree.max_depth)
        states[policy] = publish(model, state, tree, scratch, choice)
    waiting, plain = states[name], states["replay"]
    assert waiting.recurrent.count.tolist() == [[3, 2]]
    more = np.array([[2, 7], [1, 8]]), [2, 1]

    def same(ours, theirs):
        for row in range(2):
            for surface, array in Surfaces(theirs).row(row).items():
                assert relative(Surfaces(ours).row(row)[surface], array) < 1e-5, surface

    save_checkpoint(tmp_path, 1, waiting)
    restored = restore_checkpoint(tmp_path, waiting).tree
    for ours in (waiting, restored, with_policy(waiting, "wy")):
        same(ours, plain)
        same(prefill(model, ours, *more)[1], prefill(model, plain, *more)[1])
    emptied, reference = reset(waiting, [0]), reset(plain, [0])
    assert not np.any(emptied.recurrent_of(0)[0])
    np.testing.assert_allclose(emptied.recurrent_of(0), reference.recurrent_of(0), 1e-4, 1e-6)
    assert emptied.length.tolist() == reference.length.tolist()


def test_every_leaf_of_a_fresh_carry_can_be_donated():
    (carry,) = start([Ring()])
    jax.block_until_ready(jax.jit(lambda carry: carry, donate_argnums=0)(carry))


@pytest.mark.parametrize("problem", [None, "too large"])
def test_kernels_give_what_plain_jax_does(problem, monkeypatch):
    """In one launch, and in two where committing and solving do not fit together."""
    monkeypatch.setattr(pallas_kernels.wy_solve, "commit_solve_problem", lambda *_: problem)
    rows = 16 if problem else 17  # a policy of its own, so that it is traced again
    policies = [
        Ring(length=2, rows=rows, implementation="interpret"),
        Ring(length=2, rows=rows),
    ]
    carries, rng = start(policies), np.random.default_rng(4)
    for _ in range(4):
        operands, tree, path = draw(rng, in_order=True)
        made = [step(p, c, operands, tree, path) for p, c in zip(policies, carries, strict=True)]
        carries = [carry for _, carry in made]
        active = np.arange(CAPACITY) < np.asarray(tree.size)[:, None]
        (ours, carry), (out, plain) = made
        assert relative_rms(ours[active], np.asarray(out, np.float64)[active]) < 1e-6
        states = policies[0].read(carry), policies[1].read(plain)
        assert relative_rms(states[0], np.asarray(states[1], np.float64)) < 1e-6
        if problem is None:
            np.testing.assert_array_equal(carry.count, plain.count)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="length 0 and rows 32 must be at least 1"):
        Ring(length=0)
    with pytest.raises(ValueError, match="keys is 'float16', expected float32 or bfloat16"):
        Fused(keys="float16")
    with pytest.raises(ValueError, match="precision 'fp8' is unknown"):
        Ring(precision="fp8")
    operands, tree, path = draw(np.random.default_rng(0))
    policy = Ring(keys="bfloat16")
    (carry,) = start([policy])
    with pytest.raises(ValueError, match="keys are float32 and the ring holds bfloat16: use keys="):
        step(policy, carry, operands, tree, path)
