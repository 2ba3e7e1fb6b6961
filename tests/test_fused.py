"""Projections side by side: the same numbers from fewer products, and the same checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import treejax
from treejax import mtp
from treejax.checkpoint import load_model, save_model
from treejax.config import FULL, LINEAR
from treejax.model import Model
from treejax.parameters import Fused, abstract, fuse, unfuse

DENSE = tiny.CONFIG
EXPERTS = dataclasses.replace(
    DENSE,
    family="qwen3_5_moe",
    intermediate_size=0,
    layer_types=(LINEAR, FULL),
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=16,
    moe_layers=(True, True),
    mtp_moe=True,
)
PROMPT = np.random.default_rng(0).integers(0, DENSE.vocab_size, (2, 24))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def fused_names(params):
    layers = [params["mtp"]["layer"], *params["layers"]]
    groups = [g for layer in layers for g in (layer["mixer"], layer["mlp"], *layer["mlp"].values())]
    nodes = [group for group in groups if isinstance(group, dict)]
    return [name for node in nodes for name, leaf in node.items() if isinstance(leaf, Fused)]


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_fusing_and_back_is_bitwise(config):
    params = tiny.random_params(config)
    both = fuse(params)
    attention, recurrent, mlp = "q+k+v", "qkv+z+b+a", "gate+up"
    kinds = 2 * [attention] + [recurrent]  # the head's layer, and one layer of each kind
    mlps = [mlp] * (3 if config is DENSE else 6)  # experts and the shared one
    assert sorted(fused_names(both)) == sorted(kinds + mlps)
    assert same(unfuse(both), params) and same(fuse(both), both)
    assert "q" in params["layers"][1]["mixer"], "the argument stays as it was"


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_model_computes_the_same(config):
    """Each column's sum has the same terms; a product may only add them in another order."""
    params = tiny.random_params(config)
    lengths = [24, 17]
    apart, together = (
        treejax.score(Model(p, config), PROMPT, lengths) for p in (params, fuse(params))
    )
    np.testing.assert_allclose(together, apart, rtol=0, atol=2e-5)


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_head_computes_the_same(config):
    params = tiny.random_params(config)
    hidden = jnp.asarray(np.random.default_rng(1).standard_normal((2, 24, 16)), jnp.float32)
    run = jax.jit(mtp.mtp_forward, static_argnums=0)
    (apart, *_), (together, *_) = (
        run(config, p, hidden, jnp.asarray(PROMPT, jnp.int32)) for p in (params, fuse(params))
    )
    np.testing.assert_allclose(together, apart, rtol=0, atol=2e-5)


def test_checkpoints_do_not_know_of_it(tmp_path):
    model = Model(tiny.random_params(EXPERTS), EXPERTS)
    save_model(dataclasses.replace(model, params=fuse(model.params)), tmp_path / "m")
    assert same(load_model(tmp_path / "m").params, model.params)
    assert same(load_model(tmp_path / "m", fused=True).params, fuse(model.params))


def test_shapes_of_a_fused_model_need_no_arrays():
    shapes = jax.eval_shape(fuse, abstract(DENSE, jnp.bfloat16))
    mixer = shapes["layers"][0]["mixer"]
    widths = DENSE.conv_channels, 32, 4, 4
    assert mixer["qkv+z+b+a"].widths == widths
    assert mixer["qkv+z+b+a"].matrix.shape == (16, sum(widths))
    assert mixer["A_log"].dtype == jnp.float32


def test_columns_fill_whole_rows_of_16_bytes():
    """Kernels read the columns where they lie and copy in bulk: with 1,164 columns, as the model
    that ships has, they would be refused. The rest is zeros, and no parameter."""
    shipped, split = load_model(fused=True), load_model()
    assert shipped.summary == split.summary
    for fused in (layer["mixer"] for layer in shipped.params["layers"]):
        if "qkv+z+b+a" in fused:
            matrix, columns = fused["qkv+z+b+a"].matrix, sum(fused["qkv+z+b+a"].widths)
            assert columns == 1164 and matrix.shape[1] == 1168
            assert not np.asarray(matrix[:, columns:]).any()
    assert same(unfuse(shipped.params), split.params)
