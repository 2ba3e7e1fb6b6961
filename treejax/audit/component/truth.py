"""What a component should give: the float64 recurrence, the native float32 one, and the rule.

The float64 recurrence is written from the formulas (design section 3) in NumPy and uses nothing of
the policies. The native one is what decoding does, one token a step: the plain single-token update,
or on the kernels their own decode. Both continue every node from its parent, sequence by sequence,
whatever order the rows are packed in. States are R [L, B, Hv, dv, dk].
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from treejax.audit.component.operands import Drawn, downwards
from treejax.delta_rule import read, update

TINY = 2.0**-149
"""The smallest float32 above zero."""
Row = tuple[np.ndarray, ...]
"""q, k, v, g, alpha, beta of one node of every instance: [L, B, heads, ...]."""
Step = Callable[[np.ndarray, Row], tuple[np.ndarray, np.ndarray]]
"""A state and a row to the row's output [L, B, Hv, dv] and state."""


class Nodes(NamedTuple):
    """Outputs [N, L, B, Hv, dv] and states [N, L, B, Hv, dv, dk] of the rows of trees."""

    outputs: np.ndarray
    states: np.ndarray


def exact(R: np.ndarray, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Decay, error, write, read after write, in float64; exp(g) is taken anew."""
    q, k, v, g, _, beta = (x.astype(np.float64) for x in row)
    ratio = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, ratio, 2), np.repeat(k, ratio, 2)
    decayed = np.exp(g)[..., None, None] * R
    u = beta[..., None] * (v - (decayed @ k[..., None])[..., 0])
    decayed += u[..., None] * k[..., None, :]
    return (decayed @ q[..., None])[..., 0], decayed


@jax.jit
def _native(R: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    q, k, v, _, alpha, beta = row
    ratio = v.shape[2] // k.shape[2]
    q, k = (x.repeat(ratio, axis=2) for x in (q, k))
    new = jax.vmap(jax.vmap(update))(R, k, v, alpha, beta)
    return jax.vmap(jax.vmap(read))(new, q), new


def native(R: np.ndarray, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """The single-token update in plain JAX, float32."""
    output, state = _native(R, row)
    return np.asarray(output), np.asarray(state)


def along(R: np.ndarray, parents: Sequence[Sequence[int]], drawn: Drawn, step: Step) -> Nodes:
    """All nodes of a tree a sequence, each continued from its parent by ``step``.

    Rows that a sequence's tree does not have are computed as a root's and mean nothing.
    """
    every = dataclasses.astuple(drawn)
    count, batch = max(len(rows) for rows in parents), np.arange(R.shape[1])
    outputs = np.zeros((count, *drawn.v.shape[:2], *drawn.v.shape[3:]), R.dtype)
    states = np.zeros((count + 1, *R.shape), R.dtype)
    states[count] = R
    spare = [list(rows) + [-1] * (count - len(rows)) for rows in parents]
    order = np.array([downwards(rows) for rows in spare])
    for turn in range(count):
        node = order[:, turn]
        above = np.array([rows[i] for rows, i in zip(spare, node, strict=True)])
        before = states[np.where(above < 0, count, above), :, batch].swapaxes(0, 1)
        row = tuple(np.ascontiguousarray(x[:, batch, node]) for x in every)
        output, state = step(np.ascontiguousarray(before), row)
        outputs[node, :, batch], states[node, :, batch] = (
            output.swapaxes(0, 1),
            state.swapaxes(0, 1),
        )
    return Nodes(outputs, states[:count])


class Errors(NamedTuple):
    """Of every cell: RMS and largest absolute error, and RMS and largest of the float64 values."""

    rms: np.ndarray
    largest: np.ndarray
    scale: np.ndarray
    peak: np.ndarray


def errors(made: np.ndarray, truth: np.ndarray, axes: int) -> Errors:
    """Errors of cells, which are the last ``axes`` axes; an error that is no number is infinite.

    One entry of the first axis at a time: in float64 all at once would be most of the memory.
    """
    over = tuple(range(-axes, 0))

    def rms(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.mean(np.square(x), over))

    found = Errors(*(np.zeros(made.shape[:-axes]) for _ in range(4)))
    for at, (one, exact_one) in enumerate(zip(made, truth, strict=True)):
        with np.errstate(invalid="ignore"):  # what is infinite here is red below
            off = np.abs(one.astype(np.float64) - exact_one)
        off = np.where(np.isfinite(off), off, np.inf)
        values = rms(off), off.max(over), rms(exact_one), np.abs(exact_one).max(over)
        for x, value in zip(found, values, strict=True):
            x[at] = value
    return found


def same_bits(made: np.ndarray, other: np.ndarray, axes: int) -> np.ndarray:
    """Which cells are bitwise equal; both float32."""
    bits = made.view(np.uint32) == other.view(np.uint32)
    return bits.all(tuple(range(-axes, 0)))


@dataclasses.dataclass(frozen=True)
class Rule:
    """The largest error that a cell may have, for RMS and for the largest alike.

    ``factor`` times the native recurrence's error, 2^-149, ``relative`` of the values themselves,
    and ``units`` of 2^-24 of the largest value, those for the RMS and those for the largest error.
    """

    name: str
    factor: float
    units: tuple[float, float]
    relative: float = 0.0

    def ratios(self, made: Errors, decoded: Errors) -> tuple[np.ndarray, np.ndarray]:
        """RMS and largest error of every cell over what it may be: up to 1 passes."""
        of_rms, of_largest = (units * 2.0**-24 * made.peak + TINY for units in self.units)
        of_rms = of_rms + self.factor * decoded.rms + self.relative * made.scale
        of_largest = of_largest + self.factor * decoded.largest + self.relative * made.peak
        return made.rms / of_rms, made.largest / of_largest

    def passes(self, made: Errors, decoded: Errors) -> np.ndarray:
        """Which cells pass in both."""
        rms, largest = self.ratios(made, decoded)
        return (rms <= 1.0) & (largest <= 1.0)


STRICT = Rule("native", 1.10, (1.0, 1.0))
"""LumoTree's (arXiv 2609.23900): 1.10 E_native + 2^-24 M + 2^-149."""
