"""Visits: the host asks the device for steps, and fetches later what they emitted.

All that the next visit starts from lies on the device, so it can be asked for before the last one
was fetched: the device then goes on while the host decodes texts. Clocks tell who waited for whom.
A GPU's loop asks the host before every turn, so that to ask for one is to wait until its last turn
has begun: there is nothing to gain by asking ahead, and one visit at a time is under way.
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
    """A visit under way, when it was asked for, and how long the host waited in asking."""

    visit: Visit
    form: int
    asked: float
    idle: float
    waited: float


class Fetched(NamedTuple):
    """What a visit made.

    Attributes:
      form: which of the programs ran.
      emission: of every step, as NumPy arrays with a leading axis; ``made`` rows of it are real.
      made: steps.
      seconds: from when the one before it was fetched, or the first asked for, until it was fetched
        itself.
      busy: of these, seconds since it was asked for.
      wait: of these, seconds that the host did nothing but wait.
      idle: seconds before the visit was asked for in which the device may have had nothing to do.
        Without another visit under way that is the time since the last one was fetched. With one,
        nothing if it still ran; if it had ended unseen, the time since the last fetch is a bound.
    """

    form: int
    emission: Emission
    made: int
    seconds: float
    busy: float
    wait: float
    idle: float


class Visits:
    """The visits of one run.

    Args:
      programs: by form, what ``steps`` takes before the carry.
      carry, left: where decoding starts; both are donated.
      rest: what ``steps`` takes between ``left`` and ``ended``.
      blocking: whether to ask is to wait; then no more than one is ever under way.
    """

    def __init__(
        self,
        programs: Sequence[tuple],
        carry: Carry,
        left: Array,
        rest: tuple,
        blocking: bool = False,
    ):
        self._programs, self._rest, self._blocking = programs, rest, blocking
        self.carry, self._left = carry, left
        self._asked: deque[_Asked] = deque()
        self._fetched: float | None = None

    @property
    def under_way(self) -> int:
        """Visits that were asked for and not fetched."""
        return len(self._asked)

    def wants(self, ahead: bool) -> bool:
        """Whether to ask for one now: if none is under way, or if another may be."""
        return not self._asked or (ahead and not self._blocking and len(self._asked) < 2)

    def ask(self, form: int, count: int, ended: Sequence[bool]) -> None:
        """Ask for up to ``count`` steps of the sequences that go on; returns at once."""
        resting = not self._asked or _is_ready(self._asked[-1].visit.made)
        asked = time.perf_counter()
        idle = asked - self._fetched if resting and self._fetched is not None else 0.0
        self.carry, self._left, visit = steps(
            *(*self._programs[form], self.carry, self._left, *self._rest),
            *(np.array(ended), np.int32(count), np.bool_(False)),
        )
        waited = time.perf_counter() - asked if self._blocking else 0.0
        self._asked.append(_Asked(visit, form, asked, idle, waited))

    def fetch(self) -> Fetched:
        """Wait for the visit that was asked for first."""
        visit, form, asked, idle, waited = self._asked.popleft()
        waiting = time.perf_counter()
        emission, made = jax.device_get((visit.emission, visit.made))
        now = time.perf_counter()
        since = asked if self._fetched is None else self._fetched
        self._fetched = now
        busy, wait = now - max(asked, since), now - waiting + waited
        return Fetched(form, emission, int(made), now - since, busy, wait, idle)


def keeps_host(looped: bool) -> bool:
    """Whether the default device keeps the host while a loop runs."""
    return looped and jax.devices()[0].platform == "gpu"


def rehearsals(warm_up: bool) -> int:
    """How often programs are run without effect first: a GPU runs one kernel by kernel, records it
    the second time, and only then runs what it recorded."""
    return 0 if not warm_up else 3 if jax.devices()[0].platform == "gpu" else 1


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
