"""Several steps in a row: trees, accepted paths and idle sequences that differ from step to step.

A policy that defers its writes has done nothing durable after one commit: its matrix is written
inside a later verify, and a ring has a cursor. So each step continues from the carry that the step
before it left, and is held against recurrences that have come the same way in float64 and natively.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.component.operands import (
    HYDRA,
    Drawn,
    Shape,
    draw,
    draw_states,
    path_to,
    plant,
    random_parents,
)
from treejax.audit.component.rig import Rig, pack
from treejax.audit.component.truth import Errors, Step, along, errors, exact, same_bits


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of a journey.

    Attributes:
      parents: a tree a sequence; empty: it has none. paths: what each accepts; empty: nothing.
      outputs, states: float64 outputs [N, L, B, Hv, dv], and the states after the paths.
      decoded_outputs, decoded_states: the same by single tokens.
    """

    drawn: Drawn
    parents: tuple[tuple[int, ...], ...]
    paths: tuple[tuple[int, ...], ...]
    outputs: np.ndarray
    states: np.ndarray
    decoded_outputs: np.ndarray
    decoded_states: np.ndarray

    @property
    def active(self) -> np.ndarray:
        """[N, L, B]: which outputs are anybody's."""
        rows, layers = len(self.outputs), self.outputs.shape[1]
        sizes = np.array([len(tree) for tree in self.parents])
        inside = np.arange(rows)[:, None] < sizes[None, :]
        return np.broadcast_to(inside[:, None], (rows, layers, len(sizes)))


@dataclasses.dataclass(frozen=True)
class Journey:
    """Stages from the states ``R``, the same for every policy of one implementation."""

    shape: Shape
    R: np.ndarray
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, shape: Shape, seed: int, steps: int, step: Step) -> "Journey":
        """Draw it: operands, trees and paths from the seed, results by both recurrences."""
        rng = np.random.default_rng([seed, 11])
        R = draw_states(shape, [seed, 12])
        truth, decoded, stages = R.astype(np.float64), R, []
        for at in range(steps):
            drawn = draw(shape, [seed, 13, at])
            parents = [_tree(rng, shape, at) for _ in range(shape.batch)]
            paths = [path_to(tree, _last(rng, tree, at)) for tree in parents]
            if shape.batch > 1 or at == 1:  # one sequence accepts nothing, each second one is away
                idle = at % shape.batch
                paths[idle] = []
                if at % 2:
                    parents[idle] = []
            nodes = along(truth, parents, drawn, exact), along(decoded, parents, drawn, step)
            ends = [path[-1] if path else None for path in paths]
            truth = _after(truth, nodes[0].states, ends)
            decoded = _after(decoded, nodes[1].states, ends)
            trees = tuple(map(tuple, parents)), tuple(map(tuple, paths))
            stages.append(Stage(drawn, *trees, nodes[0].outputs, truth, nodes[1].outputs, decoded))
        return cls(shape, R, tuple(stages))


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a policy gave on a journey: cells, first of outputs and then of states.

    Attributes:
      made, decoded: errors of the policy's and of the native results.
      bits: cells that are bitwise native. count: all cells.
      moved: idle sequences whose state or bytes changed, of ``idle``.
      wrote: verifies that wrote into the carry that they were given.
    """

    made: tuple[Errors, Errors]
    decoded: tuple[Errors, Errors]
    bits: tuple[int, int]
    count: tuple[int, int]
    moved: int
    idle: int
    wrote: int


def travel(rig: Rig, journey: Journey) -> Seen:
    """Run all stages from the journey's start."""
    shape = journey.shape
    carry = rig.init(jnp.asarray(journey.R), shape.key_heads)
    defers = len(jax.tree.leaves(carry)) > 1
    cells: dict[str, list[Any]] = {name: [] for name in ("made", "decoded", "bits")}
    moved = idle = wrote = 0
    R = rig.states(carry)
    for stage in journey.stages:
        verified = rig.verify(carry, stage.drawn.layers(), plant(shape, stage.parents))
        wrote += not _equal(carry, verified.carry)
        after = rig.publish(verified, pack(stage.paths, shape.depth))
        states, before = rig.states(after), R
        rows = len(stage.outputs)
        outputs = np.moveaxis(np.asarray(verified.outputs), 2, 0)[:rows]
        pairs = (
            (outputs, stage.outputs, stage.decoded_outputs, 2, stage.active),
            (states, stage.states, stage.decoded_states, 3, np.ones(states.shape[:2], bool)),
        )
        for made, truth, decoded, axes, mask in pairs:
            cells["made"].append(_cells(errors(made, truth, axes), mask))
            cells["decoded"].append(_cells(errors(decoded, truth, axes), mask))
            cells["bits"].append(same_bits(made, decoded, axes)[mask])
        for b, path in enumerate(stage.paths):
            if not path:
                idle += 1
                # A state that stands for rows in a buffer is kept to rounding alone, which the
                # rule sees; one without a tree may not change by a byte, whatever the policy.
                same = defers or np.array_equal(states[:, b], before[:, b])
                if not stage.parents[b]:
                    same &= _equal(_sequence(carry, b), _sequence(after, b))
                moved += not same
        carry, R = after, states
    made, decoded = (
        (_joined(cells[name][::2]), _joined(cells[name][1::2])) for name in ("made", "decoded")
    )
    bits = [np.concatenate(cells["bits"][i::2]) for i in range(2)]  # outputs, states by turns
    counts = int(bits[0].sum()), int(bits[1].sum())
    return Seen(made, decoded, counts, (bits[0].size, bits[1].size), moved, idle, wrote)


def _tree(rng: np.random.Generator, shape: Shape, at: int) -> list[int]:
    if at % 2 == 0 and shape.rows >= len(HYDRA) and shape.depth >= 11:
        return list(HYDRA)
    return random_parents(rng, int(rng.integers(1, shape.rows + 1)), shape.depth)


def _last(rng: np.random.Generator, parents: Sequence[int], at: int) -> int:
    """A random node; in the first step a deepest one, so that buffers fill."""
    if at == 0:
        return max(range(len(parents)), key=lambda node: len(path_to(parents, node)))
    return int(rng.integers(len(parents)))


def _after(R: np.ndarray, nodes: np.ndarray, ends: Sequence[int | None]) -> np.ndarray:
    new = R.copy()
    for b, end in enumerate(ends):
        if end is not None:
            new[:, b] = nodes[end, :, b]
    return new


def _cells(found: Errors, mask: np.ndarray) -> Errors:
    return Errors(*(x[mask] for x in found))


def _joined(stages: Sequence[Errors]) -> Errors:
    """Cells of all stages."""
    return Errors(*(np.concatenate(leaf) for leaf in zip(*stages, strict=True)))


def _sequence(carry: Any, b: int) -> Any:
    """A sequence's part of a carry: axis 1 of every leaf is the batch."""
    return jax.tree.map(lambda leaf: leaf[:, b], carry)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
