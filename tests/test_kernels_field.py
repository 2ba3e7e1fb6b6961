"""Field cases of kernels: sizes (FC-24), races between a program's threads, paths of any length."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_trees
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import expected, in_pool, lower_for_h200, make_case, relative_rms, solve_operands

import pallas_kernels.wy_solve.launch
from pallas_kernels.node_scan import node_scan
from pallas_kernels.path_scan import path_scan
from pallas_kernels.replay import replay
from pallas_kernels.tree_conv import tree_conv
from pallas_kernels.walk import plan, plan_paths
from pallas_kernels.wy_commit import wy_commit
from pallas_kernels.wy_solve import PathFactors, wy_commit_solve, wy_solve
from pallas_kernels.wy_solve import mosaic_gpu as solve_kernel

TREE = [-1, 0, 0, 1, 1, 3, 2]
ERROR = 5e-7  # of a float32 recurrence over a few nodes


def scan(case, scan=path_scan, plan=plan):
    rows = case.q, case.k, case.v, case.alpha, case.beta, plan(case.parent, case.size)
    return scan(case.R, jnp.int32(case.layer), *rows, implementation="interpret")


def solve(case, implementation="interpret"):
    at = jnp.int32(case.layer)
    return wy_solve(case.R, at, *solve_operands(case), implementation=implementation)


def fused(case):
    """The first three rows of the case as the path before, then the case."""
    rows = in_pool(case, case.k, case.v, case.g)
    previous = PathFactors(*rows, jnp.full(len(case.trees), 3, jnp.int32))
    rows = jnp.int32(case.layer), previous, *solve_operands(case)
    return wy_commit_solve(case.R, *rows, implementation="interpret")


def publish(case, node, u=None):
    """The pool after the path to a node, replayed, or committed if pseudo-values are given."""
    path = oracle.path_to(case.trees[0], node)
    nodes, length = np.array([path], np.int32), np.array([len(path)], np.int32)
    layers = [case.k, case.v, case.alpha, case.beta] if u is None else [case.k, u, case.g]
    stacked = [jnp.stack([x] * case.R.shape[0]) for x in layers]
    commit = replay if u is None else wy_commit
    return commit(case.R, *stacked, nodes, length, implementation="interpret")


WIDTHS = [(8, 16), (16, 8), (24, 48), (48, 24), (80, 96), (96, 80), (128, 40)]


@pytest.mark.parametrize("dims", WIDTHS, ids=str)
def test_fc24_widths_give_the_reference_result(dims):
    """FC-24: widths 8 to 128, key width and value width different."""
    case = make_case([TREE], 8, (1, 1), dims)
    outputs, states = expected(case, 0)
    assert relative_rms(scan(case)[0, :7], outputs) < ERROR
    assert relative_rms(publish(case, 5)[-1, 0], states[5]) < ERROR
    if dims in WIDTHS[::2]:
        out, u = solve(case)
        assert relative_rms(out[0, :7], outputs) < ERROR
        assert relative_rms(publish(case, 5, u)[-1, 0], states[5]) < ERROR


def test_fc24_the_last_key_channels_count():
    """FC-24: with key width 48, changing only channels 32..47 changes the output as it should."""
    before = make_case([TREE], 8, (1, 1), (48, 64))
    other = make_case([TREE], 8, (1, 1), (48, 64), seed=1)
    after = dataclasses.replace(
        before,
        k=before.k.at[..., 32:].set(other.k[..., 32:]),
        operands=dataclasses.replace(
            before.operands,
            k=np.concatenate([before.operands.k[..., :32], other.operands.k[..., 32:]], axis=-1),
        ),
    )
    for run in (scan, lambda case: solve(case)[0]):
        change = np.asarray(run(after), np.float64) - np.asarray(run(before), np.float64)
        wanted = expected(after, 0)[0] - expected(before, 0)[0]
        assert np.linalg.norm(wanted) > 0.1 * np.linalg.norm(expected(before, 0)[0])
        assert relative_rms(change[0, :7], wanted) < 10 * ERROR


OPERATIONS = {
    "path_scan": lambda case: scan(case),
    "node_scan": lambda case: scan(case, node_scan),
    "node_scan, paths": lambda case: scan(
        case, node_scan, functools.partial(plan_paths, max_depth=3)
    ),
    "replay": lambda case: publish(case, 5),
    "wy_solve": lambda case: solve(case),
    "wy_solve narrow": lambda case: solve(case),
    "wy_commit_solve": lambda case: fused(case),
    "wy_commit_solve narrow": lambda case: fused(case),
    "wy_commit": lambda case: publish(case, 5, solve(case, "xla")[1]),
    "tree_conv": lambda case: convolve(case),
}


def convolve(case):
    """One head of each kind, so that one program runs."""
    heads, width = 3, case.shape.key_dim
    inputs = jnp.ones((1, 8, heads * width), jnp.float32)
    history = jnp.ones((1, 1, 3, heads * width), jnp.float32)
    gate = jnp.ones((1, 8, 1), jnp.float32)
    return tree_conv(
        inputs, history, 0, jnp.ones((4, heads * width)), jnp.full((1, 8, 4), 3, jnp.int32),
        gate, gate, jnp.ones(1), jnp.ones(1), key_heads=1, key_dim=width,
        implementation="interpret",
    )  # fmt: skip


@pytest.fixture
def races_found(monkeypatch):
    """Run one program under Pallas' detector, which sees every access of its threads."""
    watched = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", watched)
    jax.clear_caches()  # kernels compiled without the detector

    def run(name):
        case = make_case([TREE], 8, (1, 1), (32, 64), layers=1)
        if "solve" in name:
            case = make_case([random_trees.chain(28)], 32, (1, 1), (32, 128), layers=1)
        if "narrow" in name:
            monkeypatch.setattr(pallas_kernels.wy_solve.launch, "MULTIPROCESSORS", 0)
        try:
            jax.block_until_ready(OPERATIONS[name](case))
        except jax.errors.JaxRuntimeError as error:  # jax 0.12 raises at the first race
            return "RACE DETECTED" in str(error)
        return interpret_pallas_call.get_races().races_found

    yield run
    jax.clear_caches()


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_thread_of_a_program_races_another(name, races_found):
    assert not races_found(name)


def test_the_detector_catches_a_missing_barrier(races_found, monkeypatch):
    monkeypatch.setattr(solve_kernel, "together", lambda program: None)
    assert races_found("wy_solve")


def test_paths_may_be_longer_than_a_set_of_barriers():
    case = make_case([random_trees.chain(40)], 40, (1, 1), (16, 64))
    state = expected(case, 0)[1][39]
    assert relative_rms(publish(case, 39)[-1, 0], state) < ERROR
    assert relative_rms(publish(case, 39, solve(case, "xla")[1])[-1, 0], state) < ERROR


@pytest.mark.parametrize("commit", [replay, wy_commit], ids=["replay", "wy_commit"])
def test_long_paths_lower_for_an_h200(commit):
    of = jax.ShapeDtypeStruct
    k, v = (of((2, 1, 128, heads, 128), jnp.float32) for heads in (16, 48))
    gate, R = of((2, 1, 128, 48), jnp.float32), of((2, 1, 48, 128, 128), jnp.float32)
    gates = (gate, gate) if commit is replay else (gate,)
    path = of((1, 60), jnp.int32), of((1,), jnp.int32)
    run = functools.partial(commit, implementation="mosaic_gpu")
    assert "mosaic_gpu" in lower_for_h200(run, R, k, v, *gates, *path)
