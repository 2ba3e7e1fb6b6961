"""The depth-first program of a tree: run symbolically, it hands every node its parent's state."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from oracle import depth_of, path_to
from random_trees import (
    HYDRA27,
    chain,
    children_first,
    comb,
    parent_lists,
    random_parents,
    shuffle,
    star,
)

from pallas_kernels.walk import RESTART, path_steps, plan, plan_paths, slots

PLAN = jax.jit(plan)
PLAN_PATHS = jax.jit(plan_paths, static_argnums=2)


def binary(levels):
    """The complete binary tree: the worst case for saved states."""
    return [-1] + [(row - 1) // 2 for row in range(1, 2**levels - 1)]


def pack(trees, capacity):
    parent = np.full((len(trees), capacity), -1, np.int32)
    for b, tree in enumerate(trees):
        parent[b, : len(tree)] = tree
    return jnp.asarray(parent), jnp.asarray([len(tree) for tree in trees], jnp.int32)


def make_plan(trees, capacity):
    return jax.tree.map(np.asarray, PLAN(*pack(trees, capacity)))


def run(walk, b):
    """Visit the nodes with names for states; returns {node: whose state it continued}."""
    hand, saved, continued = -1, {}, {}
    for t in range(walk.size[b]):
        node, load, save = (int(x[b, t]) for x in (walk.node, walk.load, walk.save))
        if load >= 0:
            hand = saved[load]
        continued[node] = hand
        hand = node
        if save >= 0:
            saved[save] = node
    return continued


def check(trees, capacity):
    walk = make_plan(trees, capacity)
    for b, tree in enumerate(trees):
        size = len(tree)
        assert walk.size[b] == size
        assert run(walk, b) == dict(enumerate(tree))
        assert sorted(walk.node[b]) == list(range(capacity))
        assert list(walk.node[b, size:]) == list(range(size, capacity))
        assert walk.save[b].max() < slots(capacity)
        assert (walk.load[b, size:] == -1).all() and (walk.save[b, size:] == -1).all()
        several = {above for above in tree if above >= 0 and tree.count(above) > 1}
        assert set(walk.node[b][walk.save[b] >= 0]) == several  # nothing is saved in vain
        assert (walk.load[b] >= 0).sum() == sum(tree.count(above) - 1 for above in several)
    return walk


TREES = {
    "one": [-1],
    "chain": chain(31),
    "star": star(31),
    "comb": comb(31),
    "comb backwards": children_first(comb(31))[0],
    "binary": binary(5),
    "binary backwards": children_first(binary(5))[0],
    "hydra27": HYDRA27,
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_walk_hands_every_node_its_parents_state(tree):
    check([tree], 32)


def test_a_batch_plans_each_tree_alone():
    trees = [HYDRA27, [], star(7), [-1], shuffle(binary(4), np.random.default_rng(1))[0]]
    check(trees, 32)


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 31])
def test_full_trees_of_any_capacity(capacity):
    rng = np.random.default_rng(capacity)
    trees = [random_parents(rng, capacity), chain(capacity), star(capacity)]
    check(trees, capacity)


def test_large_trees():
    rng = np.random.default_rng(3)
    check([random_parents(rng, 128), random_parents(rng, 97), binary(7), comb(128)], 128)


@hypothesis.given(st.lists(parent_lists(max_size=31), min_size=3, max_size=3))
def test_random_trees(trees):
    check(trees, 31)


@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5, 6])
def test_the_complete_binary_tree_needs_every_slot(levels):
    capacity = 2**levels - 1
    walk = make_plan([binary(levels)], capacity)
    assert slots(capacity) == walk.save.max() + 1 == levels - 1


def test_one_slot_serves_hydra27():
    assert make_plan([HYDRA27], 32).save.max() == 0


def test_slots_by_capacity():
    assert [slots(n) for n in (1, 2, 3, 6, 7, 8, 15, 31, 32, 64, 127, 128)] == [
        0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 6,
    ]  # fmt: skip


def test_lighter_children_come_first_and_ties_keep_their_order():
    # Row 1 heads a chain of three; rows 2 and 3 are leaves.
    walk = make_plan([[-1, 0, 0, 0, 1, 4]], 8)
    assert list(walk.node[0, :6]) == [0, 2, 3, 1, 4, 5]
    assert list(walk.load[0, :6]) == [-1, -1, 0, 0, -1, -1]
    assert list(walk.save[0, :6]) == [0, -1, -1, -1, -1, -1]


def check_paths(trees, capacity, max_depth):
    """Every path in turn from the root on, then the inactive rows, and never out of room."""
    walk = jax.tree.map(np.asarray, PLAN_PATHS(*pack(trees, capacity), max_depth))
    assert walk.node.shape[1] == path_steps(capacity, max_depth)
    for b, tree in enumerate(trees):
        leaves = [row for row in range(len(tree)) if row not in tree]
        visits = [node for leaf in leaves for node in path_to(tree, leaf)]
        idle = list(range(len(tree), capacity))
        assert walk.size[b] == len(visits)
        assert walk.node[b, : len(visits) + len(idle)].tolist() == visits + idle
        starts = [t for t, node in enumerate(visits) if node == 0 and t > 0]
        assert np.flatnonzero(walk.load[b] != -1).tolist() == starts
        assert (walk.load[b][starts] == RESTART).all()
        assert (walk.save[b] == -1).all()
    return walk


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_every_path_is_walked_from_the_root(tree):
    check_paths([tree, [], shuffle(tree, np.random.default_rng(2))[0]], 32, 31)


def test_hydra27_takes_58_updates_path_by_path():
    depth = max(depth_of(HYDRA27, node) for node in range(28))
    assert check_paths([HYDRA27], 28, depth).size[0] == 58
    assert path_steps(28, depth) == 204


@hypothesis.given(st.lists(parent_lists(max_size=31), min_size=3, max_size=3))
def test_paths_of_random_trees(trees):
    check_paths(trees, 31, 30)


@pytest.mark.parametrize(("capacity", "max_depth"), [(1, 0), (2, 1), (3, 2), (9, 8), (31, 4)])
def test_a_chain_with_leaves_fills_the_steps(capacity, max_depth):
    """The bound is reached: a chain of d nodes, d at most half of the rows, and leaves below it."""
    depth = min(max_depth, (capacity - 1) // 2)
    tree = chain(depth) + [depth - 1] * (capacity - depth) if depth else chain(capacity)
    assert check_paths([tree], capacity, max_depth).size[0] == path_steps(capacity, max_depth)
