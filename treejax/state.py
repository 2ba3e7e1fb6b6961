"""The durable state S(m) = (R, C, K): what a hybrid model knows of a materialised prefix.

Recurrent matrices R (kept as the policy's carry), convolution history C and attention rows K
describe the same prefix of ``length`` tokens, always. Only ``init_state``, ``prefill``,
``publish``, ``with_policy``, ``reset`` and ``restore_checkpoint`` return a State. The State
carries its policy, so that verifying and publishing cannot disagree about it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax.config import ModelConfig
from treejax.policies import Policy, kernel_problem, make_policy
from treejax.shapes import Array


class State(struct.PyTreeNode):
    """The state of B sequences.

    Attributes:
      recurrent: the policy's carry; for most policies R [Lg, B, Hv, dv, dk] float32.
      conv: [Lg, B, K-1, C] the last inputs of each convolution, oldest first.
      keys, values: [La, B, S+1, Hkv, D]; row S is a spare that absorbs writes of inactive rows.
      length: [B] int32, m.
    """

    recurrent: Any
    conv: Array
    keys: Array
    values: Array
    length: Array
    config: ModelConfig = struct.field(pytree_node=False)
    policy: Policy = struct.field(pytree_node=False)

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    @property
    def max_length(self) -> int:
        """Rows that a sequence can hold."""
        return self.keys.shape[2] - 1

    def recurrent_of(self, layer: int) -> Array:
        """R of one layer (its index among all layers), read through the policy: [B, Hv, dv, dk]."""
        place = _place(self.config.linear_layers, layer, "recurrent")
        return self.policy.read(self.recurrent)[place]

    def conv_of(self, layer: int) -> Array:
        """Convolution history of one layer, oldest first: [B, K-1, C]."""
        return self.conv[_place(self.config.linear_layers, layer, "recurrent")]

    def kv_of(self, layer: int) -> tuple[Array, Array]:
        """(K, V) of one layer in logical order, each [B, S, Hkv, D]; rows past length are junk."""
        place = _place(self.config.full_layers, layer, "attention")
        return self.keys[place, :, :-1], self.values[place, :, :-1]


def _place(layers: tuple[int, ...], layer: int, kind: str) -> int:
    if layer not in layers:
        raise ValueError(f"layer {layer} is no {kind} layer; these are: {layers}")
    return layers.index(layer)


def abstract_state(
    config: ModelConfig, batch: int, max_length: int, dtype: Any = jnp.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a state's arrays, R as such: what initialisation and accounts use."""
    linear, full = len(config.linear_layers), len(config.full_layers)
    heads, dv = config.linear_num_value_heads, config.linear_value_head_dim
    rows = (full, batch, max_length + 1, config.num_key_value_heads, config.head_dim)
    shape = jax.ShapeDtypeStruct
    return {
        "R": shape((linear, batch, heads, dv, config.linear_key_head_dim), jnp.float32),
        "conv": shape(
            (linear, batch, config.linear_conv_kernel_dim - 1, config.conv_channels), dtype
        ),
        "keys": shape(rows, dtype),
        "values": shape(rows, dtype),
        "length": shape((batch,), jnp.int32),
    }


def init_state(
    config: ModelConfig,
    batch: int = 1,
    max_length: int = 2048,
    dtype: Any = jnp.float32,
    policy: str | Policy = "replay",
    implementation: str = "auto",
) -> State:
    """Empty states of ``batch`` sequences that can hold ``max_length`` tokens each.

    Args:
      dtype: of convolution history and attention rows: the model's. R is float32 always.
      policy: a name of ``treejax.policies.REGISTRY`` or a policy object.
      implementation: "auto" is the policy's kernels where they can run, and plain JAX elsewhere;
        "xla" is plain JAX; "mosaic_gpu" the kernels, or an error. A policy object has its own.
    """
    if batch < 1 or max_length < 1:
        raise ValueError(f"batch {batch} and max_length {max_length} must be at least 1")
    policy = make_policy(policy, implementation, kernel_problem(config))
    arrays = {
        name: jnp.zeros(leaf.shape, leaf.dtype)
        for name, leaf in abstract_state(config, batch, max_length, jnp.dtype(dtype)).items()
    }
    carry = policy.init(arrays.pop("R"), config.linear_num_key_heads)
    return State(recurrent=carry, config=config, policy=policy, **arrays)


def with_policy(state: State, policy: str | Policy, implementation: str | None = None) -> State:
    """The same prefix under another policy: ``init(read(.))``.

    implementation: as for ``init_state``; None keeps the state's for a name, the object's own else.
    """
    if implementation is None:
        implementation = state.policy.implementation if isinstance(policy, str) else "auto"
    policy = make_policy(policy, implementation, kernel_problem(state.config))
    R = state.policy.read(state.recurrent)
    carry = policy.init(R, state.config.linear_num_key_heads)
    return state.replace(recurrent=carry, policy=policy)


def reset(state: State, rows: Any) -> State:
    """Empty the sequences ``rows`` (indices, or a mask [B]) so that their slots serve new ones."""
    rows = np.asarray(rows)
    if rows.dtype == bool:
        rows = np.flatnonzero(rows)
    if rows.size and not (0 <= rows.min() and rows.max() < state.batch):
        raise ValueError(f"rows {rows.tolist()} must lie in 0..{state.batch - 1}")
    empty = jnp.zeros(state.batch, bool).at[jnp.asarray(rows, jnp.int32)].set(True)

    def clear(leaf: Array) -> Array:  # axis 1 is the batch
        mask = empty.reshape(1, -1, *[1] * (leaf.ndim - 2))
        return jnp.where(mask, jnp.zeros((), leaf.dtype), leaf)

    R = clear(state.policy.read(state.recurrent))
    return state.replace(
        recurrent=state.policy.init(R, state.config.linear_num_key_heads),
        conv=clear(state.conv),
        keys=clear(state.keys),
        values=clear(state.values),
        length=jnp.where(empty, 0, state.length),
    )


def state_bytes(state: State) -> int:
    """Bytes that the durable state occupies."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))
