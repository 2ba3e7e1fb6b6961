"""Solve, then replay: verified by a triangular solve, published by the native update.

Outputs come from the WY solve (TreeWY), which reads the durable state once for the whole tree. The
accepted path is replayed over recorded operands (LumoTree), so that the published state is bitwise
what decoding them one by one would have left. Weaver first put the two together.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.policies.base import Path, Scanned, kernel_rows, operand_bytes
from treejax.policies.replay import Recorded, Replay, record
from treejax.policies.wy import WY
from treejax.shapes import Array
from treejax.tree import Topology


@dataclasses.dataclass(frozen=True)
class SolveReplay:
    """The solve_replay policy.

    Attributes:
      precision: of the solve's products: "ieee" is float32; "bf16x3" and "tf32" are for GPUs. The
        published state has none of their error.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".
    """

    name: ClassVar[str] = "solve_replay"
    precision: str = "ieee"
    implementation: str = "xla"

    def __post_init__(self):
        _ = self._solves  # checks the precision

    @property
    def _solves(self) -> WY:
        return WY(self.precision, self.implementation)

    @property
    def _replays(self) -> Replay:
        return Replay(implementation=self.implementation)

    def init(self, R: Array, key_heads: int) -> Array:
        return R

    def plan(self, topology: Topology) -> Topology:
        return self._solves.plan(topology)

    def scan(self, carry: Array, layer: int, operands: Operands, plan: Topology) -> Scanned:
        solved = self._solves.scan(carry, layer, operands, plan)
        return solved._replace(scratch=record(operands))

    def commit(self, carry: Array, scratch: Sequence[Recorded], path: Path) -> Array:
        return self._replays.commit(carry, scratch, path)

    def read(self, carry: Array) -> Array:
        return carry

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        if self.implementation != "xla":
            capacity = kernel_rows(capacity)
        return {"operands": batch * len(config.linear_layers) * capacity * operand_bytes(config)}
