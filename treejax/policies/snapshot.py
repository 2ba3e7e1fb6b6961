"""Snapshot: node by node, one full state stored per node; publishing gathers the accepted one.

The engines' default. Memory grows with the tree: N states a layer.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from treejax.config import ModelConfig
from treejax.delta_rule import Operands, read, update, value_heads
from treejax.policies.base import Path, over_batch, state_bytes
from treejax.shapes import Array
from treejax.tree import Topology


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The snapshot policy; it has no settings."""

    name: ClassVar[str] = "snapshot"
    commit_together: ClassVar[bool] = False  # stacking the snapshots would copy them all

    def init(self, R: Array) -> Array:
        return R

    def scan(self, carry: Array, operands: Operands, topology: Topology) -> tuple[Array, Array]:
        count, heads = operands.v.shape[:2]
        q, k = value_heads(operands.q, heads), value_heads(operands.k, heads)
        # Row N holds R0, so that the root's parent is a row like any other.
        states = jnp.concatenate([jnp.zeros((count, *carry.shape), carry.dtype), carry[None]])
        outputs = jnp.zeros_like(operands.v)

        def node(rank: Array, both: tuple[Array, Array]) -> tuple[Array, Array]:
            states, outputs = both
            i = topology.order[rank]
            above = jnp.where(topology.parent[i] < 0, count, topology.parent[i])
            R = update(states[above], k[i], operands.v[i], operands.alpha[i], operands.beta[i])
            return states.at[i].set(R), outputs.at[i].set(read(R, q[i]))

        states, outputs = lax.fori_loop(0, over_batch(topology.size), node, (states, outputs))
        return outputs, states

    def commit(self, carry: Array, scratch: Array, path: Path) -> Array:
        last = path.nodes[jnp.maximum(path.length - 1, 0)]
        return jnp.where(path.length > 0, scratch[jnp.maximum(last, 0)], carry)

    def read(self, carry: Array) -> Array:
        return carry

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        layers = len(config.linear_layers)
        return {"states": batch * layers * (capacity + 1) * state_bytes(config)}
