"""The N largest path products against every tree there is."""

import itertools

import numpy as np
import pytest

from treejax.drafters.optimal import expected_accepted, optimal_tree


def every_tree(depths, ranks, nodes):
    """Sets of candidates, each a tuple of ranks from the root, closed under parents and earlier
    siblings."""
    names = [p for d in range(1, depths + 1) for p in itertools.product(range(ranks), repeat=d)]
    for chosen in itertools.combinations(names, nodes):
        there = set(chosen)
        if all(
            (len(p) == 1 or p[:-1] in there) and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in there)
            for p in chosen
        ):
            yield chosen


def value(chosen, acceptance):
    return sum(np.prod([acceptance[d][r] for d, r in enumerate(p)]) for p in chosen)


@pytest.mark.parametrize("seed", range(8))
def test_no_tree_of_the_same_size_accepts_more(seed):
    rng = np.random.default_rng(seed)
    acceptance = np.sort(rng.uniform(0.05, 0.95, (3, 2)), axis=1)[:, ::-1].tolist()
    for nodes in (1, 2, 4, 5):
        tree = optimal_tree(acceptance, nodes)
        best = max(value(chosen, acceptance) for chosen in every_tree(3, 2, nodes))
        assert tree.capacity == nodes + 1
        assert expected_accepted(tree, acceptance) == pytest.approx(best, rel=1e-12)


def test_rows_are_breadth_first_and_a_good_chain_stays_a_chain():
    tree = optimal_tree([[0.9, 0.01]] * 5, 5)
    assert tree.parents == (-1, 0, 1, 2, 3, 4)
    wide = optimal_tree([[0.5, 0.4, 0.3], [0.1, 0.1, 0.1]], 4)
    assert wide.parents == (-1, 0, 0, 0, 1)
    assert list(wide.depths) == sorted(wide.depths)


def test_a_rank_better_than_one_before_it_counts_as_that_one():
    tree = optimal_tree([[0.2, 0.9]], 2)
    assert expected_accepted(tree, [[0.2, 0.2]]) == pytest.approx(0.4)


def test_what_cannot_be():
    with pytest.raises(ValueError, match=r"depth 0 is \[1.5\]"):
        optimal_tree([[1.5]], 1)
    with pytest.raises(ValueError, match="is ever accepted"):
        optimal_tree([[0.0, 0.0]], 3)
    assert optimal_tree([[0.5]], 3).capacity == 2  # no more than there are
