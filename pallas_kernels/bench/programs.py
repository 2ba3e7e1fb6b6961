"""What is timed: one program over all layers for every operation and pair of operations.

Each kernel call stands under a jit of its own, so that a program of 48 layers lowers the kernel
once. Publishing programs take the pool donated and return it, and read operands of all layers from
one array each. Programs that verify and publish let the published length depend on the outputs, as
selecting a path does, so that no state is written before it is read. Tables of the tree (walk,
ancestors) are computed outside, once for all layers.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.cases import Case
from pallas_kernels.node_scan import node_scan
from pallas_kernels.path_scan import path_scan
from pallas_kernels.replay import replay
from pallas_kernels.tree_conv import tree_conv
from pallas_kernels.walk import plan
from pallas_kernels.wy_commit import wy_commit
from pallas_kernels.wy_solve import PathFactors, wy_commit_solve, wy_solve

POLICIES = {
    "node_scan": "snapshot",
    "wy_commit_solve": "fused",
    "path_scan+replay": "replay",
    "wy_solve+wy_commit": "wy",
    "wy_solve+replay": "solve_replay",
}

SEQUENTIAL_BOUND = 1e-6
SOLVE_BOUNDS = {"ieee": 1e-6, "bf16x3": 1e-4, "tf32": 5e-3}
"""Relative RMS that the gate allows: about four times what was measured on random operands."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One row of the table, not yet compiled.

    Attributes:
      step: (pool, operands) -> (outputs of each layer, the pool if it publishes).
      reads: what the outputs are checked against: "tree", "nodes" (the tree with its states),
        "after" (the tree from the committed state), "conv", or None.
      publishes: what the pool is checked against: "path" (the state at the path's end), "factors"
        (the committed factors), or None.
      bound: on the relative RMS error.
      layers: how many of the case's layers it runs.
    """

    name: str
    step: Callable[[jax.Array, Any], tuple[Any, jax.Array | None]]
    operands: Any
    reads: str | None
    publishes: str | None
    bound: float
    layers: int


def make_program(name: str, case: Case, memory: int) -> Program:
    """The program of an operation; ``memory`` bounds the bytes of outputs that are kept."""
    bound = SEQUENTIAL_BOUND
    if "wy" in name:
        bound = SOLVE_BOUNDS[case.settings.precision]
    if name == "tree_conv":
        bound = 2e-3 if case.settings.dtype == "bfloat16" else 2e-6  # rounded to the dtype inside
    build, reads, publishes = _BUILDERS[name]
    step, operands = build(case)
    layers = len(case.layers)
    if name == "node_scan":
        layers = max(1, min(layers, memory // (case.tree.capacity * (case.pool.nbytes // layers))))
        operands = (operands[0][:layers], *operands[1:])
    return Program(name, step, operands, reads, publishes, bound, layers)


def walk_of(case: Case) -> Any:
    return _plan(case.parent, case.size)


_plan = jax.jit(plan)


def _tree_scan(scan: Callable, case: Case) -> tuple[Callable, Any]:
    call = jax.jit(partial(scan, implementation=case.settings.implementation))

    def step(pool, operands):
        layers, walk = operands
        return tuple(
            call(pool, jnp.int32(i), x.q, x.k, x.v, x.alpha, x.beta, walk)
            for i, x in enumerate(layers)
        ), None

    return step, (case.layers, walk_of(case))


def _replay(case: Case) -> tuple[Callable, Any]:
    call = jax.jit(partial(replay, implementation=case.settings.implementation))

    def step(pool, operands):
        return (), call(pool, *operands)

    s = case.stacked
    return step, (s.k, s.v, s.alpha, s.beta, case.nodes, case.length)


def _wy_solve(case: Case) -> tuple[Callable, Any]:
    call = _solver(wy_solve, case)

    def step(pool, operands):
        layers, ancestors, size = operands
        return tuple(
            call(pool, jnp.int32(i), x.q, x.k, x.v, x.g, x.beta, ancestors, size)
            for i, x in enumerate(layers)
        ), None

    return step, (case.layers, case.ancestors, case.size)


def _wy_commit(case: Case) -> tuple[Callable, Any]:
    call = jax.jit(partial(wy_commit, implementation=case.settings.implementation))

    def step(pool, operands):
        return (), call(pool, *operands)

    return step, (case.stacked.k, case.u, case.stacked.g, case.nodes, case.length)


def _wy_commit_solve(case: Case) -> tuple[Callable, Any]:
    call = _solver(wy_commit_solve, case)

    def step(pool, operands):
        layers, factors, length, ancestors, size = operands
        outputs, (k, u, g) = [], factors
        previous = PathFactors(k=k, u=u, g=g, length=length)
        for i, x in enumerate(layers):
            out, u, pool = call(
                pool, jnp.int32(i), previous, x.q, x.k, x.v, x.g, x.beta, ancestors, size
            )
            outputs.append((out, u))
        return tuple(outputs), pool

    return step, (case.layers, case.factors, case.length, case.ancestors, case.size)


def _path_scan_replay(case: Case) -> tuple[Callable, Any]:
    return _verify_and_publish(_tree_scan(path_scan, case), _replay(case))


def _wy_solve_replay(case: Case) -> tuple[Callable, Any]:
    return _verify_and_publish(_wy_solve(case), _replay(case))


def _verify_and_publish(verify: tuple[Callable, Any], publish: tuple[Callable, Any]):
    def step(pool, operands):
        outputs, _ = verify[0](pool, operands[0])
        *rest, length = operands[1]
        _, pool = publish[0](pool, (*rest, _selected(outputs, length)))
        return outputs, pool

    return step, (verify[1], publish[1])


def _wy_solve_commit(case: Case) -> tuple[Callable, Any]:
    """The solves leave their pseudo-values where the commit of all layers reads them."""
    solve = _solver(wy_solve, case)
    commit = jax.jit(partial(wy_commit, implementation=case.settings.implementation))

    def step(pool, operands):
        layers, ancestors, size, k, g, nodes, length = operands
        U, outputs = jnp.empty(case.u.shape, case.u.dtype), []
        for i, x in enumerate(layers):
            rows = x.q, x.k, x.v, x.g, x.beta
            out, U = solve(pool, jnp.int32(i), *rows, ancestors, size, U=U)
            outputs.append(out)
        pool = commit(pool, k, U, g, nodes, _selected(outputs, length))
        return tuple(outputs), pool

    tables = case.ancestors, case.size
    return step, (case.layers, *tables, case.stacked.k, case.stacked.g, case.nodes, case.length)


def _selected(outputs: Any, length: jax.Array) -> jax.Array:
    """``length``, known only once every layer has its outputs."""
    first = [jax.tree.leaves(layer)[0] for layer in outputs]
    seen = jnp.stack([x[(0,) * x.ndim] for x in first])
    return jnp.where(jnp.isnan(seen.sum()), 0, length)


def _solver(function: Callable, case: Case) -> Callable:
    settings = case.settings
    return jax.jit(
        partial(function, precision=settings.precision, implementation=settings.implementation)
    )


def _tree_conv(case: Case) -> tuple[Callable, Any]:
    settings = case.settings
    call = jax.jit(
        partial(
            tree_conv,
            key_heads=settings.key_heads,
            key_dim=settings.key_dim,
            implementation=settings.implementation,
        )
    )

    def step(_, operands):
        layers, history, rows = operands
        return tuple(
            call(x.inputs, history, jnp.int32(i), x.taps, rows, x.a, x.b, x.A_log, x.dt_bias)
            for i, x in enumerate(layers)
        ), None

    return step, case.conv


_BUILDERS: dict[str, tuple[Callable[[Case], tuple[Callable, Any]], str | None, str | None]] = {
    "path_scan": (partial(_tree_scan, path_scan), "tree", None),
    "node_scan": (partial(_tree_scan, node_scan), "nodes", None),
    "wy_solve": (_wy_solve, "tree", None),
    "replay": (_replay, None, "path"),
    "wy_commit": (_wy_commit, None, "factors"),
    "wy_commit_solve": (_wy_commit_solve, "after", "factors"),
    "tree_conv": (_tree_conv, "conv", None),
    "path_scan+replay": (_path_scan_replay, "tree", "path"),
    "wy_solve+wy_commit": (_wy_solve_commit, "tree", "path"),
    "wy_solve+replay": (_wy_solve_replay, "tree", "path"),
}
