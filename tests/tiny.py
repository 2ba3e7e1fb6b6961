"""The smallest hybrid with an MTP head that still has every part: for tests of the machinery."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from treejax import parameters
from treejax.config import FULL, LINEAR, ModelConfig
from treejax.model import Model

CONFIG = ModelConfig(
    family="qwen3_5",
    vocab_size=61,
    hidden_size=16,
    layer_types=(LINEAR, FULL),
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    rotary_dim=4,
    max_position_embeddings=512,
    mtp_num_hidden_layers=1,
)


def random_params(config, seed=0):
    """Random values in every leaf, norms and gates too; made by NumPy, so nothing is compiled."""
    random = np.random.default_rng(seed)

    def fill(leaf):
        scale = 0.2 if len(leaf.shape) == 1 else leaf.shape[-2] ** -0.5
        return jnp.asarray(scale * random.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(fill, parameters.abstract(config))


@functools.cache
def model(seed=0):
    """Random parameters, scaled up so that the logits of different tokens are far apart."""
    params = parameters.init(CONFIG, jax.random.key(seed))
    params["embed"] = 20.0 * params["embed"]
    params["lm_head"] = 50.0 * params["lm_head"]
    return Model(params, CONFIG)
