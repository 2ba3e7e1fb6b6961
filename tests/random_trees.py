"""Random and named tree shapes in any packing order, as plain lists of parents.

Row 0 is the root and has parent -1. The other rows are shuffled, so a parent may come after its
child, as the package must allow. Sibling tokens differ.
"""

import numpy as np
from hypothesis import strategies as st
from oracle import depth_of

# The 28-row tree of LumoTree: a spine of five with three candidates each, a suffix tail below the
# spine, and short rescues under the root's two runners-up.
HYDRA27 = [-1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 4, 7, 8, 9, 9, 9, 12, 14, 14, 14, 17, 18, 22, 23, 24,
           25, 26]  # fmt: skip


def chain(size):
    return list(range(-1, size - 1))


def star(size):
    return [-1] + [0] * (size - 1)


def comb(size):
    """A spine with one tooth at every spine node: rows 1, 3, 5.. are spine, 2, 4, 6.. are teeth."""
    return [-1] + [max(0, row - 2 if row % 2 else row - 3) for row in range(1, size)]


def permute(parents, order):
    """Repack: old row ``order[i]`` becomes row i. ``order[0]`` must be 0."""
    place = {int(old): new for new, old in enumerate(order)}
    return [-1 if parents[old] < 0 else place[int(parents[old])] for old in order]


def shuffle(parents, rng):
    """The same tree with rows 1.. in a random order; returns (parents, order)."""
    order = np.concatenate([[0], 1 + rng.permutation(len(parents) - 1)])
    return permute(parents, order), order


def children_first(parents):
    """The most awkward packing: every row but the root comes after its children."""
    order = [0, *sorted(range(1, len(parents)), key=lambda row: -depth_of(parents, row))]
    return permute(parents, order), np.array(order)


def random_parents(rng, size, max_depth=None):
    """A random recursive tree of ``size`` rows, depth at most ``max_depth``, in shuffled order."""
    parents, depth = [-1], [0]
    bound = size if max_depth is None else max_depth
    for _ in range(1, size):
        open_rows = [row for row in range(len(parents)) if depth[row] < bound]
        recent = open_rows[-3:] if rng.random() < 0.5 else open_rows  # deep as well as bushy ones
        parents.append(int(rng.choice(recent)))
        depth.append(depth[parents[-1]] + 1)
    return shuffle(parents, rng)[0]


def random_tokens(rng, parents, vocabulary):
    """A token for every row, distinct among siblings."""
    tokens = np.zeros(len(parents), np.int32)
    for above in set(parents):
        rows = [row for row, parent in enumerate(parents) if parent == above]
        tokens[rows] = rng.choice(vocabulary, size=len(rows), replace=False)
    return tokens


@st.composite
def parent_lists(draw, max_size=31, max_depth=None):
    """Parents of a tree of 1 to ``max_size`` rows: random, chain, star or comb, in any packing."""
    size = draw(st.integers(1, max_size))
    kind = draw(st.sampled_from(["random", "random", "chain", "star", "comb", "backwards"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "random" or max_depth is not None:
        return random_parents(rng, size, max_depth)
    if kind == "backwards":
        return children_first(random_parents(rng, size))[0]
    return shuffle({"chain": chain, "star": star, "comb": comb}[kind](size), rng)[0]


def likely_tree(rng, capacity, depth, vocabulary, future):
    """A random tree in any packing; some nodes hold what will really come, as a good drafter's."""
    parents = random_parents(rng, int(rng.integers(1, capacity + 1)), depth)
    tokens = random_tokens(rng, parents, vocabulary)
    node = 0
    for true in future:
        below = [v for v, above in enumerate(parents) if above == node]
        if not below or rng.random() < 0.15:
            break
        node = int(rng.choice(below))
        for other in below:
            if tokens[other] == true:
                tokens[other] = tokens[node]
        tokens[node] = true
    return tokens, parents
