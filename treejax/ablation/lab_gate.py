"""The gate: outputs and published states against a float64 recurrence, before anything is timed.

A few steps in a row are compared, so that a policy which defers its writes must get the later ones
right too. What is compared is a part of everything: three layers, the last sequence, and the value
heads of the first and the last key head, which is enough to notice any mistake in rows, layers,
heads or paths, and few enough for NumPy.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.gate import Error, Meter
from pallas_kernels.bench.truth import recurrence
from treejax.ablation.base import GREEN, NOT_RUN, RED, Cell, Row
from treejax.ablation.lab import Bench, Step, could_not_run, one_line
from treejax.ablation.lab_operands import Drawn, rows_of, value_heads_of
from treejax.policies import Policy

TOLERANCE = {"ieee": 1e-5, "bf16x3": 2e-4, "tf32": 1e-2}
"""Relative RMS that passes. 1e-5 is the design's contract for float32 states, ten times the error
of the sequential float32 recurrence. The others are twice what the kernels' bench allows for one
step (1e-4 and 5e-3), because a later step starts from the earlier one's error."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Errors of outputs and states, and what is wrong (empty if nothing is).

    ``deepest_output`` and ``deepest_state`` are the largest absolute errors after the first step,
    which publishes the deepest path: the papers' two columns.
    """

    outputs: Error
    states: Error
    deepest_output: float
    deepest_state: float
    problem: str | None

    @classmethod
    def failed(cls, problem: str) -> "Verdict":
        """Of a bench that did not come to run."""
        none = float("nan")
        return cls(Error(none, none), Error(none, none), none, none, problem)

    @property
    def green(self) -> bool:
        return self.problem is None

    @property
    def gate(self) -> str:
        """Green; not run, for lack of memory; or red."""
        if self.problem is None:
            return GREEN
        return NOT_RUN if could_not_run(self.problem) else RED

    def measures(self) -> Row:
        """Errors, None where there is no number."""
        errors = {
            "output_error": self.outputs.rms,
            "state_error": self.states.rms,
            "deepest_output_error": self.deepest_output,
            "deepest_state_error": self.deepest_state,
        }
        return {name: x if math.isfinite(x) else None for name, x in errors.items()}

    def row(self, cell: Cell, measures: Row | None = None) -> Row:
        """A cell's row; one that is not green has no measures but errors."""
        if not self.green:
            return cell.row(self.gate, self.problem, self.measures())
        return cell.row(GREEN, None, self.measures() | (measures or {}))


class Truth:
    """Float64 results of a list of steps, the same for every policy on the same operands."""

    def __init__(self, drawn: Drawn, steps: Sequence[Step]):
        self.drawn, self.steps = drawn, steps
        sizes = drawn.sizes
        self.layers, self.row = sizes.probed_layers, drawn.R.shape[1] - 1
        ratio = sizes.value_heads // sizes.key_heads
        self.value_heads = value_heads_of(sizes.probed_keys, ratio)

    @functools.cached_property
    def expected(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """A step's outputs [l, n, h, dv] and the states [l, h, dv, dk] after it."""
        states = [np.asarray(self.drawn.R[i, self.row])[self.value_heads] for i in self.layers]
        states = [state.astype(np.float64) for state in states]
        most, keys = max(step.shape.size for step in self.steps), self.drawn.sizes.probed_keys
        operands = [rows_of(self.drawn.layers[i], self.row, most, keys) for i in self.layers]
        made = []
        for step in self.steps:
            outputs, last = [], step.published[-1]
            for at, whole in enumerate(operands):
                rows = tuple(x[: step.shape.size] for x in whole)
                out, kept = recurrence(states[at], step.shape.parents, rows, [last])
                outputs.append(out)
                states[at] = kept[last]
            made.append((np.stack(outputs), np.stack(states)))
        return made


def check(bench: Bench, truth: Truth, together: bool) -> Verdict:
    """Run the truth's steps from the drawn states and compare.

    ``together`` runs verify and publish as one program, which is then what has been checked.
    The bench's carry starts from the drawn states and is left after the last step.
    """
    meter, worst = Meter(), [float("nan")] * 2
    try:
        bench.reset()
        for at, (step, expected) in enumerate(zip(truth.steps, truth.expected, strict=True)):
            outputs, states = _run(bench, truth, step, together)
            meter.add("outputs", outputs, expected[0])
            meter.add("states", states, expected[1])
            if at == 0:
                pairs = zip((outputs, states), expected, strict=True)
                worst = [float(np.abs(made - exact).max()) for made, exact in pairs]
    except Exception as error:  # a policy that cannot run must not cost the others their rows
        bench.release()
        return Verdict.failed(one_line(error))
    errors = meter.errors()
    outputs, states = errors["outputs"], errors["states"]
    return Verdict(outputs, states, worst[0], worst[1], _problem(bench.policy, errors))


def _run(bench: Bench, truth: Truth, step: Step, together: bool) -> tuple[np.ndarray, np.ndarray]:
    if together:
        outputs = bench.step(step)
    else:
        made = bench.verify(step)
        outputs = made.outputs
        bench.publish(made.scratch, step)
    heads = jnp.asarray(truth.value_heads, jnp.int32)
    picked = [_pick(outputs[i], jnp.int32(truth.row), heads) for i in truth.layers]
    seen = np.stack([np.asarray(x) for x in picked])[:, : step.shape.size].astype(np.float64)
    layers = jnp.asarray(truth.layers, jnp.int32)
    assert bench.carry is not None
    states = bench.programs.probe(*bench.carry, layers, jnp.int32(truth.row), heads)
    return seen, np.asarray(states).astype(np.float64)


@jax.jit
def _pick(outputs: jax.Array, row: jax.Array, heads: jax.Array) -> jax.Array:
    return outputs[row][:, heads]


def _problem(policy: Policy, errors: dict[str, Error]) -> str | None:
    bound = TOLERANCE[getattr(policy, "precision", "ieee")]
    wrong = [
        f"{name}: relative RMS {error.rms:.1e} from float64, expected {bound:.0e}"
        for name, error in errors.items()
        if not error.rms <= bound  # NaN is not
    ]
    return "; ".join(wrong) or None
