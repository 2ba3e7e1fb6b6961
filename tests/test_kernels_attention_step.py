"""Verifying with attention split over the context: where it runs, and what it leaves to plain JAX.

The kernels by themselves are tested in ``test_kernels_attention``.
"""

import dataclasses
import functools
import importlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import random_trees
import tiny
from kernel_cases import lower_for_h200
from stepping import relative

from pallas_kernels import implementation as dispatch
from treejax import parameters
from treejax.config import FULL, LINEAR
from treejax.model import Model, prefill
from treejax.policies import REGISTRY
from treejax.state import init_state, with_policy
from treejax.steps.verify import verify, verify_trees
from treejax.tree import Tree

# The interpreter imports this one late, and so adds a setting to JAX, which empties its caches.
importlib.import_module("jax.experimental.pallas.tpu")

LAYERS = (LINEAR, FULL, FULL)
CONFIG = dataclasses.replace(
    tiny.CONFIG,
    layer_types=LAYERS,
    head_dim=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    linear_num_key_heads=1,
    linear_num_value_heads=1,
)
OTHERS = 2  # kernels of the recurrent layer: its operands and its scan
ATTENTION = 2  # the splits and their merge: both layers call one function


def kernels(dtype, batch=2, max_length=63):
    """How many distinct Mosaic kernels a verify on an H200 holds."""
    policy = REGISTRY["replay"](implementation="mosaic_gpu")
    state = jax.eval_shape(lambda: init_state(CONFIG, batch, max_length, dtype, policy))
    params = parameters.abstract(CONFIG, dtype)
    tree = Tree.root_only(jnp.zeros(batch, jnp.int32), 8, 7)
    text = lower_for_h200(functools.partial(verify_trees, CONFIG), params, state, tree)
    return text.count("custom_call @mosaic_gpu")


def test_a_step_attends_by_kernels_where_they_take_it(caplog):
    """Else by plain JAX, and one line says why."""
    dispatch._notice.cache_clear()
    assert kernels(jnp.bfloat16) == OTHERS + ATTENTION
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        assert kernels(jnp.float32) == OTHERS
        assert kernels(jnp.bfloat16, max_length=64) == OTHERS
    why = [record.message.removesuffix("; running the XLA reference") for record in caplog.records]
    assert why == [
        "pallas_kernels: tree attention takes bfloat16, got float32",
        "pallas_kernels: tree attention takes caches whose layers x batch x rows are a multiple "
        "of 8 and at least 64, got 2 x 2 x 65",
    ]


def test_a_tree_is_verified_as_in_plain_jax():
    """Random trees in any packing after prompts of several lengths; the last takes no part."""
    model = Model(parameters.init(CONFIG, jax.random.key(0), jnp.bfloat16), CONFIG)
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 9))
    empty = init_state(CONFIG, 2, 63, jnp.bfloat16)
    _, state = prefill(model, empty, tokens, [9, 4])
    rng = np.random.default_rng(3)
    for sizes in ((7, 4), (5, 0)):
        parents = [random_trees.random_parents(rng, max(size, 1), 6) for size in sizes]
        nodes = [random_trees.random_tokens(rng, p, CONFIG.vocab_size) for p in parents]
        tree = Tree.from_parents(nodes, parents, capacity=7, max_depth=6)
        if not sizes[1]:
            tree = tree.trim(jnp.array([6, -1]))
        made = {}
        for how in ("interpret", "xla"):
            made[how], _ = verify(model, with_policy(state, "replay", how), tree)
        for b, size in enumerate(sizes):
            ours, theirs = (made[how].hidden[b, :size] for how in made)
            if size:
                # Both round their outputs, weights and the layers between to eight bits.
                assert relative(*(x.astype(jnp.float32) for x in (ours, theirs))) < 1e-2
        assert np.isfinite(made["interpret"].logits.astype(jnp.float32)).all()
