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
from kernel_cases import ancestors_of, expected, make_case, order_of, relative_rms

import pallas_kernels.wy_solve
from pallas_kernels.wy_solve import PathFactors, wy_commit_solve, wy_solve

IEEE = 3e-7
RNG = np.random.default_rng(6)


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(pallas_kernels.wy_solve, "MULTIPROCESSORS", 0)


def operands_of(case):
    return case.q, case.k, case.v, case.g, case.beta, ancestors_of(case), case.size


def solve(case, implementation="interpret", **how):
    run = jax.jit(functools.partial(wy_solve, implementation=implementation))
    return run(case.R, jnp.int32(case.layer), *operands_of(case), **how)


CASES = {
    "hydra27": ([random_trees.HYDRA27], 32, (1, 1), (32, 64), "bfloat16"),
    "chain-17": ([random_trees.chain(17), [], [-1]], 24, (1, 2), (24, 40), "float32"),
    "wide-key": ([random_trees.random_parents(RNG, 20)], 24, (1, 1), (160, 64), "bfloat16"),
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
    monkeypatch.setattr(pallas_kernels.wy_solve, "MULTIPROCESSORS", 0)
    solve(case)
    assert seen == [4, 2]


@pytest.mark.parametrize("rows,implementation", [(8, "interpret"), (7, "interpret"), (8, "xla")])
def test_pseudo_values_go_into_the_pool(rows, implementation):
    """In place with 8 rows, through a copy with 7; other layers keep their bytes."""
    case = make_case([random_trees.comb(7), []], rows, (1, 1), (16, 128))
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

    previous = PathFactors(
        padded(1, first.k),
        padded(2, u),
        padded(3, first.g),
        jnp.asarray([min(len(paths[0][0]), longest), 0, 0], jnp.int32),
    )
    node = paths[0][0][min(len(paths[0][0]), longest) - 1]

    @jax.jit
    def run(R, layer, previous):
        case = second
        operands = case.q, case.k, case.v, case.g, case.beta, ancestors_of(case), case.size
        return wy_commit_solve(
            R, layer, previous, *operands, order=order_of(case), implementation=implementation
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_path_is_committed_in_blocks(dtype):
    """20 rows: two blocks of 16, the second in part."""
    tree = random_trees.chain(20)
    case = make_case([tree], 24, (1, 1), (32, 64), jnp.dtype(dtype))
    _, u = solve(case, "xla")
    previous = PathFactors(case.k, u, case.g, jnp.asarray([20], jnp.int32))
    run = jax.jit(functools.partial(wy_commit_solve, implementation="interpret"))
    *_, R = run(case.R, jnp.int32(case.layer), previous, *operands_of(case))
    assert relative_rms(R[case.layer, 0], expected(case, 0)[1][19]) < IEEE
