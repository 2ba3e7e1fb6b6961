"""How stored tensors and parameters correspond, in every family (FC-19)."""

import numpy as np
import pytest

from treejax.config import FULL, LINEAR, ModelConfig
from treejax.families import REGISTRY, entries_of
from treejax.families.entries import leaves_by_path
from treejax.parameters import FLOAT32_ALWAYS, abstract


def small(family, ratio=2, **own):
    """A configuration with every kind of layer and all widths different."""
    moe = family != "qwen3_5"
    experts = {
        "moe_layers": (True, True) if family == "qwen3_5_moe" else (True, False),
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 7,
        "mtp_moe": True,
    }
    settings = {
        "family": family,
        "vocab_size": 11,
        "hidden_size": 6,
        "layer_types": (LINEAR, FULL),
        "intermediate_size": 0 if family == "qwen3_5_moe" else 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * ratio,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "rotary_dim": 4,
        "mtp_num_hidden_layers": 1,
    }
    return ModelConfig(**settings | (experts if moe else {}) | own)


def random_parameters(config):
    rng = np.random.default_rng(0)
    return {
        path: rng.standard_normal(leaf.shape).astype(np.float32)
        for path, leaf in leaves_by_path(abstract(config)).items()
    }


@pytest.mark.parametrize("family", REGISTRY)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_entries_cover_every_parameter_and_invert(family, fused):
    config = small(family)
    params = random_parameters(config)
    seen = {}
    for entry in entries_of(config, "model.", lambda layer: fused):
        packed = entry.pack(*(params[path] for path in entry.paths))
        for (name, shape), tensor in zip(entry.stored, packed, strict=True):
            assert tensor.shape == shape, name
        seen |= zip(entry.paths, entry.unpack(*packed), strict=True)
    assert seen.keys() == params.keys()
    for path, value in params.items():
        np.testing.assert_array_equal(seen[path], value, err_msg=str(path))


def entry_named(config, ending):
    entries = entries_of(config, "model.", lambda layer: True)
    return next(entry for entry in entries if entry.stored[0][0].endswith(ending))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_fc19_qwen3_next_groups_by_key_head(ratio):
    """FC-19: in_proj_qkvz has per key head q, k, then v and then z of its value heads; ba alike."""
    config = small("qwen3_next", ratio)
    H, dk, dv = 6, 3, 5
    rng = np.random.default_rng(ratio)
    q, k = rng.standard_normal((2, 2, dk, H))
    v, z = rng.standard_normal((2, 2 * ratio, dv, H))
    b, a = rng.standard_normal((2, 2 * ratio, H))
    qkvz, ba = [], []
    for j in range(2):
        heads = range(j * ratio, (j + 1) * ratio)
        qkvz += [q[j], k[j], *(v[h] for h in heads), *(z[h] for h in heads)]
        ba += [*(b[h] for h in heads), *(a[h] for h in heads)]
    qkv, gate = entry_named(config, "in_proj_qkvz.weight").unpack(np.concatenate(qkvz))
    write, decay = entry_named(config, "in_proj_ba.weight").unpack(np.stack(ba))
    expected = np.concatenate([x.reshape(-1, H) for x in (q, k, v)])
    np.testing.assert_array_equal(qkv, expected.T)
    np.testing.assert_array_equal(gate, z.reshape(-1, H).T)
    np.testing.assert_array_equal(write, b.T)
    np.testing.assert_array_equal(decay, a.T)


def test_fc19_qwen3_5_stores_plain_blocks():
    """FC-19: q | k | v in one tensor, z, b and a each alone, each [out, in]."""
    config = small("qwen3_5", ratio=3)
    stored = np.arange(config.conv_channels * 6).reshape(config.conv_channels, 6)
    np.testing.assert_array_equal(
        entry_named(config, "in_proj_qkv.weight").unpack(stored)[0], stored.T
    )
    for part, rows in (("z", 30), ("b", 6), ("a", 6)):
        entry = entry_named(config, f"in_proj_{part}.weight")
        assert entry.stored[0][1] == (rows, 6)
        assert entry.paths[0][-1] == part


def test_fc19_query_and_gate_alternate_by_head():
    """FC-19: q_proj has per head head_dim query rows and then head_dim gate rows."""
    config = small("qwen3_5")
    head, part, channel = np.meshgrid(range(4), range(2), range(8), indexing="ij")
    rows = (100 * head + 10 * part + channel).reshape(64, 1) * np.ones((1, 6))
    (q,) = entry_named(config, "self_attn.q_proj.weight").unpack(rows)
    expected = [[200 + c for c in range(8)], [210 + c for c in range(8)]]
    np.testing.assert_array_equal(q[0].reshape(4, 2, 8)[2], expected)


@pytest.mark.parametrize("mtp", [0, 1], ids=["without-mtp", "with-mtp"])
@pytest.mark.parametrize("family", REGISTRY)
def test_fc19_norms_are_decided_by_name(family, mtp):
    """FC-19: no norm weight changes on the way; which are plain follows from the name alone."""
    config = small(family, mtp_num_hidden_layers=mtp)
    plain, offsets = [], []
    for entry in entries_of(config, "model.", lambda layer: True):
        name, path = entry.stored[0][0], entry.paths[0]
        if "norm" not in name:
            continue
        weight = np.linspace(-1, 1, entry.stored[0][1][0])
        np.testing.assert_array_equal(entry.unpack(weight)[0], weight)
        (plain if path[-1] == "norm_gated" else offsets).append(name)
    assert plain == ["model.layers.0.linear_attn.norm.weight"]
    assert "norm_gated" in FLOAT32_ALWAYS
    assert len(offsets) == 7 + 7 * mtp  # two layers' 2 + 4 and the final one, twice


def test_fused_experts_hold_gate_rows_before_up_rows():
    config = small("qwen3_5_moe")
    stored = np.random.default_rng(1).standard_normal((3, 10, 6))
    gate, up = entry_named(config, "layers.0.mlp.experts.gate_up_proj").unpack(stored)
    np.testing.assert_array_equal(gate[2], stored[2, :5].T)
    np.testing.assert_array_equal(up[2], stored[2, 5:].T)
