"""The WY solve's two shapes of program, its fused commit, and the pool of pseudo-values.

Two warpgroups make a program where there are many, four where there are few; the interpreter's
cases are few, so ``narrow`` tells the solve that no multiprocessor has room. Tolerances as in
``test_kernels_wy``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_trees
from kernel_cases import (
    check_unwritten_commit,
    expected,
    in_pool,
    make_case,
    order_of,
    relative_rms,
    solve_operands,
)

import pallas_kernels.wy_solve.launch
from pallas_kernels.wy_solve import PathFactors, wy_commit_solve, wy_solve
from pallas_kernels.wy_solve.launch import sizes_of
from pallas_kernels.wy_solve.sizes import SMEM_LIMIT, smem_bytes

IEEE = 3e-7
RNG = np.random.default_rng(6)


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(pallas_kernels.wy_solve.launch, "MULTIPROCESSORS", 0)


def solve(case, implementation="interpret", **how):
    run = jax.jit(functools.partial(wy_solve, implementation=implementation))
    return run(case.R, jnp.int32(case.layer), *solve_operands(case), **how)


CASES = {
    "hydra27": ([random_trees.HYDRA27], 32, (1, 1), (32, 64), "bfloat16"),
    "chain-17": ([random_trees.chain(17), [], [-1]], 24, (1, 2), (24, 40), "float32"),
    "wide-key": ([random_trees.random_parents(RNG, 20)], 24, (1, 1), (160, 64), "bfloat16"),
    "two-segments": ([random_trees.chain(37), [-1], []], 40, (1, 1), (32, 64), "float32"),
    "two-segments-64": ([random_trees.random_parents(RNG, 61)], 64, (1, 1), (64, 64), "bfloat16"),
}


@pytest.mark.parametrize("shape", ["narrow", "wide"])
@pytest.mark.parametrize("name", CASES)
def test_both_shapes_of_program_give_the_recurrence(name, shape, request):
    if shape == "narrow":
        request.getfixturevalue("narrow")
    *sizes, dtype = CASES[name]
    case = make_case(*sizes, jnp.dtype(dtype))
    out, _ = solve(case, order=order_of(case))
    for b, tree in enumerate(case.trees):
        if tree:
            assert relative_rms(out[b, : len(tree)], expected(case, b)[0]) < IEEE
        assert not np.any(out[b, len(tree) :])


def test_few_programs_are_wide_and_many_are_not(monkeypatch):
    """Or the tests above would run one shape twice."""
    seen = []
    kernel = pallas_kernels.wy_solve.mosaic_gpu.solve
    monkeypatch.setattr(
        pallas_kernels.wy_solve.mosaic_gpu,
        "solve",
        lambda sizes, *rest: seen.append(sizes.warpgroups) or kernel(sizes, *rest),
    )
    case = make_case([[-1]], 8, (1, 1), (8, 24))
    solve(case)
    monkeypatch.setattr(pallas_kernels.wy_solve.launch, "MULTIPROCESSORS", 0)
    solve(case)
    assert seen == [4, 2]


@pytest.mark.parametrize(
    "rows,width,implementation",
    [(8, 16, "interpret"), (7, 16, "interpret"), (8, 24, "interpret"), (8, 16, "xla")],
)
def test_pseudo_values_go_into_the_pool(rows, width, implementation):
    """In place, or through a copy where rows or keys are padded; other layers keep their bytes."""
    case = make_case([random_trees.comb(7), []], rows, (1, 1), (width, 128))
    out, u = solve(case, implementation)
    pool = jnp.full((*case.R.shape[:1], *u.shape), 3.0)
    again, U = solve(case, implementation, U=pool)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(U[case.layer, 0, :7], u[0, :7])
    np.testing.assert_array_equal(jnp.delete(U, case.layer, 0), 3.0)


def factors(case, u, b, node):
    """(nodes, k, u, g) of the path to a node of sequence b."""
    nodes = oracle.path_to(case.trees[b], node)
    return nodes, case.k[b, nodes], u[b, nodes], case.g[b, nodes]


@pytest.mark.parametrize("dims,dtype", [((16, 64), "float32"), ((48, 128), "bfloat16")])
@pytest.mark.parametrize("implementation", ["interpret", "xla", "narrow"])
def test_fused_commit_continues_from_the_committed_state(dims, dtype, implementation, request):
    if implementation == "narrow":
        request.getfixturevalue("narrow")
        implementation = "interpret"
    trees = [random_trees.random_parents(RNG, 13), random_trees.random_parents(RNG, 9), []]
    first = make_case(trees, 16, (1, 2), dims, jnp.dtype(dtype), seed=1)
    second = make_case(trees, 16, (1, 2), dims, jnp.dtype(dtype), seed=2)
    _, u = solve(first, "xla", order=order_of(first))
    paths = [factors(first, u, 0, 7), None, None]
    longest = 5

    def padded(part, like):
        rows = [jnp.zeros((longest, *like.shape[2:]), like.dtype)] * 3
        rows[0] = rows[0].at[: len(paths[0][0])].set(paths[0][part][:longest])
        return jnp.stack(rows)

    rows = in_pool(first, padded(1, first.k), padded(2, u), padded(3, first.g))
    previous = PathFactors(*rows, jnp.asarray([min(len(paths[0][0]), longest), 0, 0], jnp.int32))
    node = paths[0][0][min(len(paths[0][0]), longest) - 1]

    @jax.jit
    def run(R, layer, previous):
        operands, order = solve_operands(second), order_of(second)
        return wy_commit_solve(
            R, layer, previous, *operands, order=order, implementation=implementation
        )

    out, _, R = run(first.R, jnp.int32(first.layer), previous)
    middle = expected(first, 0)[1][node]
    assert relative_rms(R[first.layer, 0], middle) < IEEE
    np.testing.assert_array_equal(R[:, 1:], first.R[:, 1:])
    np.testing.assert_array_equal(R[: first.layer], first.R[: first.layer])
    o = second.operands
    rows = (x[0, :13] for x in (o.q, o.k, o.v, o.g, o.beta))
    wanted, _ = oracle.delta_rule_tree(middle, trees[0], *rows)
    assert relative_rms(out[0, :13], wanted) < 2 * IEEE  # two recurrences in a row
    assert not np.any(out[2])


@pytest.mark.parametrize("rows,dtype", [(24, "float32"), (24, "bfloat16"), (40, "bfloat16")])
def test_a_long_path_is_committed_in_blocks(rows, dtype):
    """20 rows: two blocks of 16, the second in part; before a tree of one segment and of two."""
    tree = random_trees.chain(20)
    case = make_case([tree], rows, (1, 1), (32, 64), jnp.dtype(dtype))
    _, u = solve(case, "xla")
    previous = PathFactors(*in_pool(case, case.k, u, case.g), jnp.asarray([20], jnp.int32))
    run = jax.jit(functools.partial(wy_commit_solve, implementation="interpret"))
    *_, R = run(case.R, jnp.int32(case.layer), previous, *solve_operands(case))
    assert relative_rms(R[case.layer, 0], expected(case, 0)[1][19]) < IEEE


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("rows", [24, 40, 70])
def test_a_path_may_be_committed_without_being_written(rows, implementation):
    check_unwritten_commit(rows, (1, 1), (32, 64), "bfloat16", implementation)


def abstract_sizes(dtype, key_dim, path, nodes=32):
    of = jax.ShapeDtypeStruct
    key, value = (of((1, nodes, heads, key_dim), jnp.dtype(dtype)) for heads in (1, 2))
    gate = of((1, 1, path, 2), jnp.float32)
    previous = None
    if path:
        rows = of((1, 1, path, 1, key_dim), key.dtype), of((1, 1, path, 2, key_dim), jnp.float32)
        previous = PathFactors(*rows, gate, of((1,), jnp.int32))
    return sizes_of((key, key, value, None, None, None, None), previous, "ieee")


def test_the_first_form_of_program_that_fits_is_taken():
    """Wide if there is room for it, and a smaller window of the state rather than nothing."""
    assert abstract_sizes("bfloat16", 128, 16).wide
    assert not abstract_sizes("float32", 160, 16).wide
    assert smem_bytes(abstract_sizes("float32", 160, 16)) <= SMEM_LIMIT
    long = smem_bytes(abstract_sizes("bfloat16", 128, 256))
    assert long - smem_bytes(abstract_sizes("bfloat16", 128, 16)) < 10_000  # its decays alone
    assert abstract_sizes("bfloat16", 256, 0).window == 4
    assert abstract_sizes("float32", 256, 0).window < 4


def test_two_segments_are_one_pass_where_both_fit():
    """The state of one head and 64 bfloat16 rows do, also after a path; float32 rows do not."""
    for path in (0, 16):
        assert [abstract_sizes("bfloat16", 128, path, n).passes for n in (32, 40, 64, 72)] == [
            1, 1, 1, 3
        ]  # fmt: skip
    assert abstract_sizes("float32", 128, 0, 40).passes == 2
    assert abstract_sizes("bfloat16", 256, 0, 40).passes == 2


def test_a_path_that_no_copy_can_move_is_refused():
    case = make_case([[-1]], 8, (1, 1), (16, 64))
    rows = [jnp.repeat(x, 300, axis=1)[:, :300] for x in (case.k, case.v, case.g)]
    previous = PathFactors(*in_pool(case, *rows), jnp.asarray([1], jnp.int32))
    with pytest.raises(ValueError, match="paths of at most 256 rows, not 304"):
        wy_commit_solve(
            case.R, jnp.int32(0), previous, *solve_operands(case), implementation="interpret"
        )
