"""Interleaved wall times: rounds in which everything runs once, in an order that rotates.

A sample is a number of calls in a row and one wait for the device. A program over many layers has
hundreds of arguments, and handing them over can take the host longer than the device needs. On a
GPU a short program is therefore queued behind a copy that keeps the device busy meanwhile, and the
copy's own time is taken off: what is left is the device's, gaps between kernels included. That is
also what the CUDA graphs of the peers measure.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CLOCK = "wall, of calls in a row up to block_until_ready"
QUEUED = f"{CLOCK}; short programs queued behind a copy, whose time is taken off"
SAMPLE_SECONDS = 0.01
MOST_CALLS = 24  # JAX lets 32 programs wait for a device
SHORT_SECONDS = 0.005
HIDDEN = 0.8  # of the lead's time that may go into handing calls over


class Lead:
    """Work for the device to be busy with while the host queues what is timed.

    ``seconds`` is what it takes alone, measured anew in every round.
    """

    STEPS = 12  # about a millisecond each on an H200

    def __init__(self, size: int):
        self.buffer = jnp.ones(size // 4, jnp.float32)
        self.program = jax.jit(_copies, donate_argnums=0, static_argnums=1)
        self.seconds = 0.0
        for _ in range(3):
            self.measure()

    def start(self) -> None:
        self.buffer = self.program(self.buffer, self.STEPS)

    def measure(self) -> None:
        start = time.perf_counter()
        self.start()
        jax.block_until_ready(self.buffer)
        self.seconds = time.perf_counter() - start


def _copies(x: jax.Array, steps: int) -> jax.Array:
    for _ in range(steps):
        x = jax.lax.optimization_barrier(x + 1.0)
    return x


@dataclasses.dataclass
class Timed:
    """Something to time; ``run(calls)`` hands over the calls and returns how to wait for them.

    Attributes:
      most_calls: in a row, so that what they return fits in memory.
      share: what part of the layers it runs; times are divided by it.
      multiple: calls of a sample are a multiple of this, for calls that differ and come round. If
        it is more than ``most_calls``, ``run`` must wait for the device in between.
      lead: what to queue behind, set where a call is short.
      host: seconds that the host took for a call, the least of all samples.
      unqueued: seconds of a call without a lead, one sample, to compare.
    """

    name: str
    run: Callable[[int], Callable[[], Any]]
    most_calls: int = MOST_CALLS
    share: float = 1.0
    multiple: int = 1
    calls: int = 1
    lead: Lead | None = None
    host: float = float("inf")
    unqueued: float = float("nan")

    def sample(self) -> float:
        """Seconds of a call."""
        start = time.perf_counter()
        if self.lead is not None:
            self.lead.start()
        begun = time.perf_counter()
        wait = self.run(self.calls)
        self.host = min(self.host, (time.perf_counter() - begun) / self.calls)
        wait()
        total = time.perf_counter() - start
        return (total - (self.lead.seconds if self.lead else 0.0)) / self.calls

    def whole(self, calls: float) -> int:
        """The next multiple of ``multiple``, within ``most_calls`` where one is."""
        most = max(1, self.most_calls // self.multiple)
        return self.multiple * int(np.clip(np.ceil(calls / self.multiple), 1, most))


class Summary(NamedTuple):
    """Milliseconds: median and 10th to 90th percentile over the rounds; ``Timed``'s others."""

    median: float
    low: float
    high: float
    rounds: int
    calls: int
    host: float
    unqueued: float


class Working:
    """The pool that publishing programs write, handed from call to call."""

    def __init__(self, pool: jax.Array):
        self.pool = pool


def time_program(
    name: str,
    compiled: Callable,
    pool: jax.Array | Working,
    operands: Any,
    most_calls: int,
    share: float,
) -> Timed:
    """A compiled program ``(pool, operands) -> (outputs, pool or None)`` as something to time."""

    def run(calls: int) -> Callable[[], Any]:
        outputs = None
        for _ in range(calls):
            del outputs  # its memory serves the next call
            if isinstance(pool, Working):
                outputs, pool.pool = compiled(pool.pool, operands)
            else:
                outputs, _ = compiled(pool, operands)
        written = pool.pool if isinstance(pool, Working) else None
        return lambda: jax.block_until_ready((outputs, written))

    return Timed(name, run, most_calls, share)


def time_copy(size: int) -> tuple[Timed, int]:
    """A copy of ``size`` bytes through XLA, and the bytes that it moves."""
    source = jnp.ones(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)  # an identity would not copy

    def run(calls: int) -> Callable[[], Any]:
        for _ in range(calls):
            made = copy(source)
        return lambda: jax.block_until_ready(made)

    return Timed("copy", run, most_calls=4), 2 * source.nbytes


def choose_calls(timed: Timed, lead: Lead | None) -> None:
    """Warm up, then set the calls of a sample and whether they are queued.

    Queued calls are as many as the host can hand over while the lead runs: whatever the lead's own
    time varies by is divided among them.
    """
    timed.calls = timed.whole(1)
    timed.sample()
    seconds = timed.sample()
    timed.calls = timed.whole(SAMPLE_SECONDS / seconds)
    timed.unqueued = timed.sample()
    # Calls that must be waited for in between cannot be queued.
    if lead is not None and seconds < SHORT_SECONDS and timed.multiple <= timed.most_calls:
        timed.lead = lead
        handed_over = int(HIDDEN * lead.seconds / timed.host) // timed.multiple * timed.multiple
        timed.calls = max(timed.calls, timed.whole(handed_over))
    timed.sample()
    timed.host = float("inf")


def measure_rounds(
    timed: Sequence[Timed], rounds: int, over: Callable[[], bool], seen: Callable[[int], None]
) -> dict[str, Summary]:
    """Medians of up to ``rounds`` rounds; ends after the round in which ``over()`` is true."""
    samples: dict[str, list[float]] = {each.name: [] for each in timed}
    leads = {id(each.lead): each.lead for each in timed if each.lead is not None}
    for done in range(rounds):
        for lead in leads.values():
            lead.measure()
        first = done % len(timed)
        for each in (*timed[first:], *timed[:first]):
            samples[each.name].append(each.sample() / each.share)
        seen(done + 1)
        if over():
            break
    return {each.name: _summarise(samples[each.name], each) for each in timed}


def _summarise(seconds: Sequence[float], timed: Timed) -> Summary:
    median, low, high = (float(x) for x in 1e3 * np.percentile(seconds, (50, 10, 90)))
    host, unqueued = (1e3 * x / timed.share for x in (timed.host, timed.unqueued))
    return Summary(median, low, high, len(seconds), timed.calls, host, unqueued)
