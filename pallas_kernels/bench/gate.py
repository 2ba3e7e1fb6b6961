"""Before anything is timed: every output and published state against float64, and exact bits.

A program passes if the relative RMS errors at a few layers and sequences stay within its bound, if
inactive rows are exactly zero, and, for kernels, if the bits are those of single-token decoding.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import programs
from pallas_kernels.bench.cases import Case
from pallas_kernels.bench.programs import Program
from pallas_kernels.bench.truth import Truth
from pallas_kernels.walk import plan


class Error(NamedTuple):
    """Distance from float64: RMS and largest, both over the RMS of the float64 values."""

    rms: float
    max: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Errors by what was compared; problems are empty where the gate is green."""

    errors: dict[str, Error]
    problems: tuple[str, ...]
    bitwise: bool | None = None

    @property
    def green(self) -> bool:
        return not self.problems


class Meter:
    """Collects pairs of arrays into one error a name."""

    def __init__(self) -> None:
        self.pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def add(self, name: str, value: jax.Array | np.ndarray, expected: np.ndarray) -> None:
        made = np.asarray(value).astype(np.float64)
        self.pairs.setdefault(name, []).append((made - expected, expected))

    def errors(self) -> dict[str, Error]:
        return {name: _error(pairs) for name, pairs in self.pairs.items()}


def _error(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Error:
    count = sum(expected.size for _, expected in pairs)
    scale = np.sqrt(sum(np.sum(expected**2) for _, expected in pairs) / count)
    square = sum(np.sum(difference**2) for difference, _ in pairs) / count
    largest = np.max([np.max(np.abs(difference)) for difference, _ in pairs])
    return Error(float(np.sqrt(square) / scale), float(largest / scale))


def check(program: Program, outputs: Any, pool: jax.Array | None, truth: Truth) -> Verdict:
    """Compare what a program returned."""
    meter, problems = Meter(), []
    size = truth.case.tree.size
    for layer in truth.layers:
        if layer >= program.layers:
            continue
        for row in truth.rows:
            if program.reads == "conv":
                made = outputs[layer]
                for name, expected in truth.conv(layer, row).items():
                    meter.add(name, getattr(made, name)[row, :size], expected)
            elif program.reads is not None:
                out = jax.tree.leaves(outputs[layer])[0][row]
                if program.reads == "after":
                    meter.add("outputs", out[:size], truth.after(layer, row))
                else:
                    meter.add("outputs", out[:size], truth.tree(layer, row)[0])
                if np.asarray(out[size:]).any():
                    problems.append(f"layer {layer}, sequence {row}: inactive rows are not zero")
            if program.reads == "nodes":
                for node, state in truth.tree(layer, row)[1].items():
                    meter.add("states", outputs[layer][1][row, node], state)
            if program.publishes is not None and pool is not None:
                if program.publishes == "path":
                    state = truth.tree(layer, row)[1][truth.case.tree.published[-1]]
                else:
                    state = truth.published(layer, row)
                meter.add("states", pool[layer, row], state)
    errors = meter.errors()
    for name, error in errors.items():
        if not error.rms <= program.bound:
            problems.append(f"{name}: relative RMS {error.rms:.1e}, expected {program.bound:.0e}")
    return Verdict(errors, tuple(problems))


def with_bits(verdict: Verdict, equal: bool, promised: bool) -> Verdict:
    """Add whether the bits are those of single-token decoding; red if that was promised."""
    problems = verdict.problems
    if promised and not equal:
        problems = (*problems, "not bitwise equal to single-token decoding")
    return dataclasses.replace(verdict, bitwise=equal, problems=problems)


def replay_is_decode(case: Case) -> bool:
    """Whether replaying a path gives the bits of replaying its nodes one by one, in all layers."""
    s, implementation = case.stacked, case.settings.implementation

    @jax.jit
    def replay(pool, nodes, length):
        operands = (s.k, s.v, s.alpha, s.beta, nodes, length)
        return programs.replay(pool, *operands, implementation=implementation)

    whole = replay(case.pool, case.nodes, case.length)
    single, one = case.pool, jnp.ones_like(case.length)
    for node in case.tree.published:
        single = replay(single, jnp.full((case.batch, 1), node, jnp.int32), one)
    return bool(_same_bits(whole, single))


ONE_NODE = 8
"""Capacity of the trees that decode a single token."""


def path_scan_is_native(case: Case, outputs: Any) -> bool:
    """Whether a tree's outputs have the bits of decoding each node from its parent's state.

    The parent's state is replayed token by token. Compares the first and the last layer.
    """
    implementation = case.settings.implementation
    walk = jax.jit(plan)(
        jnp.full((case.batch, ONE_NODE), -1, jnp.int32), jnp.ones(case.batch, jnp.int32)
    )

    @jax.jit
    def decode(pool, layer, node):
        q, k, v, _, alpha, beta = (
            jnp.repeat(jax.lax.dynamic_slice_in_dim(x, node, 1, 1), ONE_NODE, 1) for x in layer
        )
        nodes, length = jnp.zeros((case.batch, 1), jnp.int32), jnp.ones(case.batch, jnp.int32)
        rows = (k[None], v[None], alpha[None], beta[None], nodes, length)
        out = programs.path_scan(
            pool, jnp.int32(0), q, k, v, alpha, beta, walk, implementation=implementation
        )
        return out[:, 0], programs.replay(pool, *rows, implementation=implementation)

    equal = True
    for layer in {0, len(case.layers) - 1}:
        states = {-1: case.pool[layer][None]}
        for node, parent in enumerate(case.tree.parents):
            out, states[node] = decode(states[parent], case.layers[layer], jnp.int32(node))
            equal &= bool(_same_bits(out, outputs[layer][:, node]))
    return equal


@jax.jit
def _same_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    left, right = (jax.lax.bitcast_convert_type(z, jnp.uint32) for z in (x, y))
    return jnp.array_equal(left, right)
