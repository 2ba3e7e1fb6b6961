"""Tree: validation on the host, the derived arrays, repacking, and the path schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_trees
from hypothesis import given
from hypothesis import strategies as st

from treejax.paths import cut_slots, schedule
from treejax.tree import Tree, conv_rows, depths, describe, sort_rows, visible

CAPACITY = 31  # one capacity for all examples, so that each function compiles once
WIDTH = 4

MISTAKES = {
    "cycle": (dict(tokens=[5, 6, 7], parents=[-1, 2, 1]), "row 1 lies on a cycle"),
    "own parent": (dict(tokens=[5, 6], parents=[-1, 1]), "row 1 lies on a cycle"),
    "cycle behind a row": (
        dict(tokens=[5, 6, 7, 8], parents=[-1, 2, 3, 2]),
        "lies on a cycle",
    ),
    "two roots": (dict(tokens=[5, 6, 7], parents=[-1, 0, -1]), "row 2 is a second root"),
    "no root": (dict(tokens=[5, 6], parents=[1, -1]), "row 0 is the root"),
    "parent too large": (dict(tokens=[5, 6], parents=[-1, 2]), "row 1 has parent 2"),
    "parent in an inactive row": (
        dict(tokens=[5, 6], parents=[-1, 3], capacity=8),
        "row 1 has parent 3",
    ),
    "parent below -1": (dict(tokens=[5, 6], parents=[-1, -2]), "row 1 has parent -2"),
    "equal siblings": (
        dict(tokens=[5, 6, 7, 6], parents=[-1, 0, 0, 0]),
        "rows 1 and 3 are siblings with the same token 6",
    ),
    "over capacity": (
        dict(tokens=[5, 6, 7], parents=[-1, 0, 0], capacity=2),
        "3 nodes exceed the capacity of 2",
    ),
    "over depth bound": (
        dict(tokens=[5, 6, 7], parents=[-1, 0, 1], max_depth=1),
        "row 2 has depth 2, above the bound of 1",
    ),
    "over the vocabulary": (
        dict(tokens=[5, 97], parents=[-1, 0], vocabulary=97),
        "row 1 has token 97, expected 0..96",
    ),
    "negative token": (dict(tokens=[5, -1], parents=[-1, 0]), "row 1 has token -1"),
    "lengths differ": (dict(tokens=[5, 6, 7], parents=[-1, 0]), "3 tokens and 2 parents"),
    "batches differ": (
        dict(tokens=[[5], [6]], parents=[[-1]]),
        "tokens hold 2 trees and parents 1",
    ),
    "empty": (dict(tokens=[], parents=[]), "tokens must be integers of shape"),
    "floats": (dict(tokens=[5.0, 6.0], parents=[-1, 0]), "tokens must be integers of shape"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_from_parents_names_each_mistake_in_one_line(mistake):
    arguments, message = MISTAKES[mistake]
    with pytest.raises(ValueError) as caught:
        Tree.from_parents(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_a_batch_names_its_tree():
    with pytest.raises(ValueError, match="^tree 1: row 2 is a second root"):
        Tree.from_parents([[1, 2], [1, 2, 3]], [[-1, 0], [-1, 0, -1]])


def test_from_parents_packs_ragged_rows_with_fillers():
    tree = Tree.from_parents([[5], [6, 7, 8]], [[-1], [-1, 2, 0]], capacity=4)
    np.testing.assert_array_equal(tree.tokens, [[5, -1, -1, -1], [6, 7, 8, -1]])
    np.testing.assert_array_equal(tree.parent, [[-1, -1, -1, -1], [-1, 2, 0, -1]])
    np.testing.assert_array_equal(tree.size, [1, 3])
    assert (tree.batch, tree.capacity, tree.max_depth) == (2, 4, 3)
    assert tree.tokens.dtype == tree.parent.dtype == tree.rank.dtype == tree.size.dtype == jnp.int32


def test_equal_siblings_are_kept_on_request_and_ranked_in_row_order():
    tree = Tree.from_parents([5, 6, 6, 7, 6], [-1, 0, 0, 1, 0], unique=False)
    np.testing.assert_array_equal(tree.rank[0], [0, 0, 1, 0, 2])
    # Cousins may hold equal tokens in any case.
    Tree.from_parents([5, 6, 7, 9, 9], [-1, 0, 0, 1, 2])


def test_root_only_is_usable_inside_jit():
    tree = jax.jit(lambda t: Tree.root_only(t, capacity=3, max_depth=2))(jnp.array([4, 9]))
    expected = Tree.from_parents([[4], [9]], [[-1], [-1]], capacity=3, max_depth=2)
    jax.tree.map(np.testing.assert_array_equal, tree, expected)
    assert tree.max_depth == 2


@jax.jit
def derive(tree):
    topology = describe(tree)
    windows = jax.vmap(lambda t: conv_rows(t, WIDTH))(topology)
    by_walking = jax.vmap(lambda parent: depths(parent, tree.max_depth))(tree.parent)
    return topology, windows, jax.vmap(visible)(topology), by_walking


@given(random_trees.parent_lists(CAPACITY), random_trees.parent_lists(CAPACITY))
def test_derived_arrays_agree_with_walking_up(first, second):
    lists = [first, second]
    tree = Tree.from_parents([range(len(p)) for p in lists], lists, capacity=CAPACITY)
    topology, windows, seen, by_walking = jax.tree.map(np.asarray, derive(tree))
    for b, parents in enumerate(lists):
        size = len(parents)
        assert topology.size[b] == size
        np.testing.assert_array_equal(topology.active[b], np.arange(CAPACITY) < size)
        np.testing.assert_array_equal(topology.parent[b], tree.parent[b])
        assert sorted(topology.order[b]) == list(range(CAPACITY))
        assert set(topology.order[b, :size]) == set(range(size))
        place = np.argsort(topology.order[b])
        line = np.arange(-(WIDTH - 1), 0)  # history columns, counted from the newest
        for node in range(CAPACITY):
            path = oracle.path_to(parents, node) if node < size else []
            np.testing.assert_array_equal(np.flatnonzero(topology.ancestors[b, node]), sorted(path))
            assert topology.depth[b, node] == max(len(path) - 1, 0)
            assert by_walking[b, node] == topology.depth[b, node]
            np.testing.assert_array_equal(
                np.flatnonzero(seen[b, node]), sorted(path) if path else [node]
            )
            if path:
                rows = [*(WIDTH - 1 + line), *(WIDTH - 1 + np.array(path))]
                np.testing.assert_array_equal(windows[b, node], rows[-WIDTH:])
            if node and path:
                assert place[parents[node]] < place[node]
        # Whatever is computed in inactive rows, it must read rows that exist.
        assert windows.min() >= 0 and windows.max() < WIDTH - 1 + CAPACITY


keep_with_order = jax.jit(Tree.keep_with_order)
trim = jax.jit(Tree.trim)


def expected_after(parents, tokens, kept):
    """The naive repacking: kept rows in their old order, renumbered."""
    place = {row: new for new, row in enumerate(kept)}
    return [tokens[row] for row in kept], [place.get(parents[row], -1) for row in kept]


def check_packed(tree, b, tokens, parents):
    size = len(tokens)
    assert tree.size[b] == size
    np.testing.assert_array_equal(tree.tokens[b, :size], tokens)
    np.testing.assert_array_equal(tree.parent[b, :size], parents)
    assert (np.asarray(tree.tokens[b, size:]) == -1).all()
    assert (np.asarray(tree.parent[b, size:]) == -1).all()


@given(random_trees.parent_lists(CAPACITY), st.integers(0, 2**32 - 1))
def test_keep_repacks_what_is_left(parents, seed):
    rng = np.random.default_rng(seed)
    tokens = random_trees.random_tokens(rng, parents, 97)
    tree = Tree.from_parents(tokens, parents, capacity=CAPACITY)
    dropped = rng.random(len(parents)) < 0.25
    dropped[0] = False
    kept = [row for row in range(len(parents)) if not dropped[oracle.path_to(parents, row)].any()]
    mask = np.zeros((1, CAPACITY), bool)
    mask[0, kept] = True
    mask[0, len(parents) :] = rng.random(CAPACITY - len(parents)) < 0.5  # inactive: no meaning
    smaller, order = keep_with_order(tree, jnp.asarray(mask))
    check_packed(smaller, 0, *expected_after(parents, tokens, kept))
    np.testing.assert_array_equal(order[0, : len(kept)], kept)
    assert sorted(np.asarray(order[0])) == list(range(CAPACITY))
    np.testing.assert_array_equal(smaller.rank[0, : len(kept)], np.asarray(tree.rank)[0, kept])
    assert smaller.max_depth == tree.max_depth


@given(random_trees.parent_lists(CAPACITY), random_trees.parent_lists(CAPACITY))
def test_trim_drops_what_is_too_deep(first, second):
    lists, limits = [first, second], [2, 0]
    tokens = [list(range(len(p))) for p in lists]
    tree = Tree.from_parents(tokens, lists, capacity=CAPACITY)
    trimmed = trim(tree, jnp.array(limits, jnp.int32))
    for b, parents in enumerate(lists):
        kept = [r for r in range(len(parents)) if oracle.depth_of(parents, r) <= limits[b]]
        check_packed(trimmed, b, *expected_after(parents, tokens[b], kept))


def make_schedule(parents, capacity=None, max_depth=None):
    """The schedule of one tree, as NumPy arrays, and its Tree."""
    tree = Tree.from_parents(range(len(parents)), parents, capacity, max_depth)
    return jax.tree.map(lambda x: np.asarray(x)[0], batch_schedule(tree)), tree


@jax.jit
def batch_schedule(tree):
    return jax.vmap(lambda topology: schedule(topology, tree.max_depth))(describe(tree))


def check_schedule(made, parents, capacity):
    """Run the schedule symbolically: a slot holds the node whose state it carries (-1 is R0)."""
    size, count = len(parents), int(made.count)
    visits, slots = [], {0: -1}
    assert (made.length[:count] > 0).all() and (made.length[count:] == 0).all()
    levels = made.level[:count]
    assert (np.diff(levels) >= 0).all() and levels[0] == 0
    assert set(levels) == set(range(levels[-1] + 1))  # levels follow without a gap
    for level in range(levels[-1] + 1):
        kept = {}
        for p in np.flatnonzero(levels == level):
            before = slots[int(made.source[p])]  # a KeyError is a slot of this or a later level
            nodes = made.nodes[p]
            assert (nodes[made.length[p] :] == capacity).all()
            for node in nodes[: made.length[p]]:
                assert parents[node] == before  # each node continues its parent
                visits.append(int(node))
                before = int(node)
                slot = int(made.cut_slot[node])
                if slot != made.spare:
                    assert slot not in slots and slot not in kept and 0 < slot < made.spare
                    kept[slot] = before
        slots |= kept
    assert sorted(visits) == list(range(size))  # every node exactly once
    assert made.cut_slot[capacity] == made.spare  # the row that stands for "no node"
    return len(visits)


@given(random_trees.parent_lists(CAPACITY))
def test_schedule_updates_every_node_exactly_once_from_its_parent(parents):
    made, _ = make_schedule(parents, CAPACITY)
    assert made.spare == cut_slots(CAPACITY) - 1
    assert check_schedule(made, parents, CAPACITY) == len(parents)


@pytest.mark.parametrize("parents", [random_trees.chain(31), [-1]], ids=["chain", "root alone"])
def test_schedule_of_a_chain_is_one_path(parents):
    made, _ = make_schedule(parents, CAPACITY)
    assert made.count == 1 and made.length[0] == len(parents)


def test_schedule_of_a_star_is_two_levels():
    made, _ = make_schedule(random_trees.star(31), CAPACITY)
    assert made.count == 31
    np.testing.assert_array_equal(made.length, 1)
    np.testing.assert_array_equal(made.level, [0] + [1] * 30)


@jax.jit
def sort_padded(tree):
    """A tree in three rows more, sorted: its topology, the new places, and it described anew."""
    topology, place = jax.vmap(sort_rows)(describe(tree.pad(CAPACITY + 3)))
    parents = topology.parent
    again = describe(Tree(parents, parents, parents, tree.size, max_depth=tree.max_depth))
    return topology, place, again


@given(random_trees.parent_lists(CAPACITY))
def test_sorted_rows_are_the_same_tree_with_parents_first(parents):
    """What is moved equals what the moved parents describe; places lead back."""
    tree = Tree.from_parents(range(len(parents)), parents, capacity=CAPACITY)
    topology, place, again = (jax.tree.map(lambda leaf: leaf[0], x) for x in sort_padded(tree))
    jax.tree.map(np.testing.assert_array_equal, topology, again)
    moved = np.asarray(topology.parent)
    assert place[0] == 0 and (moved < np.arange(CAPACITY + 3)).all()
    np.testing.assert_array_equal(np.sort(place), np.arange(CAPACITY + 3))
    for row, above in enumerate(parents):
        assert moved[place[row]] == (-1 if above < 0 else place[above])


@pytest.mark.parametrize("capacity", [28, 32])
def test_schedule_of_hydra27_is_the_published_one(capacity):
    """One path of 5, then 11 paths of at most 7: 28 updates, where root-to-leaf paths need 58."""
    parents = random_trees.HYDRA27
    made, _ = make_schedule(parents, capacity, max_depth=11)
    assert check_schedule(made, parents, capacity) == 28
    lengths, levels = made.length[:12], made.level[:12]
    assert made.count == 12
    np.testing.assert_array_equal(made.nodes[0, :5], [0, 1, 4, 9, 14])
    assert lengths[0] == 5 and levels[0] == 0
    assert (levels[1:] == 1).all() and lengths[1:].max() == 7
    cut = np.flatnonzero(made.cut_slot[:capacity] != made.spare)
    np.testing.assert_array_equal(cut, [0, 1, 4, 9, 14])  # the five cut rows
    assert lengths[0] + 11 * 7 == 82  # padded path slots
    assert lengths[0] + lengths[1:].max() == 12  # the critical path
    leaves = set(range(28)) - set(parents)
    assert sum(len(oracle.path_to(parents, leaf)) for leaf in leaves) == 58


def test_schedule_does_not_depend_on_packing():
    rng = np.random.default_rng(5)
    published, _ = make_schedule(random_trees.HYDRA27, 32, max_depth=11)
    for packed in (
        random_trees.children_first(random_trees.HYDRA27)[0],
        *(random_trees.shuffle(random_trees.HYDRA27, rng)[0] for _ in range(3)),
    ):
        made, _ = make_schedule(packed, 32, max_depth=11)
        assert check_schedule(made, packed, 32) == 28
        np.testing.assert_array_equal(made.length, published.length)
        np.testing.assert_array_equal(made.level, published.level)
