"""The trees that are timed: their parents, capacities and the path that is published.

Rows are packed parents first, row 0 is the root (parent -1). Random trees are drawn from a seed of
their own, so that they are the same in every run.
"""

import dataclasses
import functools

import numpy as np

ACCEPTED = 5
"""Candidates accepted by the published path; the root is published with them."""

# A spine of five with three candidates each, a suffix tail below it, and rescues under the
# runners-up of the root.
_HYDRA27 = (
    -1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 4, 7, 8, 9, 9, 9, 12, 14, 14, 14, 17, 18, 22, 23, 24, 25, 26,
)  # fmt: skip

NAMES = ("hydra27", "chain28", "random64", "random128")


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree of ``size`` nodes in a capacity of rows."""

    name: str
    parents: tuple[int, ...]
    capacity: int

    @property
    def size(self) -> int:
        return len(self.parents)

    def path_to(self, node: int) -> list[int]:
        """Node ids from the root down to ``node``, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    @functools.cached_property
    def leaf_paths(self) -> list[list[int]]:
        """Every root-to-leaf path, longest first."""
        leaves = sorted(set(range(self.size)) - set(self.parents))
        return sorted(map(self.path_to, leaves), key=len, reverse=True)

    @property
    def bound(self) -> int:
        """The length of the longest path."""
        return len(self.leaf_paths[0])

    @property
    def published(self) -> list[int]:
        """The path that publishing rows commit: the root and ``ACCEPTED`` nodes of the longest."""
        return self.leaf_paths[0][: ACCEPTED + 1]

    def ancestors(self) -> np.ndarray:
        """[N, N] bool: whether column j is row i or above it; False for inactive rows."""
        mask = np.zeros((self.capacity, self.capacity), bool)
        for node in range(self.size):
            mask[node, self.path_to(node)] = True
        return mask

    def padded_parents(self) -> np.ndarray:
        """[N] int32, -1 for inactive rows."""
        padded = np.full(self.capacity, -1, np.int32)
        padded[: self.size] = self.parents
        return padded


def make_tree(name: str) -> Tree:
    if name == "hydra27":
        return Tree(name, _HYDRA27, 32)
    if name == "chain28":
        return Tree(name, tuple(range(-1, 27)), 32)
    if name in ("random64", "random128"):
        size = int(name.removeprefix("random"))
        return Tree(name, _random_parents(size), size)
    raise ValueError(f"tree {name!r} is unknown, expected one of: {', '.join(NAMES)}")


def _random_parents(size: int) -> tuple[int, ...]:
    """Deep and bushy: a node continues the previous row nine times in ten, else any row."""
    rng = np.random.default_rng(size)
    parents = [-1]
    for row in range(1, size):
        parents.append(row - 1 if rng.random() < 0.9 else int(rng.integers(row)))
    return tuple(parents)
