"""A hybrid small enough that a hundred seeds of every fault take minutes on a CPU.

Random weights, so nothing is loaded; few tokens, so that an untrained MTP head's candidates are
right often enough for paths of several nodes.
"""

import jax

from treejax import parameters
from treejax.config import FULL, LINEAR, ModelConfig
from treejax.model import Model

CONFIG = ModelConfig(
    family="qwen3_5",
    vocab_size=6,
    hidden_size=32,
    layer_types=(LINEAR, FULL, LINEAR, FULL),
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    rotary_dim=8,
    max_position_embeddings=512,
    mtp_num_hidden_layers=1,
)


def toy(seed: int = 0) -> Model:
    """The model; weights scaled up so that a text is neither certain nor noise."""
    params = parameters.init(CONFIG, jax.random.key(seed))
    params["embed"] = 20.0 * params["embed"]
    params["lm_head"] = 25.0 * params["lm_head"]
    # A final norm that is not all ones: a hidden row from before it points elsewhere.
    params["norm"] = 0.3 * jax.random.normal(jax.random.key(seed + 1), params["norm"].shape)
    return Model(params, CONFIG)
