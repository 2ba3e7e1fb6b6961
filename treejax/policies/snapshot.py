"""Snapshot: node by node, one full state stored per node; publishing gathers the accepted one.

The engines' default. Memory grows with the tree: N states a layer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from pallas_kernels import walk
from treejax.config import ModelConfig
from treejax.delta_rule import Operands, read, update, value_heads
from treejax.policies.base import (
    Path,
    Scanned,
    by_sequence,
    kernel_rows,
    over_batch,
    stack,
    state_bytes,
)
from treejax.shapes import Array
from treejax.tree import Topology


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The snapshot policy.

    Attributes:
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".
    """

    name: ClassVar[str] = "snapshot"
    implementation: str = "xla"

    def init(self, R: Array, key_heads: int) -> Array:
        return R

    def plan(self, topology: Topology) -> Any:
        if self.implementation == "xla":
            return topology
        return walk.plan(topology.parent, topology.size)

    def scan(self, carry: Array, layer: int, operands: Operands, plan: Any) -> Scanned:
        if self.implementation == "xla":
            return Scanned(*by_sequence(scan_nodes)(carry[layer], operands, plan), carry)
        from pallas_kernels.node_scan import node_scan

        o, at, how = operands, jnp.int32(layer), self.implementation
        made = node_scan(carry, at, o.q, o.k, o.v, o.alpha, o.beta, plan, implementation=how)
        return Scanned(*made, carry)

    def commit(self, carry: Array, scratch: Sequence[Array], path: Path) -> Array:
        # Layer by layer: stacking the snapshots would copy them all.
        gather = by_sequence(gather_last)
        return stack([gather(carry[i], states, path) for i, states in enumerate(scratch)])

    def read(self, carry: Array) -> Array:
        return carry

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        # Plain JAX has one row more, which holds R0.
        rows = capacity + 1 if self.implementation == "xla" else kernel_rows(capacity)
        return {"states": batch * len(config.linear_layers) * rows * state_bytes(config)}


def scan_nodes(R0: Array, operands: Operands, topology: Topology) -> tuple[Array, Array]:
    """Outputs [N, Hv, dv] of one tree, and the states [N + 1, Hv, dv, dk] of its nodes.

    Row N holds R0, so that the root's parent is a row like any other.
    """
    count, heads = operands.v.shape[:2]
    q, k = value_heads(operands.q, heads), value_heads(operands.k, heads)
    states = jnp.concatenate([jnp.zeros((count, *R0.shape), R0.dtype), R0[None]])
    outputs = jnp.zeros_like(operands.v)

    def node(rank: Array, both: tuple[Array, Array]) -> tuple[Array, Array]:
        states, outputs = both
        i = topology.order[rank]
        above = jnp.where(topology.parent[i] < 0, count, topology.parent[i])
        R = update(states[above], k[i], operands.v[i], operands.alpha[i], operands.beta[i])
        return states.at[i].set(R), outputs.at[i].set(read(R, q[i]))

    states, outputs = lax.fori_loop(0, over_batch(topology.size), node, (states, outputs))
    return outputs, states


def gather_last(R0: Array, states: Array, path: Path) -> Array:
    """The state of a path's last node, R0 if it has none."""
    last = path.nodes[jnp.maximum(path.length - 1, 0)]
    return jnp.where(path.length > 0, states[jnp.maximum(last, 0)], R0)
