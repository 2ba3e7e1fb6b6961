"""tree_attention against float64: trees of any packing over a cached prefix, split and merged."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_trees
from kernel_cases import lower_for_h200, relative_rms

from pallas_kernels import implementation as dispatch
from pallas_kernels.tree_attention import attention_problem, sizes, tree_attention

# Relative RMS against float64 of the same bfloat16 operands. The output is rounded to eight bits
# (1.1e-3), and so is every weight before its product.
BF16 = 3e-3
F32 = 1e-6
RNG = np.random.default_rng(8)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """The interpreter's time goes by programs: a sequence's context in two or three splits."""
    monkeypatch.setattr(sizes, "MULTIPROCESSORS", 6)


@dataclasses.dataclass
class Case:
    """Arrays in the order of the arguments; an empty tree stands for a row that takes no part."""

    trees: list
    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: jax.Array
    keys: jax.Array
    values: jax.Array
    layer: jax.Array
    length: jax.Array

    def arrays(self):
        own = self.q, self.k, self.v, self.mask
        return *own, self.keys, self.values, self.layer, self.length

    def run(self, implementation, **arrays):
        """Outputs as float64 NumPy; keywords replace arrays."""
        out = call(*dataclasses.replace(self, **arrays).arrays(), implementation)
        assert out.dtype == self.q.dtype
        return np.asarray(out.astype(jnp.float32), np.float64)


@functools.partial(jax.jit, static_argnums=8)
def call(*arguments):
    *arrays, implementation = arguments
    return tree_attention(*arrays, implementation=implementation)


def make_case(
    trees, capacity, lengths, heads, width, rows, layers=2, layer=1, dtype=jnp.bfloat16, seed=0
):
    """heads: (Hq, Hkv). rows: of each cache. Scores of a few units, so that softmax matters."""
    rng = np.random.default_rng(seed)
    batch = len(trees)
    mask = np.zeros((batch, capacity, capacity), bool)
    for b, tree in enumerate(trees):
        for node in range(len(tree)):
            mask[b, node, oracle.path_to(tree, node)] = True

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    cache = layers, batch, rows, heads[1], width
    return Case(
        trees=trees,
        q=normal(batch, capacity, heads[0], width, scale=2.0),
        k=normal(batch, capacity, heads[1], width),
        v=normal(batch, capacity, heads[1], width),
        mask=jnp.asarray(mask),
        keys=normal(*cache),
        values=normal(*cache),
        layer=jnp.int32(layer),
        length=jnp.asarray(lengths, jnp.int32),
    )


def exact(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def expected(case, b):
    """Float64 outputs [n, Hq, D] of sequence b's tree, from the formula."""
    tree, length, layer = case.trees[b], int(case.length[b]), int(case.layer)
    q, k, v = (exact(x)[b] for x in (case.q, case.k, case.v))
    keys, values = (exact(x[layer, b])[:length] for x in (case.keys, case.values))
    group = q.shape[1] // k.shape[1]
    out = np.zeros((len(tree), *q.shape[1:]))
    for node in range(len(tree)):
        path = oracle.path_to(tree, node)
        for head in range(q.shape[1]):
            seen = np.concatenate([keys[:, head // group], k[path, head // group]])
            scores = seen @ q[node, head] * q.shape[2] ** -0.5
            weights = np.exp(scores - scores.max())
            read = np.concatenate([values[:, head // group], v[path, head // group]])
            out[node, head] = weights @ read / weights.sum()
    return out


def check(case, made, bound=BF16):
    for b, tree in enumerate(case.trees):
        if tree:
            assert relative_rms(made[b, : len(tree)], expected(case, b)) < bound, b
        else:
            assert not made[b].any()
    assert np.isfinite(made).all()


def trees_of(*counts):
    return [random_trees.random_parents(RNG, count) if count else [] for count in counts]


def small(trees, lengths, layer=1, seed=0):
    """Three sequences and caches of an odd number of rows, so that one may start anywhere in a
    tile; one program for all tests that use it."""
    return make_case(trees, 8, lengths, (2, 1), 64, 155, layers=8, layer=layer, seed=seed)


SMALL = {  # trees, lengths, layer
    "plain tokens": ([[-1], [-1], []], (130, 0, 9), 2),
    "lengths 0, 1, all": (trees_of(8, 5, 8), (0, 1, 155), 7),
    "whole tiles": (trees_of(3, 8, 8), (64, 128, 72), 0),
}


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("name", SMALL)
def test_small_trees_over_any_prefix(name, implementation):
    case = small(*SMALL[name])
    check(case, case.run(implementation))


CASES = {  # trees, capacity, lengths, heads, width, cache rows
    "two programs of two blocks, children first": (
        [random_trees.children_first(random_trees.comb(25))[0]], 25, (130,), (8, 1), 64, 132,
    ),
    "70 rows in two tiles of the block, two key heads": (
        trees_of(69), 70, (40,), (2, 2), 128, 68,
    ),
    "a pair of width 256": ([random_trees.HYDRA27], 28, (350,), (6, 1), 256, 360),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_attend_to_the_prefix_and_to_their_ancestors(name):
    case = make_case(*CASES[name])
    check(case, case.run("interpret"))


def test_the_cases_are_the_forms_of_program():
    """Or a form would go untested: one, two and three blocks, several tiles of the block."""

    def form(case):
        s = sizes.sizes_of(case.q, case.keys)
        return s.blocks, s.row_tiles, s.block_tiles, s.splits

    assert form(small(*SMALL["plain tokens"])) == (1, 1, 1, 2)
    assert [form(make_case(*case)) for case in CASES.values()] == [
        (2, 2, 1, 3), (2, 1, 2, 3), (3, 1, 1, 3),
    ]  # fmt: skip
    pair = make_case(*CASES["a pair of width 256"])
    s = sizes.sizes_of(pair.q, pair.keys)
    tiles = 350 // sizes.TILE + 1 + s.block_tiles
    assert 2 * -(-tiles // s.splits) > s.slots  # slots are used again


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("capacity", [8, 27, 64])
def test_the_reference_takes_any_sizes(capacity, dtype):
    trees = [random_trees.random_parents(RNG, capacity - 3), random_trees.chain(capacity), []]
    case = make_case(trees, capacity, (0, 33, 5), (6, 3), 24, 37, dtype=dtype)
    check(case, case.run("auto"), F32 if dtype == jnp.float32 else BF16)


def test_what_a_row_does_not_see_changes_no_bit():
    """Other layers and sequences, rows past the length, rows that are no ancestors."""
    trees = [*trees_of(7), [], *trees_of(8)]
    case = small(trees, (69, 30, 5), layer=4)
    clean = case.run("interpret")
    seen = np.zeros(case.keys.shape[:3], bool)
    for b in (0, 2):
        seen[4, b, : int(case.length[b])] = True
    loud = jnp.asarray(300.0 * RNG.standard_normal(case.keys.shape), jnp.bfloat16)
    seen = jnp.asarray(seen)[..., None, None]
    hidden = {name: jnp.where(seen, getattr(case, name), loud) for name in ("keys", "values")}
    np.testing.assert_array_equal(case.run("interpret", **hidden), clean)
    node = next(n for n in range(7) if n not in trees[0])  # a leaf
    moved = case.run("interpret", k=case.k.at[0, node].add(3.0), v=case.v.at[0, node].add(3.0))
    changed = {(b, n) for b in range(3) for n in range(8) if (moved[b, n] != clean[b, n]).any()}
    assert changed == {(0, node)}


def test_a_nan_outside_a_sequence_does_not_reach_it():
    """In rows past its length, in an idle sequence, and in the rows right before its own."""
    case = small([*trees_of(6), [], *trees_of(2)], (60, 150, 70), layer=1)
    assert (3 + 2) * 155 % sizes.ALIGNMENT  # its first tile begins in the cache before
    clean = case.run("interpret")
    read = np.asarray([60, 0, 70])
    lost = np.arange(155) >= read[:, None]
    lost = jnp.asarray((np.arange(8) != 1)[:, None, None] | lost)[..., None, None]
    broken = {n: jnp.where(lost, jnp.nan, getattr(case, n)) for n in ("keys", "values")}
    np.testing.assert_array_equal(case.run("interpret", **broken), clean)
    check(case, clean)


def test_scores_of_any_size_neither_overflow_nor_vanish():
    """The largest score of a row comes last, first, or in the tree: weights are relative to it."""
    case = small([[-1], [-1], [-1]], (150, 150, 150))
    keys = jnp.zeros_like(case.keys).at[1, 0, 149].set(6.0).at[1, 1, 0].set(6.0)
    keys = keys.at[1, 2].set(-6.0)  # all of the cache far below the row itself
    own = jnp.zeros_like(case.k)
    loud = dataclasses.replace(case, q=jnp.full_like(case.q, 8.0), k=own, keys=keys)
    made = loud.run("interpret")
    check(loud, made)
    np.testing.assert_array_equal(made[0, 0, 0], exact(case.values)[1, 0, 149, 0])
    np.testing.assert_array_equal(made[2, 0, 0], exact(case.v)[2, 0, 0])


@pytest.mark.parametrize("nodes, batch", [(1, 1), (28, 1), (64, 1), (28, 8)])
def test_lowers_for_an_h200(monkeypatch, nodes, batch):
    """The kernels themselves at the sizes of the 27B model, and a context of 131,072."""
    monkeypatch.undo()
    text = lower_for_h200(tree_attention, *abstract(nodes, batch, (24, 4), 256, 131073, 16))
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("heads, width", [((8, 8), 128), ((16, 2), 64)])
def test_lowers_for_other_heads(monkeypatch, heads, width):
    monkeypatch.undo()
    text = lower_for_h200(tree_attention, *abstract(28, 2, heads, width, 2049, 8))
    assert text.count("custom_call @mosaic_gpu") == 2


def abstract(nodes, batch, heads, width, rows, layers):
    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    own = of(batch, nodes, heads[1], width)
    cache = of(layers, batch, rows, heads[1], width)
    mask, layer = of(batch, nodes, nodes, dtype=jnp.bool), of(dtype=jnp.int32)
    length = of(batch, dtype=jnp.int32)
    return of(batch, nodes, heads[0], width), own, own, mask, cache, cache, layer, length


def test_programs_fill_the_gpu_and_fit(monkeypatch):
    monkeypatch.undo()
    for nodes in (1, 6, 28, 64, 128):
        for batch in (1, 4, 8):
            for heads, width in (((24, 4), 256), ((8, 8), 128), ((16, 2), 64)):
                q, *_, cache, _, _, _ = abstract(nodes, batch, heads, width, 8192, 2)
                s = sizes.sizes_of(q, cache)
                programs = batch * heads[1] * s.row_tiles * s.programs * s.splits
                assert s.splits == 1 or 66 < programs <= sizes.MULTIPROCESSORS
                assert s.slots >= 4
                tiles = s.slots * sizes.TILE + s.warpgroups * sizes.BLOCK
                assert 2 * width * tiles + 2048 <= sizes.SMEM_LIMIT
                assert s.rows >= nodes * heads[0] // heads[1]


def test_what_does_not_fit_is_refused():
    case = make_case([[-1]], 1, (3,), (2, 1), 64, 64)
    with pytest.raises(ValueError, match=r"needs? a Hopper GPU"):
        case.run("mosaic_gpu")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        case.run("cuda")
    with pytest.raises(ValueError, match=r"mask has shape \(1, 1, 2\), expected \(1, 1, 1\)"):
        case.run("xla", mask=jnp.ones((1, 1, 2), bool))
    with pytest.raises(ValueError, match=r"values has shape"):
        case.run("xla", values=case.values[:, :, 1:])
    with pytest.raises(ValueError, match="keys is float32 and q is bfloat16"):
        case.run("xla", keys=case.keys.astype(jnp.float32))
    with pytest.raises(ValueError, match="2 query heads do not divide among 3 key heads"):
        case.run("xla", k=jnp.concatenate([case.k] * 3, axis=2))


@pytest.mark.parametrize("sizes_, message", [
    ((1, 1, (2, 1), 96, 64, 2), "heads of width 64, 128 or 256, got 96"),
    ((1, 1, (9, 1), 64, 64, 2), "at most 8 query heads a key head, got 9"),
    ((129, 1, (1, 1), 64, 64, 2), "at most 128 rows, got 129"),
    ((1, 3, (1, 1), 64, 33, 3), "multiple of 8 and at least 64, got 3 x 3 x 33"),
    ((1, 1, (1, 1), 64, 28, 2), "multiple of 8 and at least 64, got 2 x 1 x 28"),
])  # fmt: skip
def test_sizes_that_the_kernel_does_not_take(sizes_, message):
    q, *_, cache, _, _, _ = abstract(*sizes_)
    assert message in (attention_problem(q, cache) or "")


def test_float32_runs_the_reference_with_one_notice(caplog):
    dispatch._notice.cache_clear()
    case = make_case([[-1]], 1, (3,), (2, 1), 64, 64, dtype=jnp.float32)
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        check(case, case.run("auto"), F32)
    assert [record.message for record in caplog.records] == [
        "pallas_kernels: tree attention takes bfloat16, got float32; running the XLA reference"
    ]
    with pytest.raises(ValueError, match="got float32; use 'auto' or 'xla'"):
        case.run("interpret")
