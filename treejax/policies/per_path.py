"""Per path: every root-to-leaf path by itself; publishing gathers the accepted state.

The baseline of LumoTree's table of mechanisms ("native path baseline, every node stored"): what an
engine does that can only decode chains. Each path starts from the durable state and runs the native
update, so what paths share is computed again for each of them (58 updates for ``hydra27``, which
has 28 rows). Every node's state is stored; a node on several paths gets the same bits from each.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.walk import RESTART, Walk, plan_paths
from treejax.config import ModelConfig
from treejax.delta_rule import Operands, read, update, value_heads
from treejax.policies.base import Path, Scanned, by_sequence, over_batch
from treejax.policies.snapshot import Snapshot
from treejax.shapes import Array
from treejax.tree import Topology


@dataclasses.dataclass(frozen=True)
class PerPath:
    """The per_path policy.

    Attributes:
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".
    """

    name: ClassVar[str] = "per_path"
    implementation: str = "xla"

    @property
    def _stores(self) -> Snapshot:
        return Snapshot(self.implementation)

    def init(self, R: Array, key_heads: int) -> Array:
        return R

    def plan(self, topology: Topology) -> Walk:
        return plan_paths(topology.parent, topology.size, topology.max_depth)

    def scan(self, carry: Array, layer: int, operands: Operands, plan: Walk) -> Scanned:
        if self.implementation == "xla":
            return Scanned(*by_sequence(scan_every_path)(carry[layer], operands, plan), carry)
        return self._stores.scan(carry, layer, operands, plan)

    def commit(self, carry: Array, scratch: Sequence[Array], path: Path) -> Array:
        return self._stores.commit(carry, scratch, path)

    def read(self, carry: Array) -> Array:
        return carry

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        return self._stores.buffers(config, capacity, batch)


def scan_every_path(R0: Array, operands: Operands, walk: Walk) -> tuple[Array, Array]:
    """Outputs [N, Hv, dv] of one tree, and the states [N + 1, Hv, dv, dk] of its nodes.

    One path after the other, in one loop over their nodes. Row N is a spare one, for the turns of a
    sequence whose walk is over before the batch's longest.
    """
    count, heads = operands.v.shape[:2]

    def visit(t: Array, run: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        R, states, outputs = run
        node = walk.node[t]
        row = jnp.where(t < walk.size, node, count)
        R = jnp.where(walk.load[t] == RESTART, R0, R)
        o = jax.tree.map(lambda x: x[node], operands)
        R = update(R, value_heads(o.k, heads), o.v, o.alpha, o.beta)
        out = read(R, value_heads(o.q, heads))
        return R, states.at[row].set(R), outputs.at[row].set(out)

    states = jnp.zeros((count + 1, *R0.shape), R0.dtype)
    outputs = jnp.zeros((count + 1, *operands.v.shape[1:]), jnp.float32)
    steps = over_batch(walk.size)
    _, states, outputs = lax.fori_loop(0, steps, visit, (R0, states, outputs))
    return outputs[:count], states
