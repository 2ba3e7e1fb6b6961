"""The bytes that an operation cannot avoid moving: the floor that its time is held against.

Counted, over all layers and sequences: states read and written, operands of the rows that take
part, and what the contract says is written. Outputs count the whole capacity, because inactive rows
must be zero. Not counted: tables of node ids (ancestors, walk, path), far below a percent, and
states that an implementation keeps on the way. A pair of operations moves the bytes of both.
"""

import dataclasses

from pallas_kernels.bench.settings import Settings
from pallas_kernels.bench.trees import Tree

FLOAT = 4
CONV_WIDTH = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many there are of everything; ``item`` is the width of q, k and v in bytes."""

    layers: int
    batch: int
    nodes: int
    capacity: int
    path: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    item: int

    @property
    def states(self) -> int:
        """The recurrent states of all layers, once."""
        return self._of(1, self.value_heads * self.value_dim * self.key_dim, FLOAT)

    def keys(self, rows: int) -> int:
        """Queries or keys of so many rows."""
        return self._of(rows, self.key_heads * self.key_dim, self.item)

    def values(self, rows: int) -> int:
        return self._of(rows, self.value_heads * self.value_dim, self.item)

    def gates(self, rows: int) -> int:
        """Decays or write strengths."""
        return self._of(rows, self.value_heads, FLOAT)

    def outputs(self, rows: int) -> int:
        """Outputs or pseudo-values: float32 in the shape of the values."""
        return self._of(rows, self.value_heads * self.value_dim, FLOAT)

    def _of(self, rows: int, width: int, item: int) -> int:
        return self.layers * self.batch * rows * width * item


def sizes_of(settings: Settings, batch: int, tree: Tree, layers: int) -> Sizes:
    return Sizes(
        layers=layers,
        batch=batch,
        nodes=tree.size,
        capacity=tree.capacity,
        path=len(tree.published),
        key_heads=settings.key_heads,
        value_heads=settings.value_heads,
        key_dim=settings.key_dim,
        value_dim=settings.value_dim,
        item=2 if settings.dtype == "bfloat16" else 4,
    )


def floor_bytes(operation: str, sizes: Sizes) -> int:
    """The floor of an operation, or of several joined by ``+``."""
    return sum(_FLOORS[part](sizes) for part in operation.split("+"))


def _path_scan(s: Sizes) -> int:
    operands = 2 * s.keys(s.nodes) + s.values(s.nodes) + 2 * s.gates(s.nodes)
    return s.states + operands + s.outputs(s.capacity)


def _node_scan(s: Sizes) -> int:
    return _path_scan(s) + s.nodes * s.states


def _wy_solve(s: Sizes) -> int:
    return _path_scan(s) + s.outputs(s.nodes)


def _replay(s: Sizes) -> int:
    return 2 * s.states + s.keys(s.path) + s.values(s.path) + 2 * s.gates(s.path)


def _wy_commit(s: Sizes) -> int:
    return 2 * s.states + s.keys(s.path) + s.outputs(s.path) + s.gates(s.path)


def _wy_commit_solve(s: Sizes) -> int:
    return _wy_solve(s) + _wy_commit(s) - s.states  # the state is read once for both


def _chain(s: Sizes) -> int:
    """A recurrence along all nodes that returns the last state: what the peers' chains do."""
    return _path_scan(s) + s.states


def _tree_conv(s: Sizes) -> int:
    channels = 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim
    read = channels * s.item * (s.batch * (s.nodes + CONV_WIDTH - 1) + CONV_WIDTH)
    written = channels * FLOAT * s.batch * s.nodes
    return (
        s.layers * (read + written) + 2 * s.gates(s.nodes) // FLOAT * s.item + 3 * s.gates(s.nodes)
    )


_FLOORS = {
    "path_scan": _path_scan,
    "node_scan": _node_scan,
    "wy_solve": _wy_solve,
    "replay": _replay,
    "wy_commit": _wy_commit,
    "wy_commit_solve": _wy_commit_solve,
    "chain": _chain,
    "tree_conv": _tree_conv,
}
