"""How far states and outputs are from float64, by tree and operands, for each way to compute them.

The sequential float32 recurrence (``path_scan``, ``replay``) is the yardstick of the triangular
solve (``wy_solve``, ``wy_commit``). States are those at the ends of the longest paths.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import programs
from pallas_kernels.bench.cases import Case, make_case
from pallas_kernels.bench.gate import Meter
from pallas_kernels.bench.guard import one_line
from pallas_kernels.bench.operands import KINDS
from pallas_kernels.bench.settings import PRECISIONS, Settings
from pallas_kernels.bench.trees import NAMES, Tree, make_tree
from pallas_kernels.bench.truth import Truth, exact, recurrence

PATHS = 8
"""Paths whose end states are compared; a tree with fewer repeats them."""

SEQUENTIAL = "sequential"


@dataclasses.dataclass(frozen=True)
class StateError:
    """One line of the table: relative RMS errors, None if the method failed with ``problem``.

    ``bound`` is what the state error may be, None where nothing is asked.
    """

    kind: str
    tree: str
    nodes: int
    method: str
    outputs: float | None
    states: float | None
    bound: float | None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        if self.states is None:
            return False
        return self.bound is None or self.states <= self.bound


def state_bound(method: str, tree: Tree, sequential: float) -> float | None:
    """What is promised of ``ieee``: 3e-7 on the 28 nodes of hydra27; 1e-6 and 4 times sequential on
    deeper trees, where the sequential recurrence itself comes near 3e-7."""
    if method != "wy ieee":
        return None
    return 3e-7 if tree.name == "hydra27" else min(1e-6, 4 * sequential)


def methods() -> tuple[str, ...]:
    """A CPU has the products of ``ieee`` alone."""
    precisions = PRECISIONS if jax.devices()[0].platform == "gpu" else PRECISIONS[:1]
    return (SEQUENTIAL, *(f"wy {precision}" for precision in precisions))


def measure_errors(settings: Settings) -> Iterator[StateError]:
    """All lines, one layer and one sequence each, with the settings' heads, widths and dtype."""
    for name in NAMES:
        tree = make_tree(name)
        for kind in KINDS:
            yield from _measure(make_case(settings, 1, tree, 1, kind), tree, kind)


def _measure(case: Case, tree: Tree, kind: str) -> Iterator[StateError]:
    paths = [tree.leaf_paths[i % len(tree.leaf_paths)] for i in range(PATHS)]
    ends = [path[-1] for path in paths]
    truth = Truth(case)
    rows = truth.operands(0, 0)
    outputs, states = recurrence(exact(case.pool[0, 0]), tree.parents, rows, ends)
    nodes = np.full((PATHS, tree.bound), -1, np.int32)
    for line, path in zip(nodes, paths, strict=True):
        line[: len(path)] = path
    length = jnp.asarray([len(path) for path in paths], jnp.int32)

    sequential = 0.0
    for method in methods():
        try:
            out, pool = _run(case, method, jnp.asarray(nodes), length)
        except Exception as error:  # one method that fails must not cost the others their lines
            problem = one_line(error)
            yield StateError(kind, tree.name, tree.size, method, None, None, None, problem)
            continue
        meter = Meter()
        meter.add("outputs", out[0, : tree.size], outputs)
        for i, end in enumerate(ends):
            meter.add("states", pool[0, i], states[end])
        errors = meter.errors()
        if method == SEQUENTIAL:
            sequential = errors["states"].rms
        yield StateError(
            kind,
            tree.name,
            tree.size,
            method,
            errors["outputs"].rms,
            errors["states"].rms,
            state_bound(method, tree, sequential),
        )


def _run(case: Case, method: str, nodes: jax.Array, length: jax.Array):
    """Outputs [1, N, Hv, dv], and a pool with the state of one path a sequence."""
    implementation = case.settings.implementation
    layer = case.layers[0]
    pool = jnp.repeat(case.pool, PATHS, 1)

    def of_paths(*operands: jax.Array) -> list[jax.Array]:
        return [jnp.repeat(x[None], PATHS, 1) for x in operands]

    if method == SEQUENTIAL:
        scan = _jitted(programs.path_scan, implementation)
        operands = (layer.q, layer.k, layer.v, layer.alpha, layer.beta)
        out = scan(case.pool, jnp.int32(0), *operands, programs.walk_of(case))
        publish = _jitted(programs.replay, implementation)
        rows = of_paths(layer.k, layer.v, layer.alpha, layer.beta)
        return out, publish(pool, *rows, nodes, length)
    solve = _jitted(programs.wy_solve, implementation, method.removeprefix("wy "))
    operands = (layer.q, layer.k, layer.v, layer.g, layer.beta, case.ancestors, case.size)
    out, u = solve(case.pool, jnp.int32(0), *operands)
    commit = _jitted(programs.wy_commit, implementation)
    return out, commit(pool, *of_paths(layer.k, u, layer.g), nodes, length)


@cache
def _jitted(function: Callable, implementation: str, precision: str | None = None) -> Callable:
    """The same jit for trees of one capacity, so that it compiles once."""
    if precision is None:
        return jax.jit(partial(function, implementation=implementation))
    return jax.jit(partial(function, precision=precision, implementation=implementation))
