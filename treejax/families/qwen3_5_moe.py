"""Qwen3.5 and Qwen3.6 with experts in every layer, the MTP head's layer included."""

from typing import Any

from treejax.config import ModelConfig
from treejax.families.common import Family, Fields, expert_arguments, expert_mapping
from treejax.families.entries import separate_projections

DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "mtp_num_hidden_layers": 0,
}


def read(fields: Fields, layers: int) -> dict[str, Any]:
    dense = fields.get("mlp_only_layers")
    if dense:
        raise ValueError(f"mlp_only_layers is {dense}, expected none: every layer has experts")
    return expert_arguments(fields) | {
        "intermediate_size": 0,  # no dense MLP anywhere
        "moe_layers": (True,) * layers,
        "mtp_moe": True,
        "norm_topk_prob": True,  # always, whatever the configuration says
    }


def write(config: ModelConfig) -> dict[str, Any]:
    return expert_mapping(config) | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": config.mtp_num_hidden_layers,
        "mtp_use_dedicated_embeddings": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
    }


FAMILY = Family(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    defaults=DEFAULTS,
    read=read,
    write=write,
    projections=separate_projections,
    fused_experts=True,
    mtp_in_config=True,
)
