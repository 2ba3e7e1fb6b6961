"""The shape of fixed size that accepts most, from measured acceptance by depth and rank.

With a[d][r] the chance that a node's child of rank r is accepted at depth d + 1, given that the
node was, the expected number of accepted candidates is a sum over nodes of products of a along
their paths. It is additive, so the N largest products are optimal, and they hold their parents,
since products fall along a path: Sequoia's dynamic program (arXiv 2402.12374) finds the same tree
(reference, part B).
"""

import heapq
from collections.abc import Sequence

from treejax.drafters.topologies import StaticTree


def optimal_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree of at most ``nodes`` candidates with the largest path products.

    Args:
      acceptance: [D][R], ``acceptance[d][r]`` in [0, 1] for the child of rank r of a node of depth
        d. Ranks are filled in order, so that a rank better than one before it counts as that one.
      nodes: candidates, the root not counted; fewer if no more have a product above 0.

    Raises:
      ValueError: one line: no depths, a number that is no chance, or no candidate worth having.
    """
    if nodes < 1 or not acceptance:
        raise ValueError(f"{nodes} nodes over {len(acceptance)} depths, expected 1 or more of each")
    for d, row in enumerate(acceptance):
        if any(not 0.0 <= chance <= 1.0 for chance in row):
            raise ValueError(f"acceptance at depth {d} is {list(row)}, expected numbers in [0, 1]")
    falling = [[min(row[: r + 1]) for r in range(len(row))] for row in acceptance]
    parents, depths = [-1], [0]
    # Entries: (-product, depth, parent's row, rank). A child of rank r waits for the one of r - 1.
    waiting: list[tuple[float, int, int, int]] = []

    def offer(value: float, parent: int, rank: int) -> None:
        depth = depths[parent]
        if depth < len(falling) and rank < len(falling[depth]) and falling[depth][rank] > 0:
            heapq.heappush(waiting, (-value * falling[depth][rank], depth, parent, rank))

    values = [1.0]
    offer(1.0, 0, 0)
    while waiting and len(parents) <= nodes:
        value, depth, parent, rank = heapq.heappop(waiting)
        parents.append(parent)
        depths.append(depth + 1)
        values.append(-value)
        offer(values[parent], parent, rank + 1)
        offer(-value, len(parents) - 1, 0)
    if len(parents) == 1:
        raise ValueError("no candidate is ever accepted: propose nothing instead of a tree")
    return _breadth_first(parents, depths)


def expected_accepted(tree: StaticTree, acceptance: Sequence[Sequence[float]]) -> float:
    """E[accepted candidates] of a step with this tree: the sum of its path products."""
    products = [1.0]
    for row in range(1, tree.capacity):
        depth, rank = tree.depths[row] - 1, tree.ranks[row]
        inside = depth < len(acceptance) and rank < len(acceptance[depth])
        chance = acceptance[depth][rank] if inside else 0.0
        products.append(products[tree.parents[row]] * chance)
    return sum(products[1:])


def _breadth_first(parents: list[int], depths: list[int]) -> StaticTree:
    order = sorted(range(len(parents)), key=lambda row: (depths[row], row))
    place = {row: i for i, row in enumerate(order)}
    moved = tuple(-1 if row == 0 else place[parents[row]] for row in order)
    return StaticTree(f"optimal{len(parents) - 1}x{max(depths)}", moved)
