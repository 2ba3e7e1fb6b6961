"""Qwen3.5, Qwen3.6 and Qwen3.8-27B, dense: separate projections, an MTP head named in the config.

Published checkpoints wrap the text configuration beside a vision part, which is skipped.
"""

from typing import Any

from treejax.config import ModelConfig
from treejax.families.common import Family, Fields
from treejax.families.entries import separate_projections

DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
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
    "mtp_num_hidden_layers": 0,
}


def read(fields: Fields, layers: int) -> dict[str, Any]:
    return {"intermediate_size": fields.integer("intermediate_size")}


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": config.intermediate_size,
        "mtp_num_hidden_layers": config.mtp_num_hidden_layers,
        "mtp_use_dedicated_embeddings": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
    }


FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    defaults=DEFAULTS,
    read=read,
    write=write,
    projections=separate_projections,
    fused_experts=False,
    mtp_in_config=True,
)
