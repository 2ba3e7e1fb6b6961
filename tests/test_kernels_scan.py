"""The two scans of a tree against the float64 recurrence, and against replay bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import expected, lower_for_h200, make_case, relative_rms
from random_trees import HYDRA27, chain, children_first, comb, random_parents, star

from pallas_kernels.node_scan import node_scan
from pallas_kernels.path_scan import memory, path_scan
from pallas_kernels.replay import replay
from pallas_kernels.walk import Walk, path_steps, plan, plan_paths

SCANS = {"path_scan": path_scan, "node_scan": node_scan, "every path": node_scan}


@functools.partial(jax.jit, static_argnames=("name", "implementation"))
def run(R, layer, q, k, v, alpha, beta, parent, size, name, implementation):
    """(out,) or (out, states) of either scan, or of the second over every path by itself."""
    scan, bound = SCANS[name], parent.shape[1] - 1
    walk = plan_paths(parent, size, bound) if name == "every path" else plan(parent, size)
    out = scan(R, layer, q, k, v, alpha, beta, walk, implementation=implementation)
    return (out,) if name == "path_scan" else out


def run_case(case, name, implementation):
    layer = jnp.int32(case.layer)
    rows = (case.q, case.k, case.v, case.alpha, case.beta)
    return run(case.R, layer, *rows, case.parent, case.size, name, implementation)


def check(case, name, implementation, tolerance):
    results = [np.asarray(x) for x in run_case(case, name, implementation)]
    for b, tree in enumerate(case.trees):
        size = len(tree)
        np.testing.assert_array_equal(results[0][b, size:], 0)
        if size:
            for found, wanted in zip(results, expected(case, b), strict=False):
                assert relative_rms(found[b, :size], wanted) < tolerance


def binary(levels):
    """The complete binary tree: it fills every slot, those in global memory too."""
    return [-1] + [(row - 1) // 2 for row in range(1, 2**levels - 1)]


CASES = {
    "one node": ([[-1]], 1, (1, 1), (16, 64), "realistic"),
    "7 nodes, 24x40, ratio 3": ([comb(7), []], 7, (1, 3), (24, 40), "realistic"),
    "31 nodes, every slot": ([children_first(binary(5))[0]], 31, (1, 1), (32, 64), "correlated"),
    "hydra27, empty, star": ([HYDRA27, [], star(27)], 32, (1, 1), (16, 64), "correlated"),
    "random, 128x128": (
        [random_parents(np.random.default_rng(0), 27)], 32, (1, 1), (128, 128), "realistic",
    ),
    "two key heads, 8x8": ([chain(7), star(5)], 8, (2, 2), (8, 8), "realistic"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("case", list(CASES)[1:4])
def test_reference_matches_the_recurrence(case, name):
    *rest, kind = CASES[case]
    check(make_case(*rest, kind=kind), name, "xla", 5e-7)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_path_scan_matches_the_recurrence(case):
    *rest, kind = case
    check(make_case(*rest, kind=kind), "path_scan", "interpret", 5e-7)


@pytest.mark.parametrize("case", ["7 nodes, 24x40, ratio 3", "random, 128x128"])
def test_path_scan_takes_bfloat16(case):
    *rest, kind = CASES[case]
    check(make_case(*rest, jnp.bfloat16, kind=kind), "path_scan", "interpret", 5e-7)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("7 nodes, 24x40, ratio 3", jnp.bfloat16),
        ("hydra27, empty, star", jnp.float32),
    ],
)
def test_node_scan_matches_the_recurrence(case, dtype):
    *rest, kind = CASES[case]
    check(make_case(*rest, dtype, kind=kind), "node_scan", "interpret", 5e-7)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("7 nodes, 24x40, ratio 3", jnp.bfloat16),
        ("hydra27, empty, star", jnp.float32),
    ],
)
def test_every_path_by_itself_writes_the_same_bits(case, dtype):
    """Walks longer than the rows, which start again from the sequence's own state."""
    *rest, kind = CASES[case]
    case = make_case(*rest, dtype, kind=kind)
    check(case, "every path", "interpret", 5e-7)
    paths, nodes = (run_case(case, name, "interpret") for name in ("every path", "node_scan"))
    np.testing.assert_array_equal(paths[0], nodes[0])
    for b, tree in enumerate(case.trees):
        np.testing.assert_array_equal(paths[1][b, : len(tree)], nodes[1][b, : len(tree)])


def test_both_scans_are_bitwise_the_native_recurrence():
    """Every node's output and state: a one-node scan and a one-row replay from its parent."""
    tree = random_parents(np.random.default_rng(2), 8)
    case = make_case([tree], 8, (1, 1), (32, 64), kind="correlated")
    out, states = (np.asarray(x) for x in run_case(case, "node_scan", "interpret"))
    np.testing.assert_array_equal(np.asarray(run_case(case, "path_scan", "interpret")[0]), out)
    one = jnp.ones(1, jnp.int32)
    publish = jax.jit(functools.partial(replay, implementation="interpret"))
    for node, parent in enumerate(tree):
        before = case.R[case.layer] if parent < 0 else jnp.asarray(states[:, parent])
        q, k, v, alpha, beta = (
            x[:, node : node + 1] for x in (case.q, case.k, case.v, case.alpha, case.beta)
        )
        alone = run(
            before[None], jnp.int32(0), q, k, v, alpha, beta, -one[:, None], one,
            "path_scan", "interpret",
        )[0]  # fmt: skip
        path = jnp.zeros((1, 1), jnp.int32)
        after = publish(before[None], k[None], v[None], alpha[None], beta[None], path, one)
        np.testing.assert_array_equal(np.asarray(alone[0, 0]), out[0, node])
        np.testing.assert_array_equal(np.asarray(after[0]), states[:, node])


def test_inactive_rows_and_sequences_are_neither_read_nor_used():
    case = make_case([[], [-1, 0, 0]], 8, (1, 1), (16, 64))
    poisoned = [
        x.at[1, 3:].set(jnp.nan).at[0].set(jnp.nan)
        for x in (case.q, case.k, case.v, case.alpha, case.beta)
    ]
    R = case.R.at[:, 0].set(jnp.nan)
    layer = jnp.int32(case.layer)
    out = run(R, layer, *poisoned, case.parent, case.size, "path_scan", "interpret")[0]
    clean = run_case(case, "path_scan", "interpret")[0]
    np.testing.assert_array_equal(np.asarray(out), np.asarray(clean))


def lowered(scan, batch, nodes, heads, dims, dtype, steps=None):
    (key_heads, value_heads), (dk, dv) = heads, dims
    spec, f32 = jax.ShapeDtypeStruct, jnp.float32
    table = spec((batch, steps or nodes), jnp.int32)
    return lower_for_h200(
        functools.partial(scan, implementation="mosaic_gpu"),
        spec((4, batch, value_heads, dv, dk), f32),
        spec((), jnp.int32),
        *[spec((batch, nodes, key_heads, dk), dtype)] * 2,
        spec((batch, nodes, value_heads, dv), dtype),
        *[spec((batch, nodes, value_heads), f32)] * 2,
        Walk(node=table, load=table, save=table, size=spec((batch,), jnp.int32)),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_lowers_for_an_h200(scan, batch, dtype):
    assert "mosaic_gpu" in lowered(scan, batch, 32, (16, 48), (128, 128), dtype)


@pytest.mark.parametrize(
    ("nodes", "heads", "dims", "dtype"),
    [
        (1, (1, 1), (8, 8), jnp.float32),
        (7, (1, 3), (24, 40), jnp.bfloat16),
        (31, (2, 16), (48, 80), jnp.float32),
        (64, (1, 1), (256, 256), jnp.bfloat16),
        (128, (2, 4), (128, 64), jnp.float32),
        (128, (1, 1), (96, 96), jnp.bfloat16),
        (8, (1, 1), (144, 64), jnp.bfloat16),  # rows widened in pieces that do not fill a vector
        (128, (1, 1), (200, 64), jnp.bfloat16),  # all of the shared memory
    ],
)
def test_odd_shapes_lower_for_an_h200(nodes, heads, dims, dtype):
    assert "mosaic_gpu" in lowered(path_scan, 1, nodes, heads, dims, dtype)


@pytest.mark.parametrize(
    ("nodes", "depth", "dims", "dtype"),
    [
        (32, 11, (128, 128), jnp.float32),
        (32, 11, (128, 128), jnp.bfloat16),
        (7, 2, (24, 40), jnp.bfloat16),
        (128, 127, (128, 64), jnp.bfloat16),  # 4160 steps, copied 256 at a time
    ],
)
def test_walks_of_every_path_lower_for_an_h200(nodes, depth, dims, dtype):
    steps = path_steps(nodes, depth)
    assert "mosaic_gpu" in lowered(node_scan, 8, nodes, (2, 4), dims, dtype, steps)


def test_what_the_kernel_cannot_take_is_refused_or_referred():
    with pytest.raises(ValueError, match="bytes of shared memory"):
        lowered(path_scan, 1, 128, (1, 1), (256, 64), jnp.float32)
    with pytest.raises(ValueError, match="float16"):
        lowered(path_scan, 1, 8, (1, 1), (16, 64), jnp.float16)
    with pytest.raises(ValueError, match="head widths to 256"):
        lowered(node_scan, 1, 8, (1, 1), (272, 64), jnp.float32)
    with pytest.raises(ValueError, match="128 nodes, walked in 4160 steps, of width 128 in flo"):
        lowered(node_scan, 1, 128, (1, 1), (128, 64), jnp.float32, path_steps(128, 127))
    with pytest.raises(ValueError, match=r"shape \(1, 16\) and the rows \(1, 8\)"):
        lowered(path_scan, 1, 8, (1, 1), (16, 64), jnp.float32, 16)
    case = make_case([[-1, 0]], 8, (1, 1), (16, 64))
    with pytest.raises(ValueError, match="default device is a CPU"):
        run_case(case, "path_scan", "mosaic_gpu")
    auto = run_case(case, "path_scan", "auto")[0]
    np.testing.assert_array_equal(auto, run_case(case, "path_scan", "xla")[0])


@pytest.mark.parametrize("export", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_two_programs_share_a_multiprocessor_at_the_main_shape(dtype, export):
    plan = memory.plan(32, 32, 128, jnp.dtype(dtype), export)
    assert plan.bytes <= memory.PAIRED_BYTES
    assert plan.slots >= 1 or export  # hydra27 needs one
