"""Replaying publishes bitwise what single-token decoding publishes from the same operands.

At the recurrent shape of the model that ships (hidden 320, 3 key and 6 value heads, 64 by 64),
with the decode inside the full jitted model step: there the compiler is free to fuse the update
with its neighbours. A decode written as straight-line code fails these tests in a third of all
elements, by one unit in the last place. Nothing here has a tolerance.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_trees
from oracle import path_to
from stepping import choose

from treejax import parameters
from treejax.checkpoint import load_model
from treejax.config import ModelConfig
from treejax.model import Model, prefill
from treejax.state import init_state
from treejax.steps.publish import publish_path
from treejax.steps.verify import verify_trees
from treejax.tree import Tree

CONFIG = ModelConfig(
    family="qwen3_5",
    vocab_size=256,
    hidden_size=320,
    layer_types=("linear_attention", "linear_attention", "full_attention"),
    intermediate_size=640,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    rotary_dim=16,
)
SURFACES = ("recurrent", "conv", "keys", "values")  # what a scratch holds by row
policies = pytest.mark.parametrize("policy", ["replay", "solve_replay"])
DEPTH, CAPACITY = 9, 28  # tokens decoded one by one; rows of the tree that replays them


@functools.partial(jax.jit, static_argnames="config")
def model_step(config, params, state, tree, choice):
    """Verify and publish in one program, as the loop runs them: logits, scratch, new state."""
    out, scratch = verify_trees(config, params, state, tree)
    return out.logits, scratch, publish_path(state, scratch, choice)


publish_alone = jax.jit(publish_path)


@functools.cache
def decoded(batch, policy):
    """A prompt, then DEPTH tokens one by one: the first state, all later ones, all scratches."""
    params = parameters.init(CONFIG, jax.random.key(1))
    model = Model(params, CONFIG)
    rng = np.random.default_rng(2)
    state = init_state(CONFIG, batch, 96, policy=policy)
    lengths = rng.integers(5, 33, batch)
    _, state = prefill(model, state, rng.integers(0, 256, (batch, 32)), lengths)
    states, scratches = [state], []
    for _ in range(DEPTH):
        tree = Tree.root_only(jnp.array(rng.integers(0, 256, batch), jnp.int32))
        _, scratch, state = model_step(CONFIG, params, state, tree, choose([[0]] * batch, 0))
        states.append(state)
        scratches.append(scratch)
    return params, states, scratches


def scattered(scratches, rows):
    """One scratch of CAPACITY rows: row ``rows[b][t]`` of sequence b holds what step t recorded.

    All other rows hold noise, as the nodes that were not accepted would.
    """
    rng = np.random.default_rng(3)

    def place(*steps):
        batch = steps[0].shape[0]
        made = rng.normal(size=(batch, CAPACITY, *steps[0].shape[2:])).astype(np.float32)
        for t, leaf in enumerate(steps):
            for b in range(batch):
                made[b, rows[b][t]] = np.asarray(leaf)[b, 0]
        return jnp.asarray(made)

    recorded = [{name: getattr(s, name) for name in SURFACES} for s in scratches]
    return scratches[0].replace(**jax.tree.map(place, *recorded))


def assert_same_bits(actual, expected):
    assert actual.recurrent.dtype == expected.recurrent.dtype == jnp.float32
    np.testing.assert_array_equal(
        np.asarray(actual.recurrent).view(np.uint32), np.asarray(expected.recurrent).view(np.uint32)
    )
    for name in ("conv", "length"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
    for name in ("keys", "values"):  # the spare row is nobody's
        a, e = np.asarray(getattr(actual, name)), np.asarray(getattr(expected, name))
        np.testing.assert_array_equal(a[:, :, :-1], e[:, :, :-1])


def test_the_bits_are_those_of_optimised_programs():
    """Sums and products that XLA contracts: as users run them, not as ``compiles_fast`` does."""
    assert jax.config.values["jax_disable_most_optimizations"] is False


def test_the_recurrent_shape_is_the_shipped_one():
    shipped = load_model().config
    names = [name for name in vars(CONFIG) if name.startswith("linear_")]
    for name in ["hidden_size", *names]:
        assert getattr(CONFIG, name) == getattr(shipped, name)


@policies
@pytest.mark.parametrize("batch", [1, 8])
def test_a_replayed_path_is_bitwise_the_decoded_one(batch, policy):
    """Every length of accepted path, nodes scattered over the rows, lengths mixed in a batch."""
    _, states, scratches = decoded(batch, policy)
    rng = np.random.default_rng(4)
    rows = [[0, *(1 + rng.permutation(CAPACITY - 1)[: DEPTH - 1])] for _ in range(batch)]
    scratch = scattered(scratches, rows)
    for length in range(DEPTH + 1):
        lengths = [(length + b) % (DEPTH + 1) for b in range(batch)]
        choice = choose([row[:n] for row, n in zip(rows, lengths, strict=True)], CAPACITY - 1)
        published = publish_alone(states[0], scratch, choice)
        expected = jax.tree.map(lambda *leaves, lengths=lengths: _pick(leaves, lengths), *states)
        assert_same_bits(published, expected)


def _pick(leaves, lengths):
    """Sequence b as it was after ``lengths[b]`` steps; the batch axis is 0 of [B], else 1."""
    stacked = np.stack(leaves)
    if stacked.ndim == 2:
        return stacked[lengths, np.arange(len(lengths))]
    return np.moveaxis(stacked[lengths, :, np.arange(len(lengths))], 0, 1)


@policies
@pytest.mark.parametrize("batch", [1, 8])
def test_one_program_that_verifies_and_publishes_replays_the_same_bits(batch, policy):
    """The loop's fused step over a tree, against publishing its recorded operands node by node."""
    params, states, _ = decoded(batch, policy)
    state, rng = states[0], np.random.default_rng(5)
    parents = [random_trees.shuffle(random_trees.HYDRA27, rng)[0] for _ in range(batch)]
    tokens = [random_trees.random_tokens(rng, p, 256) for p in parents]
    tree = Tree.from_parents(tokens, parents, capacity=CAPACITY, max_depth=11)
    deepest = [_deepest_path(p) for p in parents]
    paths = [path[: 12 - b] for b, path in enumerate(deepest)]
    _, scratch, fused = model_step(CONFIG, params, state, tree, choose(paths, 11))

    one_by_one = state
    for t in range(12):
        single = [path[t : t + 1] for path in paths]
        here = _only_row(scratch, [node[0] if node else 0 for node in single])
        here = here.replace(carry=one_by_one.recurrent)
        now = choose([[0] if node else [] for node in single], 0)
        one_by_one = publish_alone(one_by_one, here, now)
    assert_same_bits(fused, one_by_one)


def _only_row(scratch, nodes):
    """The scratch of one row a sequence: what node ``nodes[b]`` recorded."""
    nodes = jnp.array(nodes)
    rows = jax.tree.map(
        lambda leaf: leaf[jnp.arange(leaf.shape[0]), nodes][:, None],
        {name: getattr(scratch, name) for name in SURFACES},
    )
    return scratch.replace(**rows)


def _deepest_path(parents):
    return max((path_to(parents, node) for node in range(len(parents))), key=len)
