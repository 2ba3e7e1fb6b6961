"""Bytes of recurrent state that a step moves, by policy: the model of the reference, part C.2.

S is a layer's state of one sequence, O its operands. The model counts states, operands and factors
alone and knows nothing of latency, launches or caches. It is what measured times are held against.
"""

import dataclasses
from collections.abc import Callable

from treejax.ablation.lab_operands import Sizes
from treejax.ablation.lab_trees import Shape
from treejax.policies import Policy

FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One step over one tree.

    Attributes:
      nodes, paths, branching: of the tree: T, P (leaves) and C (nodes of two or more children).
      published: rows of the path that is committed.
      commits: how many commits a deferred write waits for.
      item: bytes of an operand's number.
    """

    layers: int
    batch: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    nodes: int
    paths: int
    branching: int
    published: int
    commits: int = 1
    item: int = 2

    @property
    def state(self) -> int:
        """S"""
        return FLOAT * self.value_heads * self.key_dim * self.value_dim

    @property
    def operands(self) -> int:
        """O"""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return self.nodes * (keys + values + 2 * self.value_heads) * self.item

    def bytes(self, form: str) -> int:
        """All layers and sequences of one of ``FORMS``."""
        return round(self.layers * self.batch * FORMS[form](self))


def _deferred(t: Traffic) -> float:
    """The state is read every step and written once in ``commits``; the window is read."""
    window = t.commits * t.published
    factors = window * t.value_heads * (t.key_dim + t.value_dim) * t.item
    return t.state * (1 + 1 / t.commits) + factors + t.operands


FORMS: dict[str, Callable[[Traffic], float]] = {
    "a": lambda t: 2 * t.nodes * t.state,
    "b": lambda t: (t.paths + t.nodes) * t.state,
    "c": lambda t: (t.paths + t.branching + 2) * t.state + t.operands,
    "d": lambda t: 3 * t.state + t.operands,
    "d2": lambda t: 2 * t.state + t.operands,
    "e": lambda t: 3 * t.state + 2 * t.operands,
    "f": _deferred,
}
"""a: a snapshot a node, which reloads its parent. b: the same along paths. c: paths side by side
with cut states, then the native replay. d: depth first in registers, then the replay. d2: d with
the replay inside the next verify. e: solve and commit. f: solve with deferred writes."""


def form_of(policy: str, implementation: str) -> str:
    """Which form a policy of the registry has.

    Replay's kernel walks depth first and its plain form keeps cut states; ``solve_replay`` moves
    what the solve moves.
    """
    if policy == "replay" and implementation == "xla":
        return "c"
    forms = {
        "per_path": "b",
        "snapshot": "a",
        "replay": "d",
        "wy": "e",
        "neumann": "e",
        "solve_replay": "e",
        "fused": "f",
        "ring": "f",
    }
    if policy not in forms:
        raise ValueError(f"the byte model has no form for policy {policy!r}: add it to form_of")
    return forms[policy]


def traffic_of(sizes: Sizes, policy: Policy, shape: Shape, batch: int, published: int) -> Traffic:
    """A step of a policy over one shape of tree, as the laboratory runs it."""
    return Traffic(
        layers=sizes.layers,
        batch=batch,
        key_heads=sizes.key_heads,
        value_heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        nodes=shape.size,
        paths=shape.leaves,
        branching=shape.branching,
        published=published,
        commits=getattr(policy, "length", 1),
        item=sizes.item_bytes(policy.implementation),
    )
