"""Replay: a path-parallel scan with cut states; publishing replays the native update (LumoTree).

Verifying keeps states only where paths branch, and only while it runs. What lasts is the operands
of each node. Publishing starts from the durable state and applies the single-token update to the
recorded operands of the accepted path, so the published state is bitwise what decoding those
operands one by one would have left.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from pallas_kernels import walk
from treejax.config import ModelConfig
from treejax.delta_rule import Operands, read, update, value_heads
from treejax.paths import PathSchedule, cut_slots, schedule
from treejax.policies.base import (
    Path,
    Scanned,
    by_sequence,
    kernel_rows,
    operand_bytes,
    over_batch,
    stack,
    state_bytes,
)
from treejax.shapes import Array
from treejax.tree import Topology


class Recorded(struct.PyTreeNode):
    """Operands kept for the replay: k [B, N, Hk, dk], v [B, N, Hv, dv], alpha, beta [B, N, Hv]."""

    k: Array
    v: Array
    alpha: Array
    beta: Array


def record(operands: Operands) -> Recorded:
    """What the replay of any of these rows will need."""
    return Recorded(operands.k, operands.v, operands.alpha, operands.beta)


@dataclasses.dataclass(frozen=True)
class Replay:
    """The replay policy.

    Attributes:
      lanes: paths of one level that run side by side in "xla". On a CPU a lane that has no path
        costs as much as one that has. The kernel walks a tree depth first and has no lanes.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".
    """

    name: ClassVar[str] = "replay"
    lanes: int = 4
    implementation: str = "xla"

    def init(self, R: Array, key_heads: int) -> Array:
        return R

    def plan(self, topology: Topology) -> Any:
        if self.implementation == "xla":
            bound = topology.parent.shape[1] - 1
            return by_sequence(lambda one: schedule(one, bound))(topology)
        return walk.plan(topology.parent, topology.size)

    def scan(self, carry: Array, layer: int, operands: Operands, plan: Any) -> Scanned:
        o = operands
        recorded = record(o)
        if self.implementation == "xla":
            scan = functools.partial(scan_paths, lanes=self.lanes)
            return Scanned(by_sequence(scan)(carry[layer], o, plan), recorded, carry)
        from pallas_kernels.path_scan import path_scan

        at, how = jnp.int32(layer), self.implementation
        out = path_scan(carry, at, o.q, o.k, o.v, o.alpha, o.beta, plan, implementation=how)
        return Scanned(out, recorded, carry)

    def commit(self, carry: Array, scratch: Sequence[Recorded], path: Path) -> Array:
        if self.implementation == "xla":
            together = jax.vmap(by_sequence(replay_path), in_axes=(0, 0, None))
            return together(carry, stack(scratch), path)
        from pallas_kernels.replay import replay

        rows = stack(scratch)
        recorded = rows.k, rows.v, rows.alpha, rows.beta
        how = self.implementation
        return replay(carry, *recorded, path.nodes, path.length, implementation=how)

    def read(self, carry: Array) -> Array:
        return carry

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        if self.implementation == "xla":
            slots = cut_slots(capacity)
        else:  # at most; the kernel keeps the first two on the chip
            capacity, slots = kernel_rows(capacity), walk.slots(capacity)
        rows = batch * len(config.linear_layers) * capacity
        return {
            "cut_states": batch * slots * state_bytes(config),  # reused by all layers
            "operands": rows * operand_bytes(config),
        }


def scan_paths(R0: Array, operands: Operands, plan: PathSchedule, lanes: int) -> Array:
    """Outputs [N, Hv, dv] of every node of one tree, paths of a level side by side.

    Groups of at most ``lanes`` paths of one level run together, level after level. Each lane
    carries its state along its path and leaves it in a cut slot where other paths start.
    """
    count, heads = operands.v.shape[:2]
    lanes = min(lanes, count)
    spare_row = jax.tree.map(lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1)), operands)
    q, k = value_heads(spare_row.q, heads), value_heads(spare_row.k, heads)
    v, alpha, beta = spare_row.v, spare_row.alpha, spare_row.beta

    rows = jnp.arange(count)
    in_level = rows - jnp.searchsorted(plan.level, plan.level, side="left")
    opens = (in_level % lanes == 0) & (rows < plan.count)
    group = jnp.cumsum(opens) - 1
    first = jnp.full(count + 1, count).at[jnp.where(opens, group, count)].set(rows)
    groups = opens.sum()

    def run_group(g: Array, both: tuple[Array, Array]) -> tuple[Array, Array]:
        cuts, outputs = both
        path = first[g] + jnp.arange(lanes)
        mine = (path < plan.count) & (group[jnp.minimum(path, count - 1)] == g) & (g < groups)
        path = jnp.minimum(path, count - 1)
        length = jnp.where(mine, plan.length[path], 0)

        def advance(t: Array, run: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            R, cuts, outputs = run
            node = jnp.where(t < length, plan.nodes[path, t], count)
            R = jax.vmap(update)(R, k[node], v[node], alpha[node], beta[node])
            outputs = outputs.at[node].set(jax.vmap(read)(R, q[node]))
            return R, cuts.at[plan.cut_slot[node]].set(R), outputs

        start = cuts[jnp.where(mine, plan.source[path], plan.spare)]
        _, cuts, outputs = lax.fori_loop(
            0, over_batch(length.max()), advance, (start, cuts, outputs)
        )
        return cuts, outputs

    cuts = jnp.zeros((cut_slots(count), *R0.shape), R0.dtype).at[0].set(R0)
    outputs = jnp.zeros_like(v)
    return lax.fori_loop(0, over_batch(groups), run_group, (cuts, outputs))[1][:count]


def replay_path(R: Array, recorded: Recorded, path: Path) -> Array:
    """Apply the native update to the recorded operands of one path, in order."""
    heads = recorded.v.shape[1]

    def step(t: Array, R: Array) -> Array:
        node = jnp.maximum(path.nodes[t], 0)
        k = value_heads(recorded.k[node], heads)
        new = update(R, k, recorded.v[node], recorded.alpha[node], recorded.beta[node])
        return jnp.where(t < path.length, new, R)

    return lax.fori_loop(0, over_batch(path.length), step, R)
