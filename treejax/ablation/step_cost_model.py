"""A hybrid model by its sizes: random weights and random states, made on the device.

Weights are filled leaf by leaf by one small program for each distinct shape, so that a model of 27
billion parameters is there in seconds. The names that matter are those of ``parameters.init``;
whatever else there is, fused projections included, is a matrix scaled by its inputs. What writes
into the residual stream is scaled down by the number of layers: activations stay of order one.

One token, ``REFRAIN``, always follows itself: its embedding is large and its row of ``lm_head``
points the same way. What a scripted drafter gets right is then an input of an experiment, which
rounding cannot change, and the programs are those of any other text.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from treejax import parameters
from treejax.config import FULL, LINEAR, ModelConfig
from treejax.model import Model
from treejax.policies import Policy
from treejax.state import State, abstract_state

REFRAIN = 7
"""The token that follows itself."""

LOUD = 16.0
"""Scale of its embedding beside branches that add up to about one."""

LARGE, MOST_PIECES = 1 << 24, 64
"""Elements above which a leaf is made in pieces, and how many at most."""

STATE_SCALE = {"R": 0.1, "conv": 1.0, "keys": 1.0, "values": 1.0}
"""Of random states: keys leave a norm, values and convolution inputs a projection."""


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """A dense hybrid with an MTP head; the defaults are those of Qwen3.8-27B.

    Attributes:
      attention_every: every so many layers one of attention, the others recurrent.
      fused: lay projections that share an input side by side (``parameters.fuse``).
    """

    layers: int = 64
    attention_every: int = 4
    hidden_size: int = 5120
    intermediate_size: int = 17408
    heads: int = 24
    key_value_heads: int = 4
    head_dim: int = 256
    value_heads: int = 48
    key_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    conv: int = 4
    vocabulary: int = 248_320
    fused: bool = True
    dtype: str = "bfloat16"

    def __post_init__(self):
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}, expected float32 or bfloat16")
        if not 2 <= self.attention_every <= self.layers:
            raise ValueError(
                f"attention_every is {self.attention_every}, expected 2 to {self.layers}: a hybrid "
                "has layers of both kinds"
            )

    @property
    def config(self) -> ModelConfig:
        every = self.attention_every
        return ModelConfig(
            family="qwen3_5",
            vocab_size=self.vocabulary,
            hidden_size=self.hidden_size,
            layer_types=tuple(FULL if (i + 1) % every == 0 else LINEAR for i in range(self.layers)),
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            linear_num_key_heads=self.key_heads,
            linear_num_value_heads=self.value_heads,
            linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim,
            linear_conv_kernel_dim=self.conv,
            rotary_dim=self.head_dim // 4,
            max_position_embeddings=1 << 18,
            mtp_num_hidden_layers=1,
        )


def abstract_params(sizes: ModelSizes) -> dict[str, Any]:
    """Shapes and dtypes of the parameters as decoding takes them."""
    wanted = parameters.abstract(sizes.config, sizes.dtype)
    return jax.eval_shape(parameters.fuse, wanted) if sizes.fused else wanted


def make_model(sizes: ModelSizes, seed: int) -> Model:
    """Random weights on the device, and the refrain."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_params(sizes))
    key, residual = jax.random.key(seed), (2 * sizes.layers) ** -0.5
    made = [
        _make_leaf(_name(path), leaf, jax.random.fold_in(key, i), residual)
        for i, (path, leaf) in enumerate(leaves)
    ]
    params = jax.tree_util.tree_unflatten(structure, made)
    voice = jax.random.normal(jax.random.fold_in(key, len(leaves)), (sizes.hidden_size,))
    params["embed"] = _set_row(params["embed"], LOUD * voice)
    params["lm_head"] = _set_row(params["lm_head"], 0.02 * voice)
    return Model(params, sizes.config)


def make_state(
    config: ModelConfig, dtype: str, batch: int, rows: int, policy: Policy, seed: int
) -> State:
    """A state of ``batch`` sequences with room for ``rows`` tokens, all random; the length is 0.

    The same seed gives the same surfaces under any policy.
    """
    made, key = {}, jax.random.key(seed)
    for i, (name, leaf) in enumerate(abstract_state(config, batch, rows, jnp.dtype(dtype)).items()):
        if name == "length":
            made[name] = jnp.zeros(batch, jnp.int32)
        else:
            scale = jnp.float32(STATE_SCALE[name])
            made[name] = _normal(jax.random.fold_in(key, i), scale, leaf.shape, leaf.dtype)
    carry = _begin(made.pop("R"), policy, config.linear_num_key_heads)
    return State(recurrent=carry, config=config, policy=policy, **made)


def weight_bytes(params: dict[str, Any]) -> int:
    """Bytes that a plain step reads of the weights: all but the head's and, of the embedding, all
    rows but a few."""
    parts = {name: part for name, part in params.items() if name not in ("embed", "mtp")}
    return _bytes(parts)


def all_bytes(tree: Any) -> int:
    """Bytes of all arrays, abstract ones too."""
    return _bytes(tree)


def read_bytes(config: ModelConfig, params: dict[str, Any], batch: int, context: int) -> Any:
    """What one step must read, by name: weights, states, convolution history, keys and values."""
    item = jnp.dtype(params["embed"].dtype).itemsize
    recurrent, attention = len(config.linear_layers), len(config.full_layers)
    heads = config.linear_num_value_heads * config.linear_key_head_dim
    row = config.num_key_value_heads * config.head_dim
    history = (config.linear_conv_kernel_dim - 1) * config.conv_channels
    return {
        "weights": weight_bytes(params),
        "states": 4 * recurrent * batch * heads * config.linear_value_head_dim,
        "conv": item * recurrent * batch * history,
        "kv": 2 * item * attention * batch * context * row,
    }


def _bytes(tree: Any) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _name(path: tuple[Any, ...]) -> str:
    """The last name in a leaf's path; the parts of a fused matrix share one."""
    return [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)][-1]


def _make_leaf(name: str, leaf: Any, key: jax.Array, residual: float) -> jax.Array:
    shape, dtype = leaf.shape, leaf.dtype
    if name == "norm_gated":
        return jnp.ones(shape, dtype)
    if name.startswith("norm"):  # an offset from one
        return jnp.zeros(shape, dtype)
    if name in ("A_log", "dt_bias"):
        return _gate(key, name, shape, dtype)
    if name == "conv":
        return _taps(key, shape, dtype)
    if name in ("embed", "lm_head"):
        scale = 0.02
    else:
        scale = shape[-2] ** -0.5 * (residual if name in ("out", "o", "down") else 1.0)
    return _normal(key, jnp.float32(scale), shape, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, scale: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    def piece(key: jax.Array) -> jax.Array:
        return (scale * jax.random.normal(key, (rows, *shape[1:]), jnp.float32)).astype(dtype)

    # In pieces, or the float32 values of the largest leaf would be the peak of all memory.
    pieces = math.gcd(shape[0], MOST_PIECES) if math.prod(shape) > LARGE else 1
    rows = shape[0] // pieces
    return jax.lax.map(piece, jax.random.split(key, pieces)).reshape(shape)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _taps(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, -0.5, 0.5).astype(dtype)


@functools.partial(jax.jit, static_argnames=("name", "shape", "dtype"))
def _gate(key: jax.Array, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Mamba's ranges, as ``parameters.init`` has them: A in 1..16, and softplus(dt_bias)
    log-uniform between 1e-3 and 1e-1."""
    if name == "A_log":
        return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))


@functools.partial(jax.jit, donate_argnums=0)
def _set_row(table: jax.Array, row: jax.Array) -> jax.Array:
    return table.at[REFRAIN].set(row.astype(table.dtype))


@functools.partial(jax.jit, static_argnames=("policy", "key_heads"))
def _begin(R: jax.Array, policy: Policy, key_heads: int) -> Any:
    return policy.init(R, key_heads)
