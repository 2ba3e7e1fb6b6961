"""Tree shapes of the laboratory, and paths through them.

A shape is its parents, root first (-1). ``pack`` sorts rows by depth, so that parents come before
children whatever the shape, which is the order that kernels are given.
"""

import dataclasses
import heapq
import re
from collections.abc import Sequence

import numpy as np

from pallas_kernels.bench.trees import make_tree
from treejax.drafters.topologies import StaticTree

FORMS = "hydra27, chain, star, caterpillarW, karyW, best, random, or widths such as 3,3,3"
MTP_PROFILE = (0.82, 0.08, 0.03, 0.015)
"""Chance that candidate r of a node is right, r = 0.. (reference, part B); the first decays by
0.93 with every level."""


@dataclasses.dataclass(frozen=True)
class Shape(StaticTree):
    """A tree whose rows are sorted by depth; every row is a node."""

    @property
    def size(self) -> int:
        return self.capacity

    @property
    def leaves(self) -> int:
        """Root-to-leaf paths."""
        return self.size - len(set(self.parents[1:]))

    @property
    def branching(self) -> int:
        """Nodes with at least two children: the cut states of a path-parallel scan."""
        above = self.parents[1:]
        return sum(above.count(row) >= 2 for row in set(above))

    @property
    def deepest(self) -> tuple[int, ...]:
        """The path to the deepest node, the lowest row among equals."""
        return self.path(self.depths.index(self.max_depth))


def pack(name: str, parents: Sequence[int]) -> Shape:
    """The same tree with its rows sorted by depth, siblings in their order."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    order = sorted(range(len(parents)), key=lambda row: depths[row])
    place = {old: new for new, old in enumerate(order)}
    return Shape(name, tuple(-1 if parents[old] < 0 else place[parents[old]] for old in order))


def make_shape(form: str, size: int, most_depth: int, seed: int = 0) -> Shape:
    """A tree of a form; ``size`` counts the root and is ignored by hydra27 and by widths.

    No node lies below ``most_depth``: chains are cut there, spines and random trees turn wide.

    Raises:
      ValueError: an unknown form, or a tree that needs more depth.
    """
    name = f"{form}:{size}"
    if form == "hydra27":
        made = pack(form, make_tree("hydra27").parents)
    elif re.fullmatch(r"\d+(,\d+)*", form):
        made = full_tree([int(width) for width in form.split(",")])
    elif form == "chain":
        made = Shape(name, tuple(range(-1, min(size, most_depth + 1) - 1)))
    elif form == "star":
        made = Shape(name, (-1, *[0] * (size - 1)))
    elif match := re.fullmatch(r"caterpillar(\d+)", form):
        made = pack(name, _caterpillar(size, max(2, int(match[1])), most_depth))
    elif match := re.fullmatch(r"kary(\d+)", form):
        width = max(1, int(match[1]))
        made = Shape(name, tuple(-1 if row == 0 else (row - 1) // width for row in range(size)))
    elif form == "best":
        made = pack(name, _best_first(size, most_depth))
    elif form == "random":
        made = pack(name, _random(size, most_depth, seed))
    else:
        raise ValueError(f"tree {form!r} is unknown, expected one of: {FORMS}")
    if made.max_depth > most_depth:
        raise ValueError(
            f"tree {made.name} has depth {made.max_depth}, above the bound {most_depth}"
        )
    return made


def full_tree(widths: Sequence[int]) -> Shape:
    """Every node of depth d has ``widths[d]`` children: TreeWY's (w1, w2, w3)."""
    parents, level = [-1], [0]
    for width in widths:
        above, level = level, []
        for node in above:
            for _ in range(width):
                level.append(len(parents))
                parents.append(node)
    return Shape(",".join(map(str, widths)), tuple(parents))


def _caterpillar(size: int, width: int, most_depth: int) -> list[int]:
    """A spine with ``width`` candidates at each node; what is left hangs at its foot."""
    parents, spine = [-1], [0]
    while len(parents) < size and len(spine) <= most_depth:
        first = len(parents)
        parents += [spine[-1]] * min(width, size - len(parents))
        spine.append(first)
    foot = spine[-2] if len(spine) > 1 else 0
    return parents + [foot] * (size - len(parents))


def _best_first(size: int, most_depth: int) -> list[int]:
    """The ``size - 1`` candidates of largest chance under ``MTP_PROFILE``."""
    parents, depths = [-1], [0]
    heap: list[tuple[float, int, int]] = []

    def offer(node: int, chance: float) -> None:
        if depths[node] == most_depth:
            return
        for rank, own in enumerate(MTP_PROFILE):
            grown = own * 0.93 ** depths[node] if rank == 0 else own
            heapq.heappush(heap, (-chance * grown, node, rank))

    offer(0, 1.0)
    while len(parents) < size:
        chance, parent, _ = heapq.heappop(heap)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        offer(len(parents) - 1, -chance)
    return parents


def _random(size: int, most_depth: int, seed: int) -> list[int]:
    """A node continues the previous row half of the time, else any row that is not too deep."""
    rng = np.random.default_rng([seed, size])
    parents, depths = [-1], [0]
    for row in range(1, size):
        open_rows = [i for i in range(row) if depths[i] < most_depth]
        last = open_rows[-1]
        parents.append(last if rng.random() < 0.5 else int(rng.choice(open_rows)))
        depths.append(depths[parents[-1]] + 1)
    return parents
