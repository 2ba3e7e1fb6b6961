"""Qwen3-Next: projections fused and grouped by key head, experts or a dense MLP per layer.

Published configurations say nothing of the MTP head although its weights are there.
"""

from typing import Any

import numpy as np

from treejax.config import ModelConfig
from treejax.families.common import Family, Fields, expert_arguments, expert_mapping
from treejax.families.entries import Arrays, Entry, Path

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
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
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 0,
}


def read(fields: Fields, layers: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "intermediate_size": fields.integer("intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob"),
    }
    if fields.integer("num_experts", minimum=0) == 0:
        return arguments
    step, dense = fields.integer("decoder_sparse_step"), fields.get("mlp_only_layers")
    moe = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    return arguments | expert_arguments(fields) | {"moe_layers": moe, "mtp_moe": True}


def write(config: ModelConfig) -> dict[str, Any]:
    dense = [i for i in range(config.num_layers) if not config.is_moe(i)]
    return expert_mapping(config) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": config.intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense if config.num_experts else [],
    }


def grouped_projections(config: ModelConfig, name: str, path: Path) -> list[Entry]:
    """``in_proj_qkvz`` and ``in_proj_ba``: one group of rows per key head (hybrid-model 4.1).

    Group j is [q_j: dk] [k_j: dk] [v of its r value heads: r dv] [z of the same: r dv], and
    [b of its r value heads] [a of the same].
    """
    H, Hk, Hv = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
    dk, values = config.linear_key_head_dim, Hv // Hk * config.linear_value_head_dim
    rows = 2 * dk + 2 * values

    def unpack_qkvz(stored: np.ndarray) -> Arrays:
        q, k, v, z = np.split(stored.reshape(Hk, rows, H), [dk, 2 * dk, 2 * dk + values], axis=1)
        qkv = np.concatenate([part.reshape(-1, H) for part in (q, k, v)])
        return qkv.T, z.reshape(-1, H).T

    def pack_qkvz(qkv: np.ndarray, z: np.ndarray) -> Arrays:
        parts = (*np.split(qkv.T, [Hk * dk, 2 * Hk * dk]), z.T)
        groups = np.concatenate([part.reshape(Hk, -1, H) for part in parts], axis=1)
        return (groups.reshape(-1, H),)

    def unpack_ba(stored: np.ndarray) -> Arrays:
        b, a = np.split(stored.reshape(Hk, 2 * Hv // Hk, H), 2, axis=1)
        return b.reshape(-1, H).T, a.reshape(-1, H).T

    def pack_ba(b: np.ndarray, a: np.ndarray) -> Arrays:
        groups = np.concatenate([part.T.reshape(Hk, -1, H) for part in (b, a)], axis=1)
        return (groups.reshape(-1, H),)

    return [
        Entry(
            ((f"{name}.in_proj_qkvz.weight", (Hk * rows, H)),),
            ((*path, "qkv"), (*path, "z")),
            unpack_qkvz,
            pack_qkvz,
        ),
        Entry(
            ((f"{name}.in_proj_ba.weight", (2 * Hv, H)),),
            ((*path, "b"), (*path, "a")),
            unpack_ba,
            pack_ba,
        ),
    ]


FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    defaults=DEFAULTS,
    read=read,
    write=write,
    projections=grouped_projections,
    fused_experts=False,
    mtp_in_config=False,
)
