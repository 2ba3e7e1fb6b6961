"""Visits: the host asks the device for steps, and fetches later what they emitted.

All that the next visit starts from lies on the device, so it can be asked for before the last one
was fetched: the device then goes on while the host decodes texts. Clocks tell who waited for whom.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from treejax.model import Model
from treejax.shapes import Array
from treejax.steps.many import Visit, steps
from treejax.steps.together import Carry, Emission

LAYER_BYTES = 300e6
"""Weights of a layer that a GPU needs as long to read as the host to hand the layer's kernels over:
an H200 reads 4.2 TB/s, and 64 layers were handed over in 4.4 ms."""


class _Asked(NamedTuple):
    """A visit under way, and when it was asked for."""

    visit: Visit
    form: int
    asked: float
    idle: float


class Fetched(NamedTuple):
    """What a visit made.

    Attributes:
      form: which of the programs ran.
      emission: of every step, as NumPy arrays with a leading axis; ``made`` rows of it are real.
      made: steps.
      seconds: from when the visit was asked for, or the one before it was fetched if that was
        later, until it was fetched itself.
      wait: of these, seconds that the host did nothing but wait.
      idle: seconds before the visit was asked for in which the device may have had nothing to do.
        Without another visit under way that is the time since the last one was fetched. With one,
        nothing if it still ran; if it had ended unseen, the time since the last fetch is a bound.
    """

    form: int
    emission: Emission
    made: int
    seconds: float
    wait: float
    idle: float


class Visits:
    """The visits of one run.

    Args:
      programs: by form, what ``steps`` takes before the carry.
      carry, left: where decoding starts; both are donated.
      rest: what ``steps`` takes between ``left`` and ``ended``.
    """

    def __init__(self, programs: Sequence[tuple], carry: Carry, left: Array, rest: tuple):
        self._programs, self._rest = programs, rest
        self.carry, self._left = carry, left
        self._asked: deque[_Asked] = deque()
        self._fetched: float | None = None

    @property
    def under_way(self) -> int:
        """Visits that were asked for and not fetched."""
        return len(self._asked)

    def ask(self, form: int, count: int, ended: Sequence[bool]) -> None:
        """Ask for up to ``count`` steps of the sequences that go on; returns at once."""
        resting = not self._asked or _is_ready(self._asked[-1].visit.made)
        asked = time.perf_counter()
        idle = asked - self._fetched if resting and self._fetched is not None else 0.0
        self.carry, self._left, visit = steps(
            *(*self._programs[form], self.carry, self._left, *self._rest),
            *(np.array(ended), np.int32(count), np.bool_(False)),
        )
        self._asked.append(_Asked(visit, form, asked, idle))

    def fetch(self) -> Fetched:
        """Wait for the visit that was asked for first."""
        visit, form, asked, idle = self._asked.popleft()
        waiting = time.perf_counter()
        emission, made = jax.device_get((visit.emission, visit.made))
        now = time.perf_counter()
        begun = asked if self._fetched is None else max(asked, self._fetched)
        self._fetched = now
        return Fetched(form, emission, int(made), now - begun, now - waiting, idle)


def choose_loop(model: Model, steps_per_visit: int | None) -> tuple[bool, int | None]:
    """Whether a visit is a loop, and its steps, None where they are found out as decoding goes on.

    On a GPU the steps of a large model are visits of their own, unless asked otherwise. Elsewhere
    the host need not be asked in the middle of a program, and a loop serves all.
    """
    if jax.devices()[0].platform != "gpu":
        return True, steps_per_visit
    if steps_per_visit is None:
        layers = model.params["layers"]
        if sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) > LAYER_BYTES * len(layers):
            steps_per_visit = 1
    return steps_per_visit != 1, steps_per_visit


def _is_ready(array: Array) -> bool:
    """Whether the program that makes the array has ended; asking does not wait."""
    return array.is_ready()  # type: ignore[attr-defined]  # in JAX's documentation, not in its stub
