"""What the kernel tests share: operands as the kernels see them, errors, an abstract H200.

Trees come from ``random_trees``.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.bench.operands import Operands, Shape, make_operands, make_state
from pallas_kernels.wy_solve import PathFactors, wy_commit_solve, wy_solve


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: a pool, its layer, operands in the kernel's dtype, and trees of a batch."""

    shape: Shape
    R: jax.Array
    layer: int
    operands: Operands  # rounded to the dtype, then exact in float64
    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    alpha: jax.Array
    beta: jax.Array
    parent: jax.Array  # [B, N], -1 padded
    size: jax.Array  # [B]
    trees: list


def make_case(
    trees,
    capacity,
    heads=(1, 2),
    dims=(16, 64),
    dtype=jnp.float32,
    layers=2,
    kind="realistic",
    seed=0,
):
    """A case with one tree a sequence; an empty list stands for a row that takes no part.

    heads: (Hk, Hv). dims: (dk, dv). The call reads the last layer of the pool.
    """
    shape = Shape(len(trees), capacity, *heads, *dims)
    exact = make_operands(shape, kind, seed)
    q, k, v = (jnp.asarray(x, dtype) for x in (exact.q, exact.k, exact.v))
    g, beta = jnp.asarray(exact.g, jnp.float32), jnp.asarray(exact.beta, jnp.float32)
    rounded = Operands(*(np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, g, beta)))
    parent = np.full((len(trees), capacity), -1, np.int32)
    for b, tree in enumerate(trees):
        parent[b, : len(tree)] = tree
    return Case(
        shape=shape,
        R=jnp.asarray(make_state(shape, layers, seed)),
        layer=layers - 1,
        operands=rounded,
        q=q,
        k=k,
        v=v,
        g=g,
        alpha=jnp.exp(g),
        beta=beta,
        parent=jnp.asarray(parent),
        size=jnp.asarray([len(tree) for tree in trees], jnp.int32),
        trees=trees,
    )


def expected(case, b):
    """Float64 (outputs [n, Hv, dv], states [n, Hv, dv, dk]) of sequence b's tree."""
    n, o = len(case.trees[b]), case.operands
    R0 = np.asarray(case.R[case.layer, b], np.float64)
    rows = (x[b, :n] for x in (o.q, o.k, o.v, o.g, o.beta))
    return oracle.delta_rule_tree(R0, case.trees[b], *rows)


def ancestors_of(case):
    """[B, N, N] bool, row i marks itself and its ancestors; inactive rows mark nothing."""
    seen = np.zeros((*case.parent.shape, case.parent.shape[1]), bool)
    for b, tree in enumerate(case.trees):
        for node in range(len(tree)):
            seen[b, node, oracle.path_to(tree, node)] = True
    return jnp.asarray(seen)


def solve_operands(case):
    """What a WY solve takes after the pool and the layer."""
    return case.q, case.k, case.v, case.g, case.beta, ancestors_of(case), case.size


def in_pool(case, *rows):
    """Rows [B, ...] of the case's layer as pools [L, B, ...]; other layers hold other numbers."""
    layers = jnp.arange(case.R.shape[0]) == case.layer
    pick = [layers.reshape(-1, *[1] * x.ndim) for x in rows]
    return [jnp.where(mine, x, 7 * x + 1) for mine, x in zip(pick, rows, strict=True)]


def order_of(case):
    """[B, N]: a topological order of every tree's rows, inactive rows last."""
    rows = []
    for tree in case.trees:
        order = list(oracle.parents_first(tree)) if tree else []
        rows.append(order + [i for i in range(case.parent.shape[1]) if i not in order])
    return jnp.asarray(rows, jnp.int32)


def relative_rms(x, reference):
    """RMS error over RMS of the reference."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def abstract_gpu(kind):
    """A mesh of one GPU of a kind, not there, to lower for."""
    rest = ("gpu",) if len(AbstractDevice.__dataclass_fields__) > 2 else ()  # jax 0.12 asks for it
    return AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, 132, *rest))


def lower_for_h200(f, *args):
    """The lowered text of f for an H200 that is not there; bad layouts raise."""
    with use_abstract_mesh(abstract_gpu("NVIDIA H200")):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def check_unwritten_commit(rows, heads, dims, dtype, implementation):
    """Outputs are the same where a committed path is not written, and the pool's bytes stay.

    Sequences differ in one call; trees of more than 32 rows have later segments, which read the
    state again.
    """
    rng = np.random.default_rng(6)
    tree = [-1, *(int(rng.integers(i)) for i in range(1, rows - 3))]  # parents come first
    case = make_case([tree, tree[:5], tree], rows, heads, dims, jnp.dtype(dtype))
    path = make_case([[*range(-1, 15)]] * 3, 16, heads, dims, jnp.dtype(dtype), seed=5)
    solve = functools.partial(wy_solve, implementation="xla")
    _, u = jax.jit(solve)(path.R, jnp.int32(path.layer), *solve_operands(path))
    factors = *in_pool(path, path.k, u, path.g), jnp.full(3, 16, jnp.int32)
    commit = jax.jit(functools.partial(wy_commit_solve, implementation=implementation))
    given = jnp.int32(case.layer), PathFactors(*factors), *solve_operands(case)
    # One program, interpreted ones take long to compile; without ``write`` is another test's case.
    wanted, U, written = commit(case.R, *given, write=jnp.array([True, True, True]))
    out, u, R = commit(case.R, *given, write=jnp.array([False, True, False]))
    for b, parents in enumerate(case.trees):
        assert not np.array_equal(written[:, b], case.R[:, b])
        np.testing.assert_array_equal(R[:, b], (written if b == 1 else case.R)[:, b])
        for ours, theirs in ((out, wanted), (u, U)):
            np.testing.assert_array_equal(ours[b, : len(parents)], theirs[b, : len(parents)])
    R0, o = np.asarray(written[case.layer, 0], np.float64), case.operands
    here = (x[0, : len(tree)] for x in (o.q, o.k, o.v, o.g, o.beta))
    exact = oracle.delta_rule_tree(R0, tree, *here)[0]
    assert relative_rms(out[0, : len(tree)], exact) < 3e-7
