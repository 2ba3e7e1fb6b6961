"""Configurations in every published spelling (FC-19)."""

import copy
import dataclasses

import pytest

from treejax.config import FULL, LINEAR
from treejax.families import config_from_hf, config_to_hf

# Sizes that all published models share.
SHARED = {
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "vocab_size": 248320,
}
ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}


def wrapped(layers, hidden, heads, kv_heads, value_heads, tied, kind="qwen3_5", **own):
    """A Qwen3.5+ configuration as published: the text part beside a vision part."""
    text = SHARED | {
        "model_type": f"{kind}_text",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_value_heads": value_heads,
        "layer_types": [FULL if i % 4 == 3 else LINEAR for i in range(layers)],
        "full_attention_interval": 4,
        "rope_parameters": ROPE,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "eos_token_id": 248044,
        "tie_word_embeddings": tied,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": 248056,
        "text_config": text | own,
        "tie_word_embeddings": tied,
        "vision_config": {"model_type": kind, "hidden_size": 1152, "depth": 27},
    }


def moe(layers, hidden, heads, value_heads, experts, top, width):
    return wrapped(
        layers,
        hidden,
        heads,
        2,
        value_heads,
        False,
        kind="qwen3_5_moe",
        num_experts=experts,
        num_experts_per_tok=top,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width,
        mlp_only_layers=[],
    )


QWEN3_NEXT = SHARED | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
# (configuration, GDN layers, attention layers, hidden, heads, KV heads, value heads, tied)
PUBLISHED = {
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 36, 12, 2048, 16, 2, 32, False),
    "Qwen3.5-0.8B": (
        wrapped(24, 1024, 8, 2, 16, True, intermediate_size=3584),
        *(18, 6, 1024, 8, 2, 16, True),
    ),
    "Qwen3.5-2B": (
        wrapped(24, 2048, 8, 2, 16, True, intermediate_size=6144),
        *(18, 6, 2048, 8, 2, 16, True),
    ),
    "Qwen3.5-4B": (
        wrapped(32, 2560, 16, 4, 32, True, intermediate_size=9216),
        *(24, 8, 2560, 16, 4, 32, True),
    ),
    "Qwen3.5-9B": (
        wrapped(32, 4096, 16, 4, 32, False, intermediate_size=12288),
        *(24, 8, 4096, 16, 4, 32, False),
    ),
    "Qwen3.5-27B": (
        wrapped(64, 5120, 24, 4, 48, False, intermediate_size=17408),
        *(48, 16, 5120, 24, 4, 48, False),
    ),
    "Qwen3.5-35B-A3B": (moe(40, 2048, 16, 32, 256, 8, 512), 30, 10, 2048, 16, 2, 32, False),
    "Qwen3.5-122B-A10B": (moe(48, 3072, 32, 64, 256, 8, 1024), 36, 12, 3072, 32, 2, 64, False),
    "Qwen3.5-397B-A17B": (moe(60, 4096, 32, 64, 512, 10, 1024), 45, 15, 4096, 32, 2, 64, False),
    "Qwen3.8-27B": (
        wrapped(64, 5120, 24, 4, 48, False, intermediate_size=17408, output_gate_type="swish"),
        *(48, 16, 5120, 24, 4, 48, False),
    ),
}
DENSE = PUBLISHED["Qwen3.5-4B"][0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    mapping, linear, full, hidden, heads, kv_heads, value_heads, tied = PUBLISHED[name]
    config = config_from_hf(mapping)
    assert (len(config.linear_layers), len(config.full_layers)) == (linear, full)
    assert config.full_layers == tuple(range(3, linear + full, 4))
    assert config.hidden_size == hidden
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert config.linear_num_value_heads == value_heads
    assert config.tie_word_embeddings is tied
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert config.max_position_embeddings == 262144
    experts = config.family != "qwen3_5"
    assert config.moe_layers == ((True,) * (linear + full) if experts else ())
    assert config.mtp_moe is experts
    # Qwen3-Next says nothing of its head: the tensors decide.
    assert config.mtp_num_hidden_layers == (0 if config.family == "qwen3_next" else 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read_back(name):
    config = config_from_hf(PUBLISHED[name][0])
    mapping = config_to_hf(config)
    assert config_from_hf(mapping) == config
    assert "rope_theta" not in mapping and mapping["rope_parameters"]["rope_theta"] == 1e7


def old_rotary(text):
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25, "rope_scaling": None}


def default_rotary_factor(text):
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e7}


def mixed_rotary(text):
    text["rope_scaling"] = {"type": "default", "mrope_section": [11, 11, 10]}
    text["rope_parameters"] = None
    text["rope_theta"] = 1e7


def interval(text):
    text["layer_types"] = None


def without_wrapper_type(text):
    del text["model_type"]


def leaner(text):
    for name in ("linear_key_head_dim", "hidden_act", "rms_norm_eps", "attention_bias"):
        del text[name]


SPELLINGS = [
    old_rotary,
    default_rotary_factor,
    mixed_rotary,
    interval,
    without_wrapper_type,
    leaner,
]


@pytest.mark.parametrize("change", SPELLINGS, ids=lambda change: change.__name__)
def test_fc19_spellings_mean_the_same(change):
    """FC-19: rotary settings old and new, layer types listed or by interval, text types absent."""
    mapping = copy.deepcopy(DENSE)
    change(mapping["text_config"])
    assert config_from_hf(mapping) == config_from_hf(DENSE)


def test_fc19_text_only_and_wrapped_mean_the_same():
    """FC-19: the text part alone is a configuration, and the wrapper's flag for ties counts."""
    assert config_from_hf(DENSE["text_config"]) == config_from_hf(DENSE)
    assert config_from_hf(DENSE["text_config"] | {"model_type": "qwen3_5"}) == config_from_hf(DENSE)
    outside = copy.deepcopy(DENSE)
    del outside["text_config"]["tie_word_embeddings"]
    assert config_from_hf(outside).tie_word_embeddings is True
    del outside["tie_word_embeddings"]
    assert config_from_hf(outside).tie_word_embeddings is False


def test_fc19_a_quarter_of_256_channels_rotates_64():
    """FC-19: partial factor .25 with head width 256 leaves channels 64..255 unrotated."""
    assert config_from_hf(DENSE).rotary_dim == 64
    without = copy.deepcopy(DENSE)
    del without["text_config"]["rope_parameters"]
    config = config_from_hf(without)
    assert (config.rotary_dim, config.rope_theta) == (64, 10000.0)  # transformers' defaults


@pytest.mark.parametrize("eos, ids", [(7, (7,)), ([7, 9], (7, 9)), (None, ()), ([], ())], ids=str)
def test_end_tokens_are_one_or_many(eos, ids):
    text = DENSE["text_config"] | {"eos_token_id": eos}
    config = config_from_hf(text)
    assert config.eos_token_ids == ids
    assert config_from_hf(config_to_hf(config)).eos_token_ids == ids


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, (True,) * 6),
        ({"mlp_only_layers": [1, 4]}, (True, False, True, True, False, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True, False, True)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (False,) * 5 + (True,)),
        ({"num_experts": 0}, ()),
    ],
    ids=str,
)
def test_which_layers_of_qwen3_next_have_experts(change, expected):
    config = config_from_hf(QWEN3_NEXT | {"num_hidden_layers": 6} | change)
    assert config.moe_layers == expected
    assert config.mtp_moe is bool(expected)
    assert config_from_hf(config_to_hf(config)) == config


REFUSED = [
    ({"model_type": "llama"}, "model_type 'llama' is not supported, expected one of: qwen3_5,"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rotary type 'yarn'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rotary type 'linear'"),
    ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "unknown key 'factor'"),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "rotates 384 channels"),
    ({"rope_parameters": {"partial_rotary_factor": 0.0041}}, "rotates 1 channels"),
    ({"rope_parameters": {"rope_theta": "1e7"}}, "rope_theta is '1e7'"),
    ({"attention_bias": True}, "attention_bias is True, only False"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
    ({"attn_output_gate": False}, "attn_output_gate is False, only True"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ({"layer_types": [LINEAR, FULL]}, "layer_types has 2 entries, expected 32"),
    ({"layer_types": ["sliding_attention"] * 32}, "layer type 'sliding_attention' is unknown"),
    ({"linear_num_value_heads": 24}, "linear_num_value_heads is 24"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 16"),
    ({"hidden_size": "2560"}, "hidden_size is '2560', expected an integer"),
    ({"hidden_size": 0}, "hidden_size is 0, expected an integer of at least 1"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0, expected a positive number"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id is"),
    ({"bos_token_id": "<s>"}, "bos_token_id is"),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_what_is_not_supported_is_refused_in_one_line(change, message):
    mapping = copy.deepcopy(DENSE)
    mapping["text_config"] |= change
    with pytest.raises(ValueError) as caught:
        config_from_hf(mapping)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_experts_that_cannot_be_are_refused():
    text = PUBLISHED["Qwen3.5-35B-A3B"][0]["text_config"]
    with pytest.raises(ValueError, match="mlp_only_layers"):
        config_from_hf(text | {"mlp_only_layers": [0]})
    with pytest.raises(ValueError, match="num_experts_per_tok is 8, expected at most"):
        config_from_hf(text | {"num_experts": 4})


def test_a_quantised_wrapper_is_refused():
    with pytest.raises(ValueError, match="quantised"):
        config_from_hf(DENSE | {"quantization_config": {"quant_method": "awq"}})


@pytest.mark.parametrize("head_dim", [8, 24, 49, 64, 80, 96, 98, 128, 250, 256])
def test_every_rotary_width_survives_writing(head_dim):
    """Readers truncate head_dim * factor, and the product may fall just below the integer."""
    base = dataclasses.replace(config_from_hf(DENSE), head_dim=head_dim)
    for rotary_dim in range(2, head_dim + 1, 2):
        config = dataclasses.replace(base, rotary_dim=rotary_dim)
        assert config_from_hf(config_to_hf(config)).rotary_dim == rotary_dim


def test_what_a_family_cannot_say_is_refused():
    config = config_from_hf(PUBLISHED["Qwen3.5-35B-A3B"][0])
    partly = dataclasses.replace(config, moe_layers=(False,) + config.moe_layers[1:])
    with pytest.raises(ValueError, match="qwen3_5_moe configuration cannot say moe_layers"):
        config_to_hf(partly)
    with pytest.raises(ValueError, match="family 'mamba' is unknown, expected one of: qwen3_5"):
        config_to_hf(dataclasses.replace(config, family="mamba"))
