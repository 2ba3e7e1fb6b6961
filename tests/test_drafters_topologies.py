"""Tree shapes by name, and which drafter takes which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treejax.drafters import MTP, Hydra, Lookup, MTPSuffix, Scripted, Suffix, make_drafter, parse
from treejax.drafters.topologies import StaticTree

# The 28 active rows of LumoTree's tree, root first (arXiv 2609.23900).
HYDRA27 = [-1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 4, 7, 8, 9, 9, 9, 12, 14, 14, 14, 17, 18, 22]
HYDRA27 += [23, 24, 25, 26]


def test_hydra27_is_the_papers_tree_row_for_row():
    tree = parse("hydra27")
    assert list(tree.parents) == HYDRA27
    assert [tree.depths.count(depth) for depth in range(1, 12)] == [3, 5, 5, 4, 4, 1, 1, 1, 1, 1, 1]
    branching = [row for row in range(tree.capacity) if len(tree.children(row)) > 1]
    assert branching == [0, 1, 4, 9, 14], "the five cut rows"
    assert tree == Hydra(5, 3, 6, (4, 2)) == parse("hydra5x3+6/4,2")
    assert (tree.capacity, tree.max_depth) == (28, 11)


def test_hydra27_roles():
    tree = parse("hydra27")
    assert tree.near_rows == (0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 14, 15, 16, 18, 19, 20)
    assert tree.tail_rows == (22, 23, 24, 25, 26, 27)
    assert (tree.rescue_rows(0), tree.rescue_rows(1)) == ((7, 12, 17, 21), (8, 13))
    near = parse("caterpillar5x3")
    where = {row: i for i, row in enumerate(tree.near_rows)}
    assert near.parents[1:] == tuple(where[tree.parents[row]] for row in tree.near_rows[1:])


@pytest.mark.parametrize(
    "spec, parents",
    [
        ("chain1", [-1, 0]),
        ("chain3", [-1, 0, 1, 2]),
        ("caterpillar2x3", [-1, 0, 0, 0, 1, 1, 1]),
        ("caterpillar3x1", [-1, 0, 1, 2]),
        ("3,2,1", [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]),
        ("2", [-1, 0, 0]),
        ("hydra8", [-1, 0, 1, 2, 3, 4, 5, 6, 7]),
        ("hydra2x2+2", [-1, 0, 0, 1, 1, 3, 5]),
        ("hydra2x2+2/3", [-1, 0, 0, 1, 1, 2, 3, 5, 6, 7]),
        ("hydra1x3+0/1,2", [-1, 0, 0, 0, 2, 3, 5]),
    ],
)
def test_shapes(spec, parents):
    tree = parse(spec)
    assert list(tree.parents) == parents
    for row in range(1, tree.capacity):
        assert tree.parents[row] < row
        assert tree.depths[row] == tree.depths[tree.parents[row]] + 1
        assert tree.children(tree.parents[row])[tree.ranks[row]] == row
        assert tree.path(row)[0] == 0 and len(tree.path(row)) == tree.depths[row] + 1
    assert sorted(tree.depths) == list(tree.depths), "breadth-first"


@pytest.mark.parametrize(
    "spec", ["hydra27", "hydra8", "chain5", "caterpillar5x3", "hydra4x2+3/2", "best9x4"]
)
def test_a_name_names_the_same_tree_again(spec):
    assert parse(spec).name == spec
    assert parse(parse(spec).name) == parse(spec)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("hydra28", "unknown, expected hydra27, hydra8, chainK"),
        ("", "unknown"),
        ("chain0", "unknown"),
        ("3,,1", "unknown"),
        ("3,0", "unknown"),
        ("Chain3", "unknown"),
        ("hydra3x2+4/2,2", "1 runners-up to rescue, got 2"),
        ("hydra3x2+4/0", "has no shape"),
        ("best2x5", "1 <= depth <= nodes"),
        ("32,32", "at most 1024"),
        ("9999,9999", "at most 1024"),
        ("chain2000", "at most 1024"),
        ("best2000x2", "at most 1024"),
    ],
)
def test_mistakes_are_one_line(spec, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(spec)
    assert "\n" not in str(caught.value)


def test_rows_without_support_take_their_descendants_along():
    tree = StaticTree("mixed", (-1, 0, 0, 1, 2, 3, 4))
    tokens = jnp.array(
        [
            [9, 1, 2, 3, 4, 5, 6],
            [9, -1, 2, 3, 4, 5, 6],
            [9, 1, 2, 3, -1, 5, 6],
            [9, -1, -1, 3, 4, 5, 6],
            [-1, 1, 2, -1, 4, 5, -1],
        ],
        jnp.int32,
    )
    kept = jax.jit(tree.supported)(tokens)
    assert kept.size.tolist() == [7, 4, 5, 1, 4]
    rows = [
        [[9, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 3, 4], [0, 0, 1, 0, 0, 0, 0]],
        [[9, 2, 4, 6], [-1, 0, 1, 2], [0, 1, 0, 0]],
        [[9, 1, 2, 3, 5], [-1, 0, 0, 1, 3], [0, 0, 1, 0, 0]],
        [[9], [-1], [0]],
        [[-1, 1, 2, 4], [-1, 0, 0, 2], [0, 0, 1, 0]],
    ]
    for b, expected in enumerate(rows):
        size = len(expected[0])
        got = np.stack([kept.tokens[b], kept.parent[b], kept.rank[b]])
        np.testing.assert_array_equal(got[:, :size], expected)
        assert (got[:2, size:] == -1).all()


@pytest.mark.parametrize(
    "name, tree, kind, rows",
    [
        ("mtp", None, MTP, 6),
        ("mtp", "caterpillar3x2", MTP, 7),
        ("mtp", "3,2,1", MTP, 16),
        ("suffix", None, Suffix, 17),
        ("suffix", "chain4", Suffix, 5),
        ("suffix", "best12x6", Suffix, 13),
        ("mtp+suffix", None, MTPSuffix, 9),
        ("mtp+suffix", "hydra3x2+4/2", MTPSuffix, 13),
        (MTP("chain2"), "chain3", MTP, 4),
        (Suffix(lookup=Lookup(longest=4)), "chain3", Suffix, 4),
        (Scripted("chain2", truth=((1,),), schedule=((0, 0),)), None, Scripted, 3),
        (Scripted("chain2", truth=((1,),), schedule=((0, 0),)), "3,2", Scripted, 10),
    ],
)
def test_make_drafter(name, tree, kind, rows):
    drafter = make_drafter(name, tree)
    assert isinstance(drafter, kind)
    assert drafter.capacity == rows
    assert tree is None or drafter.shape.name == tree
    assert hash(drafter) == hash(make_drafter(name, tree)) and drafter == make_drafter(name, tree)


def test_no_drafter_is_plain():
    assert make_drafter(None).capacity == 1
    with pytest.raises(ValueError, match="no drafter to fill it"):
        make_drafter(None, "chain3")


@pytest.mark.parametrize(
    "name, tree, message",
    [
        ("eagle", None, "drafter 'eagle' is unknown, expected one of: mtp, mtp_tree, suf"),
        ("mtp", "best8x4", "'mtp' cannot fill the tree 'best8x4', it takes trees of fixed shape"),
        ("mtp", "banana", "tree 'banana' is unknown"),
        ("suffix", "hydra27", "'suffix' cannot fill the tree 'hydra27', it takes bestNxD or chain"),
        ("suffix", "3,2,1", "cannot fill"),
        ("suffix", "caterpillar3x2", "cannot fill"),
        ("suffix", "best100x2", "more nodes than 8 matches of 2 tokens can fill"),
        ("mtp+suffix", "chain5", "'mtp.suffix' cannot fill the tree 'chain5', it takes bestN"),
        ("mtp+suffix", "3,2,1", "takes bestNxD or hydra trees"),
        ("mtp+suffix", "best900x4", "more nodes than the 50 that 4 head passes"),
        ("mtp_tree", "chain5", "it takes trees of the form bestNxD"),
        ("budget", "chain3", "brings its own trees"),
        ("scripted", None, "needs the true continuation"),
        (Scripted("chain2", truth=((1,),), schedule=((2, 1),)), "chain1", r"entry \(2, 1\) is imp"),
        (MTP(), "best8x4", "it takes trees of fixed shape"),
    ],
)
def test_impossible_drafters_are_one_line(name, tree, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_drafter(name, tree)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [(2, 3, 1), (3, 0, 1), (3, 1, 0)])
def test_impossible_lookups(settings):
    with pytest.raises(ValueError, match="impossible"):
        Lookup(*settings)
