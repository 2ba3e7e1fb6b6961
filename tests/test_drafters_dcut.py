"""D-Cut: the best of a batch's candidates by measured acceptance, closed under parents."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from random_trees import random_parents, random_tokens

from treejax.drafters import MTP, Budget, DCut, ResponseStore, Suffix, make_drafter
from treejax.drafters.dcut import CutMemory, chances, counts, keep_best, path_products
from treejax.engine import complete
from treejax.steps.select import Choice
from treejax.tree import Tree

pytestmark = pytest.mark.compiles_fast


def random_trees(seed, batch=3, capacity=9, depth=4):
    rng = np.random.default_rng(seed)
    parents = [random_parents(rng, int(rng.integers(1, capacity + 1)), depth) for _ in range(batch)]
    tokens = [random_tokens(rng, p, 50) for p in parents]
    return Tree.from_parents(tokens, parents, capacity=capacity, max_depth=depth), parents


def ranks_and_depths(parents):
    ranks = [list(parents[:i]).count(p) for i, p in enumerate(parents)]
    depths = []
    for node in range(len(parents)):
        depth = 0
        while node:
            node, depth = parents[node], depth + 1
        depths.append(depth)
    return ranks, depths


def product(parents, chance, node):
    ranks, depths = ranks_and_depths(parents)
    value = 1.0
    while node:
        value *= chance[depths[node] - 1][min(ranks[node], len(chance[0]) - 1)]
        node = parents[node]
    return value


@pytest.mark.parametrize("seed", range(10))
def test_the_best_of_the_whole_batch_are_kept(seed):
    """Against a list of all candidates, sorted by product and depth."""
    tree, parents = random_trees(seed)
    chance = np.random.default_rng(seed).uniform(0.1, 0.9, (3, 4, 3)).astype(np.float32)
    values = path_products(tree, jnp.asarray(chance))
    everything = []
    for b, above in enumerate(parents):
        for node in range(1, len(above)):
            expected = product(above, chance[b], node)
            assert float(values[b, node]) == pytest.approx(expected, rel=1e-5)
            everything.append((float(values[b, node]), b, node))
    everything.sort(key=lambda entry: -entry[0])
    count = min(6, len(everything))
    kept = keep_best(tree, values, count)
    for b, above in enumerate(parents):
        mine = {node for _, owner, node in everything[:count] if owner == b}
        tokens = {int(tree.tokens[b, node]) for node in mine}
        size = int(kept.size[b])
        assert size == 1 + len(mine)
        assert set(np.asarray(kept.tokens[b, 1:size]).tolist()) <= tokens | set()
        for row in range(1, size):
            assert 0 <= int(kept.parent[b, row]) < size
        assert {above[node] for node in mine} <= mine | {0}


def test_equal_values_take_parents_first():
    tree = Tree.from_parents([1, 2, 3, 4], [-1, 3, 0, 0], capacity=4)  # 1 hangs below 3
    kept = keep_best(tree, jnp.full((1, 4), 0.5), 2)
    assert int(kept.size[0]) == 3
    assert sorted(np.asarray(kept.tokens[0, 1:3]).tolist()) == [3, 4]


def test_counts_are_those_of_the_accepted_path():
    #      0 -> 1, 2, 3 (ranks 0, 1, 2); 2 -> 4, 5
    tree = Tree.from_parents([9, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 2, 2], capacity=6, max_depth=3)
    path = jnp.array([[0, 2, 5, -1]])
    choice = Choice(path, jnp.array([3]), jnp.array([7]))
    offered, accepted = counts(tree, choice, 3, 2)
    np.testing.assert_array_equal(offered, [[[1, 2], [1, 1], [0, 0]]])  # rank 2 is as the last
    np.testing.assert_array_equal(accepted, [[[0, 1], [0, 1], [0, 0]]])
    nobody = choice.mask(jnp.array([False]))
    for made in counts(tree, nobody, 3, 2):
        assert not np.asarray(made).any()


def memory(offered, accepted):
    return CutMemory(
        None, jnp.asarray(offered), jnp.asarray(accepted), jnp.ones(len(offered), bool)
    )


def test_chances_never_rise_with_rank_and_follow_what_was_seen():
    nothing = np.zeros((1, 2, 3), np.float32)
    start = np.asarray(chances(memory(nothing, nothing)))
    np.testing.assert_allclose(start[0], [[0.5, 0.25, 0.125]] * 2)
    hits = np.array([[[400.0, 950.0, 0.0], [0, 0, 0]]], np.float32)
    learned = np.asarray(chances(memory(nothing + 1000, hits)))[0]
    assert (np.diff(learned, axis=1) <= 0).all()
    assert learned[0, 0] == pytest.approx(0.4, abs=0.01) and learned[1, 0] < 0.01


def test_an_easy_sequence_gets_more_than_a_hard_one_and_a_finished_one_nothing():
    offered = np.full((3, 2, 2), 50.0, np.float32)
    accepted = np.stack([np.full((2, 2), hits, np.float32) for hits in (45.0, 5.0, 45.0)])
    tree = MTP("2,2").static_shape.full(jnp.arange(21, dtype=jnp.int32).reshape(3, 7))
    seen = memory(offered, accepted).replace(active=jnp.array([True, True, False]))
    value = jnp.where(seen.active[:, None], path_products(tree, chances(seen)), 0.0)
    sizes = np.asarray(keep_best(tree, value, 8).size) - 1
    assert sizes[0] == 6 and sizes[1] == 2 and sizes[2] == 0


def test_responses_reach_the_inner_drafters_store():
    store = ResponseStore(20)
    DCut(inner=Suffix("chain3", store=store), nodes=2).learn([4, 5])
    assert [token for token in store.tokens.tolist() if token >= 0] == [4, 5]


def test_a_cut_drafter_gives_plains_text_within_its_budget():
    inner = MTP("3,2,2")
    drafter = DCut(inner=inner, nodes=4)
    prompts = [[5, 9, 2, 9], [1, 2, 3]]
    settings = {"max_tokens": 40, "policy": "wy"}
    made = complete(tiny.model(), prompts, drafter=drafter, **settings)
    plain = complete(tiny.model(), prompts, drafter=None, **settings)
    assert [g.tokens for g in made] == [g.tokens for g in plain]
    proposed = sum(g.stats.num_draft_tokens for g in made)
    assert proposed <= 8 * max(g.stats.steps for g in made)


def test_candidates_that_are_drawn_may_not_be_cut():
    with pytest.raises(ValueError, match="cannot cut candidates that are drawn"):
        DCut(inner=MTP("3,2", draws="without_replacement"), nodes=3)
    with pytest.raises(ValueError, match="expected fewer than that"):
        DCut(inner=Suffix("chain3"), nodes=4)
    with pytest.raises(ValueError, match="needs an inner drafter"):
        DCut()
    with pytest.raises(ValueError, match="leave out the tree"):
        make_drafter(DCut(inner=MTP("3,2"), nodes=3), "chain3")
    with pytest.raises(ValueError, match="'budget', which chooses among sizes"):
        DCut(inner=Budget())
