"""Replay against the float64 recurrence, and bitwise against its own single tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from kernel_cases import lower_for_h200, make_case, relative_rms
from random_trees import HYDRA27, chain, random_parents

from pallas_kernels.bench.operands import Shape, make_state
from pallas_kernels.replay import replay

interpreted = jax.jit(functools.partial(replay, implementation="interpret"))
referred = jax.jit(functools.partial(replay, implementation="xla"))

PATHS = np.array([[0, 2, 5, 1, 6], [0, -1, -1, -1, -1], [-1] * 5, [0, 3, 4, -1, -1]], np.int32)
LENGTHS = np.array([5, 1, 0, 3], np.int32)


def make_layers(rows, batch, heads, dims, dtype, kind="realistic", layers=2):
    """A pool and the recorded operands of its layers, each from a seed of its own."""
    cases = [
        make_case([chain(rows)] * batch, rows, heads, dims, dtype, 1, kind, seed)
        for seed in range(layers)
    ]
    R = jnp.asarray(make_state(Shape(batch, rows, *heads, *dims), layers))
    stacked = [jnp.stack([getattr(c, name) for c in cases]) for name in ("k", "v", "alpha", "beta")]
    return R, stacked, [c.operands for c in cases]


def expected(R, operands, nodes, length):
    """The pool in float64."""
    R = np.array(R, np.float64)
    for layer, o in enumerate(operands):
        for b in range(R.shape[1]):
            rows = [x[b, nodes[b, : length[b]]] for x in (o.q, o.k, o.v, o.g, o.beta)]
            R[layer, b] = oracle.delta_rule(R[layer, b], *rows)[1]
    return R


def test_reference_matches_the_recurrence():
    R, operands, exact = make_layers(8, 4, (1, 3), (24, 40), jnp.float32)
    after = np.asarray(referred(R, *operands, PATHS, LENGTHS))
    assert relative_rms(after, expected(R, exact, PATHS, LENGTHS)) < 3e-7
    np.testing.assert_array_equal(after[:, 2], R[:, 2])


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "kind"),
    [
        ((1, 1), (16, 64), jnp.float32, "realistic"),
        ((1, 1), (128, 128), jnp.float32, "correlated"),
        ((1, 3), (24, 40), jnp.float32, "realistic"),
        ((2, 2), (20, 64), jnp.bfloat16, "correlated"),
        ((1, 1), (8, 8), jnp.bfloat16, "realistic"),
    ],
    ids=["16x64", "128x128", "ratio 3, 24x40", "two key heads, 20x64 bf16", "8x8 bf16"],
)
def test_kernel_matches_the_recurrence(heads, dims, dtype, kind):
    R, operands, exact = make_layers(8, 4, heads, dims, dtype, kind)
    after = np.asarray(interpreted(R, *operands, PATHS, LENGTHS))
    before = np.asarray(R)
    assert relative_rms(after, expected(R, exact, PATHS, LENGTHS)) < 5e-7
    np.testing.assert_array_equal(after[:, 2].view(np.int32), before[:, 2].view(np.int32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_replay_is_bitwise_a_chain_of_single_tokens(dtype):
    R, operands, _ = make_layers(7, 1, (1, 1), (32, 64), dtype, "correlated")
    path = np.array([[0, 2, 5, 6, 1, 3]], np.int32)
    at_once = interpreted(R, *operands, path, np.array([6], np.int32))
    for node in path[0]:
        token = [x[:, :, node : node + 1] for x in operands]
        R = interpreted(R, *token, np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    np.testing.assert_array_equal(np.asarray(R), np.asarray(at_once))


def test_rows_that_take_no_part_keep_their_bytes_even_if_not_finite():
    R, operands, _ = make_layers(8, 2, (1, 1), (16, 64), jnp.float32, layers=1)
    R = R.at[:, 0].set(jnp.nan)
    operands[0] = operands[0].at[:, 0].set(jnp.nan)
    after = interpreted(R, *operands, PATHS[:2], np.array([0, 1], np.int32))
    assert np.isnan(after[:, 0]).all() and np.isfinite(after[:, 1]).all()


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowers_for_an_h200(batch, dtype):
    spec, f32 = jax.ShapeDtypeStruct, jnp.float32
    text = lower_for_h200(
        functools.partial(replay, implementation="mosaic_gpu"),
        spec((4, batch, 48, 128, 128), f32),
        spec((4, batch, 32, 16, 128), dtype),
        spec((4, batch, 32, 48, 128), dtype),
        *[spec((4, batch, 32, 48), f32)] * 2,
        spec((batch, 9), jnp.int32),
        spec((batch,), jnp.int32),
    )
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (48, 64), (96, 80), (256, 256)])
def test_odd_widths_lower_for_an_h200(dims):
    R, operands, _ = make_layers(7, 1, (1, 3), dims, jnp.bfloat16)
    kernel = functools.partial(replay, implementation="mosaic_gpu")
    text = lower_for_h200(kernel, R, *operands, PATHS[:1], LENGTHS[:1])
    assert "mosaic_gpu" in text


def test_what_the_kernel_cannot_take_is_refused_or_referred():
    R, (k, v, alpha, beta), _ = make_layers(7, 1, (1, 1), (16, 64), jnp.float32)
    nodes, length = PATHS[:1], LENGTHS[:1]
    with pytest.raises(ValueError, match="all float32 or all bfloat16"):
        replay(R, k.astype(jnp.bfloat16), v, alpha, beta, nodes, length, implementation="interpret")
    with pytest.raises(ValueError, match="needs? a Hopper GPU|default device is a CPU"):
        replay(R, k, v, alpha, beta, nodes, length, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="bytes of shared memory"):
        wide = jnp.zeros((1, 1, 2, 1, 256)), jnp.zeros((1, 1, 2, 1, 256))
        gates = jnp.ones((1, 1, 2, 1))
        replay(
            jnp.zeros((1, 1, 1, 256, 256)), *wide, gates, gates,
            jnp.zeros((1, 256), jnp.int32), length, implementation="interpret",
        )  # fmt: skip
    half = [x.astype(jnp.float16) for x in (k, v)]
    assert replay(R, *half, alpha, beta, nodes, length).shape == R.shape


def test_any_tree_path_matches_the_tree_recurrence():
    tree = HYDRA27
    case = make_case([tree, random_parents(np.random.default_rng(5), 31)], 32, dims=(16, 64))
    leaf = [len(tree) - 1, 30]
    nodes, length = np.full((2, 32), -1, np.int32), np.zeros(2, np.int32)
    for b in range(2):
        path = oracle.path_to(case.trees[b], leaf[b])
        nodes[b, : len(path)], length[b] = path, len(path)
    stacked = [x[None] for x in (case.k, case.v, case.alpha, case.beta)]
    after = interpreted(case.R[case.layer][None], *stacked, nodes, length)
    o = case.operands
    for b in range(2):
        rows = (x[b, : len(case.trees[b])] for x in (o.q, o.k, o.v, o.g, o.beta))
        R0 = np.asarray(case.R[case.layer, b], np.float64)
        states = oracle.delta_rule_tree(R0, case.trees[b], *rows)[1]
        assert relative_rms(after[0, b], states[leaf[b]]) < 5e-7
