"""Policies on their kernels: the same model, trees and paths as in plain JAX, and what is compiled.

On a CPU the kernels run through Pallas' GPU interpreter, and whole steps are lowered for a GPU that
is not there. Kernels by themselves are tested in ``test_kernels_*``.
"""

import dataclasses
import functools
import importlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_trees
import tiny
from compiling import compilations
from kernel_cases import lower_for_h200
from oracle import path_to
from stepping import Surfaces, choose, relative

from treejax import parameters
from treejax.config import FULL, LINEAR
from treejax.drafters import make_drafter
from treejax.model import Model, prefill
from treejax.policies import REGISTRY, kernel_problem
from treejax.sampling import Sampling
from treejax.state import init_state, with_policy
from treejax.steps.publish import publish, publish_path
from treejax.steps.rules.match import Match
from treejax.steps.together import Carry, step
from treejax.steps.verify import verify, verify_trees
from treejax.tree import Tree

# The interpreter imports this one late, and so adds a setting to JAX, which empties its caches.
importlib.import_module("jax.experimental.pallas.tpu")

policies = pytest.mark.parametrize("policy", sorted(REGISTRY))

CAPACITY, DEPTH = 9, 7  # kernels take 16 rows
SMALL = dataclasses.replace(tiny.CONFIG, linear_num_key_heads=1, linear_num_value_heads=2)
# Relative RMS: some run the native update in both, a solve sums in another order.
NATIVE = ("snapshot", "replay", "per_path")
TOLERANCE = dict.fromkeys(REGISTRY, 1e-5) | dict.fromkeys(NATIVE, 1e-6)


def random_tree(rng, sizes):
    parents = [random_trees.random_parents(rng, size, DEPTH) for size in sizes]
    tokens = [random_trees.random_tokens(rng, p, tiny.CONFIG.vocab_size) for p in parents]
    return Tree.from_parents(tokens, parents, capacity=CAPACITY, max_depth=DEPTH), parents


@functools.cache
def small_model():
    """The smallest model with two value heads: interpreting takes its time by the head."""
    params = parameters.init(SMALL, jax.random.key(0))
    params["embed"] = 20.0 * params["embed"]
    params["lm_head"] = 50.0 * params["lm_head"]
    return Model(params, SMALL)


@functools.cache
def prompted():
    """Two prompts of different length; other policies continue from here."""
    tokens = np.random.default_rng(1).integers(0, tiny.CONFIG.vocab_size, (2, 9))
    return prefill(small_model(), init_state(SMALL, 2, 64), tokens, [9, 4])[1]


@policies
def test_kernels_follow_plain_jax(policy):
    """Random trees in any packing: outputs, greedy choices and published states, step by step.

    Nothing compiles for the later trees. In the last step one sequence takes no part: its tree is
    empty and its bytes stay.
    """
    rng, model = np.random.default_rng(3), small_model()
    states = {how: with_policy(prompted(), policy, how) for how in ("interpret", "xla")}
    for number, sizes in enumerate([(9, 5), (1, 7), (6, 8), (4, 3)]):
        tree, parents = random_tree(rng, sizes)
        paths = [path_to(p, int(rng.integers(len(p)))) for p in parents]
        if number == 3:
            tree, sizes, paths[1] = tree.trim(jnp.array([DEPTH, -1])), (4, 0), []
        choice, before = choose(paths, DEPTH), Surfaces(states["interpret"]).row(1)
        outs = {}
        with compilations() as compiled:
            for how, state in states.items():
                outs[how], scratch = verify(model, state, tree)
                states[how] = publish(model, state, tree, scratch, choice)
        assert number == 0 or not compiled
        assert_same_outputs(outs["interpret"], outs["xla"], sizes, TOLERANCE[policy])
        ours, theirs = Surfaces(states["interpret"]), Surfaces(states["xla"])
        for b in range(2):
            for name, array in theirs.row(b).items():
                assert relative(ours.row(b)[name], array) < TOLERANCE[policy], (name, b)
    for name, array in before.items():
        np.testing.assert_array_equal(ours.row(1)[name], array)


def assert_same_outputs(ours, theirs, sizes, tolerance):
    """Hidden rows and the best token of every active node; all logits finite."""
    assert np.isfinite(ours.logits).all()
    for b, size in enumerate(sizes):
        if size:
            assert relative(ours.hidden[b, :size], theirs.hidden[b, :size]) < tolerance
        best = [np.asarray(out.logits[b, :size]).argmax(-1) for out in (ours, theirs)]
        np.testing.assert_array_equal(*best)


LAYERS = (LINEAR, LINEAR, FULL)
SHIPPED = dataclasses.replace(  # the recurrent shape of the model that ships
    tiny.CONFIG,
    layer_types=LAYERS,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
PER_LAYER = 2  # the operands, and the policy's scan
PLAIN_SCANS = ("neumann",)  # plain JAX under every implementation
COMMITS = {"replay": 1, "wy": 1, "solve_replay": 1, "neumann": 1}  # the others gather


def launches(text, start="main"):
    """How often a function of a lowered program calls a Mosaic kernel; functions that it calls
    count as often as they are called."""
    bodies = dict(re.findall(r"func\.func \w+ @(\w+)\((.*?)\n  }", text, re.DOTALL))

    @functools.cache
    def count(name):
        direct = len(re.findall(r"custom_call @mosaic_gpu", bodies[name]))
        calls = Counter(re.findall(r"call @(\w+)\(", bodies[name]))
        return direct + sum(n * count(f) for f, n in calls.items() if f in bodies)

    return count(start)


def abstract_case(policy, implementation, drafter, prompts=2):
    """Parameters, state and memory of a decoding loop as shapes; nothing is computed."""
    made = REGISTRY[policy](implementation=implementation)
    state = jax.eval_shape(lambda: init_state(SHIPPED, prompts, 64, policy=made))
    params = jax.eval_shape(parameters.fuse, parameters.abstract(SHIPPED))  # as generation has them
    draft = jax.eval_shape(lambda p: drafter.init(Model(p, SHIPPED), prompts, 64), params)
    return params, state, draft


@policies
def test_steps_lowered_for_a_gpu_run_on_kernels(policy):
    """Each recurrent layer launches its kernels and publishing one for all layers, in the loop's
    fused step too; with "xla" nothing launches any."""
    drafter = make_drafter("mtp+suffix", "hydra27")
    params, state, draft = abstract_case(policy, "mosaic_gpu", drafter)
    tree = Tree.root_only(jnp.zeros(2, jnp.int32), drafter.capacity, drafter.max_depth)
    choice = choose([[0], []], drafter.max_depth)
    per_layer = PER_LAYER - (policy in PLAIN_SCANS)
    expected = per_layer * LAYERS.count(LINEAR) + COMMITS.get(policy, 0)

    @jax.jit
    def verify_and_publish(params, state, tree, choice):
        scratch = verify_trees(SHIPPED, params, state, tree)[1]
        return publish_path(state, scratch, choice)

    @jax.jit
    def fused(*given):
        return step(SHIPPED, drafter, Match(), *given)

    def both(params, weights, carry, tree, choice, *rest):
        alone = verify_and_publish(params, carry.state, tree, choice)
        return alone, fused(params, weights, carry, *rest)

    # In one program, because a kernel that both take is then lowered once, which takes seconds.
    carry = Carry(state=state, memory=draft.memory, pending=jnp.zeros(2, jnp.int32))
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    rest = np.zeros(2, np.int32), keys, Sampling().prepared(), np.bool_(False)
    text = lower_for_h200(both, params, draft.weights, carry, tree, choice, *rest)
    assert launches(text, "verify_and_publish") == launches(text, "fused") == expected
    assert launches(text) == 2 * expected

    params, state, _ = abstract_case(policy, "xla", drafter)
    traced = verify_and_publish.trace(params, state, tree, choice)
    assert launches(traced.lower(lowering_platforms=("cuda",)).as_text()) == 0


@policies
def test_buffers_of_kernels_are_the_scratch_of_verify(policy):
    """But for the cut states, which live inside a launch, byte for byte."""
    drafter = make_drafter("mtp", "chain5")
    params, state, _ = abstract_case(policy, "interpret", drafter)
    tree = Tree.root_only(jnp.zeros(2, jnp.int32), drafter.capacity, drafter.max_depth)
    verify_them = functools.partial(verify_trees, SHIPPED)
    scratch = jax.eval_shape(verify_them, params, state, tree)[1].recurrent
    buffers = state.policy.buffers(SHIPPED, drafter.capacity, 2)
    lasting = sum(size for name, size in buffers.items() if name != "cut_states")
    assert lasting == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(scratch))


def test_with_policy_keeps_the_implementation_unless_told():
    state = with_policy(prompted(), "replay", "interpret")
    assert with_policy(state, "wy").policy == REGISTRY["wy"](implementation="interpret")
    assert with_policy(state, "wy", "xla").policy.implementation == "xla"
    assert with_policy(state, REGISTRY["wy"]()).policy.implementation == "xla"


def test_auto_is_plain_jax_where_kernels_cannot_serve():
    """No Hopper GPU here; and shapes that no kernel takes are refused by name."""
    assert init_state(tiny.CONFIG).policy.implementation == "xla"
    wide = dataclasses.replace(tiny.CONFIG, linear_key_head_dim=512)
    with pytest.raises(ValueError, match="head widths of 8, 16, .. 256, not 512 x 8"):
        init_state(wide, implementation="interpret")
    assert kernel_problem(tiny.CONFIG, 129) == "the kernels take trees of at most 128 rows, not 129"
    many = dataclasses.replace(tiny.CONFIG, linear_num_value_heads=18)
    assert kernel_problem(many) == "the kernels take at most 8 value heads a key head, not 9"
    assert kernel_problem(tiny.CONFIG, 128) is None
    attention = dataclasses.replace(wide, layer_types=(FULL,))
    assert kernel_problem(attention) is None


@pytest.mark.parametrize("policy", ["fused", "ring"])
def test_a_tree_too_large_to_commit_and_solve_at_once_takes_two_kernels(policy):
    """At 27B widths in float32: the rings of all layers are written in one launch before."""
    wide = dataclasses.replace(
        SHIPPED, linear_key_head_dim=128, linear_value_head_dim=128, layer_types=(LINEAR,) * 2
    )
    made = REGISTRY[policy](implementation="mosaic_gpu")
    state = jax.eval_shape(lambda: init_state(wide, 1, 64, policy=made))
    params = parameters.abstract(wide)
    verify_them = functools.partial(verify_trees, wide)
    for capacity, expected in ((32, 4), (64, 5)):  # two layers of two, and one for both
        tree = Tree.root_only(jnp.zeros(1, jnp.int32), capacity, max_depth=5)
        assert launches(lower_for_h200(verify_them, params, state, tree)) == expected
