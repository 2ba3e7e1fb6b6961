"""Fused: accepted factors are buffered and applied inside the next verify.

What SpecLA and TreeWY's kernel do: a step reads each state once and writes it once, and publishing
moves no state. It is a ring that holds one commit.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.policies.base import Path, Scanned
from treejax.policies.ring import Checkpoint, Ring, Rows
from treejax.shapes import Array
from treejax.tree import Topology


@dataclasses.dataclass(frozen=True)
class Fused:
    """The fused policy.

    Attributes:
      rows: of the buffer. A path that may be longer than this is written at once.
      precision, keys, implementation: as for ``Ring``.
    """

    name: ClassVar[str] = "fused"
    rows: int = 16
    precision: str = "ieee"
    keys: str = "float32"
    implementation: str = "xla"

    def __post_init__(self):
        _ = self._ring  # checks the settings

    @property
    def _ring(self) -> Ring:
        return Ring(1, self.rows, self.precision, self.keys, self.implementation)

    def init(self, R: Array, key_heads: int) -> Checkpoint:
        return self._ring.init(R, key_heads)

    def plan(self, topology: Topology) -> Topology:
        return topology

    def scan(self, carry: Checkpoint, layer: int, operands: Operands, plan: Topology) -> Scanned:
        return self._ring.scan(carry, layer, operands, plan)

    def commit(self, carry: Checkpoint, scratch: Sequence[Rows], path: Path) -> Checkpoint:
        return self._ring.commit(carry, scratch, path)

    def read(self, carry: Checkpoint) -> Array:
        return self._ring.read(carry)

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        return self._ring.buffers(config, capacity, batch)
