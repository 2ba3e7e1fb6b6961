"""step_cost's model by sizes, its scripted arms, and integration changes undone one by one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treejax import parameters
from treejax.ablation.step_cost_arms import SWITCHES, make_step_arm
from treejax.ablation.step_cost_bench import Bench
from treejax.ablation.step_cost_gate import random_tokens
from treejax.ablation.step_cost_model import (
    REFRAIN,
    ModelSizes,
    abstract_params,
    make_model,
    make_state,
    read_bytes,
)
from treejax.ablation.step_cost_switches import walk_on_host
from treejax.ablation.step_cost_verify import attention_acts
from treejax.policies import WY, Fused
from treejax.steps import verify as product

SIZES = ModelSizes(
    layers=3,
    attention_every=3,
    hidden_size=32,
    intermediate_size=48,
    heads=4,
    key_value_heads=2,
    head_dim=8,
    value_heads=4,
    key_heads=2,
    key_dim=8,
    value_dim=8,
    vocabulary=211,
    dtype="float32",
)
LENGTHS = (1, 2, 3, 4)
TREE = "2,2,1"
BATCH, ROWS, CONTEXT = 2, 64, 20


@functools.cache
def model():
    return make_model(SIZES, 0)


@functools.cache
def bench(name, implementation="xla"):
    arm = make_step_arm(name, "replay", LENGTHS, implementation, SIZES.config)
    return Bench(arm, model(), SIZES, BATCH, ROWS, 0)


def run(name, implementation="xla"):
    """Two steps at every length: what was emitted, and the state after."""
    mine = bench(name, implementation)
    mine.hold()
    counts, tokens = [], []
    for length in LENGTHS:
        mine.rewind(CONTEXT, length)
        for _ in range(2):
            emission = jax.device_get(mine.step())
            counts.append(emission.count.tolist())
            tokens.append(emission.tokens)
    state = jax.device_get(mine.held.state)
    mine.release()
    return counts, np.concatenate(tokens), state


def lowered(name):
    """The text of every program of an arm's step."""
    return {name: job().as_text() for name, job in bench(name).jobs(False).items()}


@functools.cache
def base():
    return run(f"wy {TREE}")


def test_the_script_says_what_is_accepted():
    counts, tokens, _ = base()
    assert counts == [[length] * BATCH for length in LENGTHS for _ in range(2)]
    assert set(tokens.reshape(-1).tolist()) == {REFRAIN, -1}


@pytest.mark.parametrize("switch", [s for s in SWITCHES if s != "attention"])
def test_a_change_undone_computes_the_same_in_another_program(switch):
    name = f"wy {TREE} no_{switch}"
    counts, tokens, state = run(name)
    expected = base()
    assert counts == expected[0] and (tokens == expected[1]).all()
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected[2]), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=2e-5)
    mine, (own,) = lowered(name), lowered(f"wy {TREE}").values()
    recurrent = len(SIZES.config.linear_layers)
    if switch == "path":
        assert list(mine) == ["front", "back"]
        assert "while" not in re.findall(r"stablehlo\.(\w+)", mine["back"])  # no walk
    elif switch == "select":
        assert list(mine) == ["front", "argmax", "top_k", "back"]
        assert "top_k" in mine["top_k"] and "top_k" not in own
    elif switch == "taps":  # once a recurrent layer more
        barriers = [text.count("optimization_barrier") for text in (mine["step"], own)]
        assert barriers[0] >= barriers[1] + recurrent
    else:  # every layer sorts and moves its rows
        sorts = [len(re.findall(r"stablehlo\.(gather|scatter)", t)) for t in (mine["step"], own)]
        assert sorts[0] > sorts[1] + 3 * SIZES.layers


def test_switching_attention_off_needs_one_to_switch_off(monkeypatch):
    mine = bench(f"wy {TREE} no_attention")
    shapes = mine.abstract_state(), mine.abstract_tree()
    assert not attention_acts(*shapes)
    mixing = product._tree_mixing

    def other(state, topology):
        made, carry = mixing(state, topology)
        attend = made.attend
        return made._replace(attend=lambda i, q, k, v: -attend(i, -q, k, -v)), carry

    monkeypatch.setattr(product, "_tree_mixing", other)
    assert attention_acts(*shapes)


def test_the_host_walks_as_the_rule_does():
    mine = bench(f"wy {TREE}")
    random = np.random.default_rng(0)
    for _ in range(20):
        tree = mine.arm.tree.full(jnp.asarray(random_tokens(mine)))
        drawn = random.integers(0, SIZES.vocabulary, tree.tokens.shape)
        # At every node some child's token more often than not.
        parent, tokens = np.asarray(tree.parent), np.asarray(tree.tokens)
        for b, v in zip(*np.nonzero(random.random(parent.shape) < 0.7), strict=True):
            drawn[b, max(0, parent[b, v])] = tokens[b, v]
        logits = jax.nn.one_hot(drawn, SIZES.vocabulary)
        mine.hold()
        mine.rewind(CONTEXT)
        choice, own = mine.choose(tree, logits), walk_on_host(jax.device_get(tree), drawn)
        for name in ("path", "length", "pending"):
            assert (np.asarray(getattr(choice, name)) == getattr(own, name)).all(), name


def test_weights_are_those_of_the_parameter_tree():
    plain, fused = parameters.abstract(SIZES.config), abstract_params(SIZES)
    assert jax.tree.structure(fused) == jax.tree.structure(parameters.fuse(model().params))
    made = [(x.shape, x.dtype) for x in jax.tree.leaves(model().params)]
    assert made == [(x.shape, x.dtype) for x in jax.tree.leaves(fused)]
    count = sum(x.size for x in jax.tree.leaves(plain))
    assert count == sum(x.size for x in jax.tree.leaves(fused))
    # What a plain step reads: all but the head and the embedding.
    idle = {name: plain[name] for name in ("mtp", "embed")}
    weights = 4 * (count - sum(x.size for x in jax.tree.leaves(idle)))
    read = read_bytes(SIZES.config, model().params, batch=2, context=10)
    assert read == {
        "weights": weights,
        "states": 2 * 2 * 4 * 4 * 8 * 8,
        "conv": 2 * 2 * 4 * 3 * (2 * 2 * 8 + 4 * 8),
        "kv": 2 * 2 * 4 * 10 * 2 * 8,
    }
    gates = model().params["layers"][0]["mixer"]
    step = jax.nn.softplus(gates["dt_bias"])
    assert 1e-3 <= float(step.min()) and float(step.max()) <= 0.1
    assert 0 <= float(gates["A_log"].min()) and float(gates["A_log"].max()) <= np.log(16.0)


def test_a_seed_gives_the_same_surfaces_under_any_policy():
    how = SIZES.config, SIZES.dtype, 1, 8
    one, two, other = (make_state(*how, policy, seed) for policy, seed in PLACES)
    for name in ("conv", "keys", "values"):
        assert (getattr(one, name) == getattr(two, name)).all()
        assert not (getattr(one, name) == getattr(other, name)).all()
        assert 0.9 < float(getattr(one, name).std()) < 1.1
    assert (one.policy.read(one.recurrent) == two.policy.read(two.recurrent)).all()


PLACES = (WY(), 3), (Fused(), 3), (WY(), 4)
