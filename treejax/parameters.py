"""The parameter tree: one definition of every shape, from which all else derives.

``abstract(config)`` gives shapes and dtypes; initialisation, loading, restoring and memory
accounts follow from it. Parameters are kept layer by layer. Matrices are stored [in, out], so a
layer computes ``x @ w``; embedding and ``lm_head`` are [V, H].

``fuse`` lays matrices that share an input side by side, for decoding: a step of few rows is as fast
as its weights are read, and one long product reads faster than several short ones.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax.config import LINEAR, ModelConfig

FLOAT32_ALWAYS = ("A_log", "dt_bias", "norm_gated")

SHARED_INPUT = (("q", "k", "v"), ("qkv", "z", "b", "a"), ("gate", "up"))
"""Matrices that multiply the same rows: of attention, of a recurrent layer, of an MLP."""


ALIGNMENT = 8
"""Columns of a fused matrix are a multiple of it: kernels copy rows from addresses that 16 bytes
divide. Columns of zeros make up what is missing."""


class Fused(struct.PyTreeNode):
    """Matrices [..., in, width] side by side: [..., in, sum of widths, rounded up]."""

    matrix: jax.Array
    widths: tuple[int, ...] = struct.field(pytree_node=False)

    def split(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """The parts of x [..., columns], a product's or the matrix itself."""
        ends = list(itertools.accumulate(self.widths))
        return tuple(jnp.split(x, ends, axis=-1)[: len(ends)])


def fuse(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with each group of ``SHARED_INPUT`` as one ``Fused`` under "q+k+v" and so on.

    What is fused already stays. The model computes the same from both; training and checkpoints
    use the other form (``unfuse``).
    """

    def join(node: dict[str, Any]) -> dict[str, Any]:
        for names in SHARED_INPUT:
            if set(names) <= node.keys():
                parts = [node.pop(name) for name in names]
                widths = tuple(part.shape[-1] for part in parts)
                numpy: Any = np if isinstance(parts[0], np.ndarray) else jnp  # stays on the host
                missing = -sum(widths) % ALIGNMENT
                if missing:
                    parts.append(numpy.zeros((*parts[0].shape[:-1], missing), parts[0].dtype))
                node["+".join(names)] = Fused(numpy.concatenate(parts, axis=-1), widths)
        return node

    return _rebuild(params, join)


def unfuse(params: dict[str, Any]) -> dict[str, Any]:
    """The inverse of ``fuse``, bit for bit."""

    def part(node: dict[str, Any]) -> dict[str, Any]:
        for name in [name for name, leaf in node.items() if isinstance(leaf, Fused)]:
            fused = node.pop(name)
            node |= zip(name.split("+"), fused.split(fused.matrix), strict=True)
        return node

    return _rebuild(params, part)


def _rebuild(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The tree with every dictionary in it, copied, put through ``change``."""
    if isinstance(node, dict):
        return change({name: _rebuild(child, change) for name, child in node.items()})
    return [_rebuild(child, change) for child in node] if isinstance(node, list) else node


def abstract(config: ModelConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Shapes and dtypes of all parameters as a tree of ``jax.ShapeDtypeStruct``.

    ``A_log``, ``dt_bias`` and the gated norm's weight are float32 whatever ``dtype`` is.
    """
    shapes = _shapes(config)
    return jax.tree_util.tree_map_with_path(
        lambda path, shape: jax.ShapeDtypeStruct(
            shape, jnp.float32 if path[-1].key in FLOAT32_ALWAYS else jnp.dtype(dtype)
        ),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple) and all(isinstance(n, int) for n in node),
    )


def _shapes(config: ModelConfig) -> dict[str, Any]:
    H, V = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embed": (V, H),
        "layers": [
            _layer(config, kind, config.is_moe(i)) for i, kind in enumerate(config.layer_types)
        ],
        "norm": (H,),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = (V, H)
    if config.mtp_num_hidden_layers:
        tree["mtp"] = {
            "norm_embedding": (H,),
            "norm_hidden": (H,),
            "fc": (2 * H, H),
            "layer": _layer(config, "full_attention", config.mtp_moe),
            "norm": (H,),
        }
    return tree


def _layer(config: ModelConfig, kind: str, moe: bool) -> dict[str, Any]:
    return {
        "norm_input": (config.hidden_size,),
        "mixer": _delta_net(config) if kind == LINEAR else _attention(config),
        "norm_post": (config.hidden_size,),
        "mlp": _experts(config) if moe else _mlp(config.hidden_size, config.intermediate_size),
    }


def _delta_net(config: ModelConfig) -> dict[str, Any]:
    H, Hv, C = config.hidden_size, config.linear_num_value_heads, config.conv_channels
    values = Hv * config.linear_value_head_dim
    return {
        "qkv": (H, C),  # columns: all q heads, all k heads, all v heads
        "z": (H, values),
        "b": (H, Hv),
        "a": (H, Hv),
        "conv": (config.linear_conv_kernel_dim, C),  # the last tap is the current token
        "A_log": (Hv,),
        "dt_bias": (Hv,),
        "norm_gated": (config.linear_value_head_dim,),  # plain weight, not an offset from one
        "out": (values, H),
    }


def _attention(config: ModelConfig) -> dict[str, Any]:
    H, D = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
    return {
        "q": (H, 2 * queries),  # columns: per head, D of query and then D of gate
        "k": (H, keys),
        "v": (H, keys),
        "o": (queries, H),
        "norm_q": (D,),
        "norm_k": (D,),
    }


def _mlp(hidden: int, width: int) -> dict[str, Any]:
    return {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}


def _experts(config: ModelConfig) -> dict[str, Any]:
    H, E, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    return {
        "router": (H, E),
        "experts": {"gate": (E, H, width), "up": (E, H, width), "down": (E, width, H)},
        "shared": _mlp(H, config.shared_expert_intermediate_size),
        "shared_gate": (H, 1),
    }


def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random parameters: scaled normal matrices, zero norm offsets, Mamba's gate ranges."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract(config, dtype))
    residual = (2 * config.num_layers) ** -0.5
    made = [
        _init_leaf(path[-1].key, leaf, jax.random.fold_in(key, i), residual)
        for i, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree_util.tree_unflatten(structure, made)


def _init_leaf(name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array, residual: float) -> jax.Array:
    shape, dtype = leaf.shape, leaf.dtype
    if name == "norm_gated":
        return jnp.ones(shape, dtype)
    if name == "A_log":
        return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))
    if name == "dt_bias":  # softplus(dt_bias) is log-uniform between 1e-3 and 1e-1
        step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(1e-1)))
        return step + jnp.log(-jnp.expm1(-step))
    if name.startswith("norm"):
        return jnp.zeros(shape, dtype)
    if name in ("embed", "lm_head"):
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)
    if name == "conv":
        return jax.random.uniform(key, shape, jnp.float32, -0.5, 0.5).astype(dtype)
    scale = shape[-2] ** -0.5 * (residual if name in ("out", "o", "down") else 1.0)
    return (scale * jax.random.normal(key, shape)).astype(dtype)
