"""The WY kernels against the float64 recurrence: trees of any packing, odd sizes, both dtypes.

Tolerance: 3e-7 relative RMS, the bound for float32-accurate products on 28 rows (a sequential
float32 recurrence has 1e-7 to 3e-7); operands are rounded to their dtype first, so bfloat16 keys
cost nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_trees
from kernel_cases import (
    expected,
    lower_for_h200,
    make_case,
    order_of,
    relative_rms,
    solve_operands,
)

from pallas_kernels.bench.operands import Operands
from pallas_kernels.wy_commit import wy_commit
from pallas_kernels.wy_solve import PathFactors, wy_commit_solve, wy_solve

IEEE = 3e-7
RNG = np.random.default_rng(5)


def solve(case, precision="ieee", implementation="interpret"):
    @jax.jit
    def run(R, layer, order):
        operands = solve_operands(case)
        return wy_solve(
            R, layer, *operands, precision=precision, order=order, implementation=implementation
        )

    return run(case.R, jnp.int32(case.layer), order_of(case))


def check_outputs(case, out, bound=IEEE):
    for b, tree in enumerate(case.trees):
        if tree:
            assert relative_rms(out[b, : len(tree)], expected(case, b)[0]) < bound, (b, tree)
        assert not np.any(out[b, len(tree) :])


CASES = {
    "one": ([[-1]], 8, (1, 1), (16, 64), "float32"),
    "chain-7": ([random_trees.chain(7)], 8, (1, 1), (16, 64), "bfloat16"),
    "star-7": ([random_trees.star(7)], 8, (1, 1), (32, 64), "float32"),
    "comb-27": ([random_trees.comb(27)], 32, (1, 1), (24, 40), "float32"),
    "random-31": ([random_trees.random_parents(RNG, 31)], 31, (1, 1), (48, 64), "bfloat16"),
    "children-first": (
        [random_trees.children_first(random_trees.random_parents(RNG, 13))[0], [], [-1, 0]],
        16, (1, 3), (16, 128), "float32",
    ),
    "hydra27": ([random_trees.HYDRA27], 32, (1, 1), (128, 128), "bfloat16"),
    "segments": ([random_trees.random_parents(RNG, 70), [-1]], 72, (1, 1), (16, 64), "float32"),
    "segments-bf16": ([random_trees.chain(40)], 64, (1, 1), (16, 64), "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_solve_gives_the_recurrence(name):
    trees, capacity, heads, dims, dtype = CASES[name]
    case = make_case(trees, capacity, heads, dims, jnp.dtype(dtype), seed=len(name))
    out, u = solve(case)
    check_outputs(case, out)
    reference = solve(case, implementation="xla")
    check_outputs(case, reference[0])
    for b, tree in enumerate(trees):
        if tree:
            assert relative_rms(u[b, : len(tree)], reference[1][b, : len(tree)]) < 2 * IEEE


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_correlated_keys_stay_at_the_recurrence(implementation):
    case = make_case([random_trees.HYDRA27, random_trees.chain(28)], 32, (1, 1), (32, 64),
                     kind="correlated")  # fmt: skip
    out, u = solve(case, implementation=implementation)
    check_outputs(case, out, 2 * IEEE)  # an output is a small difference of what it reads
    R = commit(case, u, [26, 27], implementation)
    for b, node in enumerate([26, 27]):
        # XLA's triangular solve on a CPU sums in another order: 3.4e-7 on the chain.
        bound = IEEE if implementation == "interpret" else 1.5 * IEEE
        assert relative_rms(R[-1, b], expected(case, b)[1][node]) < bound


def commit(case, u, nodes, implementation="interpret", longer=0):
    """The pool after committing the path to one node of every sequence, None for no path; with
    ``longer`` rows said to be on each path than it has."""
    capacity = case.parent.shape[1]
    table, length = np.full((len(nodes), capacity), -1, np.int32), []
    for b, node in enumerate(nodes):
        path = [] if node is None else oracle.path_to(case.trees[b], node)
        table[b, : len(path)] = path
        length.append(len(path) + longer)
    layers = case.R.shape[0]
    k, u, g = (jnp.stack([x] * layers) for x in (case.k, u, case.g))
    run = jax.jit(wy_commit, static_argnames="implementation")
    return run(case.R, k, u, g, table, jnp.asarray(length), implementation=implementation)


@pytest.mark.parametrize(
    "dims,dtype", [((16, 64), "float32"), ((24, 40), "bfloat16"), ((128, 128), "bfloat16")]
)
def test_commit_gives_the_state_in_all_layers(dims, dtype):
    trees = [random_trees.random_parents(RNG, 13), [-1, 0, 1], []]
    case = make_case(trees, 16, (1, 2), dims, jnp.dtype(dtype))
    _, u = solve(case, implementation="xla")
    u = jnp.where(jnp.arange(16)[None, :, None, None] < case.size[:, None, None, None], u, jnp.nan)
    R = commit(case, u, [9, None, None])
    assert relative_rms(R[case.layer, 0], expected(case, 0)[1][9]) < IEEE
    for b in (1, 2):  # no path: not a bit changes
        np.testing.assert_array_equal(R[:, b], case.R[:, b])
    assert relative_rms(R, commit(case, u, [9, None, None], "xla")) < IEEE


def test_a_length_past_the_paths_end_does_what_the_reference_does():
    """A stale length is a mistake, and must show on every device alike: a kernel that read row -1
    found zeros in a GPU's bulk copies, and published the right state by luck."""
    case = make_case([[-1, 0, 1]], 16, (1, 2), (16, 64))
    _, u = solve(case, implementation="xla")
    wrong, right = (commit(case, u, [1], longer=n) for n in (2, 0))
    assert relative_rms(wrong, commit(case, u, [1], "xla", longer=2)) < IEEE
    assert relative_rms(wrong, right) > 1e-3


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_inactive_rows_have_no_effect_whatever_they_hold(implementation):
    case = make_case([random_trees.comb(11), [], [-1]], 16, (1, 1), (16, 64))
    rows = jnp.arange(16)[None, :] >= case.size[:, None]
    spoiled = {
        name: jnp.where(rows.reshape(3, 16, *[1] * (x.ndim - 2)), jnp.nan, x)
        for name, x in ((n, getattr(case, n)) for n in ("q", "k", "v", "g", "beta"))
    }
    out, _ = solve(dataclasses.replace(case, **spoiled), implementation=implementation)
    np.testing.assert_array_equal(out, solve(case, implementation=implementation)[0])
    check_outputs(case, out)


@pytest.mark.parametrize("precision,bound", [("bf16x3", 3e-5), ("tf32", 2e-3)])
def test_lower_precisions_stay_within_their_stated_error(precision, bound):
    case = make_case([random_trees.HYDRA27], 32, (1, 1), (32, 64), kind="correlated")
    check_outputs(case, solve(case, precision)[0], bound)


def test_fc09_extreme_decays_and_degenerate_keys():
    """FC-09: log decays of -30 a row; zero keys; equal keys with write strength 1: all finite."""
    trees = [random_trees.chain(27)] * 3
    base = make_case(trees, 32, (1, 1), (16, 64))
    g = jnp.full_like(base.g, -1e-4).at[0].set(-30.0)
    k = base.k.at[1].set(0.0).at[2].set(base.k[2, :1])
    beta = jnp.ones_like(base.beta)
    exact = (np.asarray(x, np.float64) for x in (base.q, k, base.v, g, beta))
    case = dataclasses.replace(base, k=k, g=g, beta=beta, operands=Operands(*exact))
    # Equal keys: each output is a small difference of large sums, in any float32 form.
    check_outputs(case, solve(case)[0], 1e-6)


def big_arguments(rows, dtype, batch=1):
    """Shapes of a 27B model's layer: q, v, g, and (R, layer, ancestors, size)."""
    of = jax.ShapeDtypeStruct
    q, v = (of((batch, rows, heads, 128), jnp.dtype(dtype)) for heads in (16, 48))
    R, layer = of((2, batch, 48, 128, 128), jnp.float32), of((), jnp.int32)
    seen, size = of((batch, rows, rows), jnp.bool_), of((batch,), jnp.int32)
    return q, v, of((batch, rows, 48), jnp.float32), (R, layer, seen, size)


@pytest.mark.parametrize(
    "rows,dtype,batch", [(32, "float32", 1), (32, "bfloat16", 8), (40, "bfloat16", 1)]
)
def test_solve_lowers_for_an_h200(rows, dtype, batch):
    """The kernel and not its reference, at the size of a 27B model's layer."""
    q, v, g, (R, layer, seen, size) = big_arguments(rows, dtype, batch)
    verify = functools.partial(wy_solve, implementation="mosaic_gpu")
    assert "mosaic_gpu" in lower_for_h200(verify, R, layer, q, q, v, g, g, seen, size)


def test_commits_lower_for_an_h200():
    """Alone for all layers, and fused with the next solve."""
    q, v, g, (R, layer, seen, size) = big_arguments(32, "bfloat16")
    of = jax.ShapeDtypeStruct
    u = of(v.shape, jnp.float32)
    pool = [of((R.shape[0], 1, 12, *x.shape[2:]), x.dtype) for x in (q, u, g)]
    path = PathFactors(*pool, size)
    fused = functools.partial(wy_commit_solve, implementation="mosaic_gpu")
    assert "mosaic_gpu" in lower_for_h200(fused, R, layer, path, q, q, v, g, g, seen, size)
    publish = functools.partial(wy_commit, implementation="mosaic_gpu")
    stacked = [of((2, *x.shape), x.dtype) for x in (q, u, g)]
    assert "mosaic_gpu" in lower_for_h200(publish, R, *stacked, of((1, 12), jnp.int32), size)


def test_mistakes_are_named():
    case = make_case([[-1, 0]], 8)
    with pytest.raises(ValueError, match="precision 'fp8' is unknown, expected one of: ieee"):
        solve(case, precision="fp8")
    with pytest.raises(ValueError, match="'mosaic_gpu': the kernels need a Hopper GPU"):
        solve(case, implementation="mosaic_gpu")
    mixed = dataclasses.replace(case, v=case.v.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="all float32 or all bfloat16, got bfloat16, float32"):
        solve(mixed, implementation="interpret")
