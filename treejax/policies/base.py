"""What a state policy is: how a recurrent layer verifies a tree and how its state becomes durable.

A policy is a frozen dataclass of settings with pure functions over a *carry*, what it keeps between
steps. ``scan`` and ``commit`` are written for one sequence and one layer; they run under
``vmap(axis_name="batch")``, so that loops can share one trip count (``over_batch``).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.shapes import Array
from treejax.tree import Topology


class Path(struct.PyTreeNode):
    """One accepted path: nodes [max_depth + 1] int32, -1 padded, and length [] int32."""

    nodes: Array
    length: Array


class Policy(Protocol):
    """The five functions of a policy, and how its commit meets the layers."""

    name: str
    commit_together: bool
    """True: scratch is stacked and one commit serves all layers. False: commit layer by layer,
    for scratch too large to copy."""

    def init(self, R: Array) -> Any:
        """Carry from states R [Lg, B, Hv, dv, dk]; every leaf keeps the two leading axes."""
        ...

    def scan(self, carry: Any, operands: Operands, topology: Topology) -> tuple[Array, Any]:
        """Outputs [N, Hv, dv] float32 of every node, and the scratch that commit needs."""
        ...

    def commit(self, carry: Any, scratch: Any, path: Path) -> Any:
        """The carry after the path; a path of length 0 leaves the carry's bytes as they are."""
        ...

    def read(self, carry: Any) -> Array:
        """The states R that a carry stands for."""
        ...

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        """Bytes of each named buffer that verifying a tree of this capacity needs."""
        ...


def over_batch(bound: Array) -> Array:
    """The largest ``bound`` of the batch, the same for every sequence.

    A loop whose trip count differs by sequence would cost a select over the whole state each turn;
    with the batch's maximum there is one trip count, and rows that are done are masked. The count
    stays data, so no compiler unrolls the loop or merges its body with what surrounds it.
    """
    return lax.pmax(bound, "batch")


def commit_layers(policy: Policy, carry: Any, scratch: Sequence[Any], path: Path) -> Any:
    """Commit one batched path in every recurrent layer: carry [Lg, B, ...], scratch per layer."""
    commit = jax.vmap(policy.commit, axis_name="batch")
    if policy.commit_together:
        stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *scratch)
        return jax.vmap(commit, in_axes=(0, 0, None))(carry, stacked, path)
    layers = [
        commit(jax.tree.map(lambda leaf, i=i: leaf[i], carry), layer, path)
        for i, layer in enumerate(scratch)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def state_bytes(config: ModelConfig) -> int:
    """Bytes of one recurrent state R of one layer and sequence, float32."""
    heads = config.linear_num_value_heads
    return 4 * heads * config.linear_value_head_dim * config.linear_key_head_dim


def operand_bytes(config: ModelConfig) -> int:
    """Bytes of one node's recorded operands (k, v, alpha, beta) in one layer, float32."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads = config.linear_num_value_heads
    return 4 * (keys + heads * config.linear_value_head_dim + 2 * heads)
