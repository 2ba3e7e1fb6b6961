"""Interleaved wall times: rounds in which everything runs once, in an order that rotates.

A sample is a number of calls in a row, chosen once so that it lasts long enough, then one wait for
the device: dispatch overlaps with the calls before. Time is a call's share, in seconds.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CLOCK = "wall, of calls in a row up to block_until_ready"
SAMPLE_SECONDS = 0.01
MOST_CALLS = 64


@dataclasses.dataclass
class Timed:
    """Something to time; ``run(calls)`` returns once the device is done.

    Attributes:
      most_calls: in a row, so that what they return fits in memory.
      share: what part of the layers it runs; times are divided by it.
    """

    name: str
    run: Callable[[int], None]
    most_calls: int = MOST_CALLS
    share: float = 1.0
    calls: int = 1


class Summary(NamedTuple):
    """Milliseconds: median and 10th to 90th percentile over the rounds."""

    median: float
    low: float
    high: float
    rounds: int
    calls: int


class Working:
    """The pool that publishing programs write, handed from call to call."""

    def __init__(self, pool: jax.Array):
        self.pool = pool


def time_program(
    name: str, compiled: Callable, pool: jax.Array | Working, operands: Any, output_bytes: int,
    memory: int, share: float,
) -> Timed:  # fmt: skip
    """A compiled program ``(pool, operands) -> (outputs, pool or None)`` as something to time."""

    def run(calls: int) -> None:
        outputs = None
        for _ in range(calls):
            del outputs  # its memory serves the next call
            if isinstance(pool, Working):
                outputs, pool.pool = compiled(pool.pool, operands)
            else:
                outputs, _ = compiled(pool, operands)
        jax.block_until_ready((outputs, pool.pool if isinstance(pool, Working) else None))

    most = max(1, min(MOST_CALLS, memory // max(1, output_bytes)))
    return Timed(name, run, most, share)


def time_copy(size: int) -> tuple[Timed, int]:
    """A copy of ``size`` bytes through XLA, and the bytes that it moves."""
    source = jnp.ones(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)  # an identity would not copy

    def run(calls: int) -> None:
        for _ in range(calls):
            made = copy(source)
        jax.block_until_ready(made)

    return Timed("copy", run, most_calls=4), 2 * source.nbytes


def choose_calls(timed: Timed) -> None:
    """Warm up, then set the calls of a sample."""
    timed.run(1)
    seconds = _seconds(timed, 1)
    timed.calls = int(np.clip(np.ceil(SAMPLE_SECONDS / seconds), 1, timed.most_calls))
    timed.run(timed.calls)


def measure_rounds(
    timed: Sequence[Timed], rounds: int, over: Callable[[], bool], seen: Callable[[int], None]
) -> dict[str, Summary]:
    """Medians of up to ``rounds`` rounds; ends after the round in which ``over()`` is true."""
    samples: dict[str, list[float]] = {each.name: [] for each in timed}
    for done in range(rounds):
        first = done % len(timed)
        for each in (*timed[first:], *timed[:first]):
            samples[each.name].append(_seconds(each, each.calls) / each.share)
        seen(done + 1)
        if over():
            break
    return {each.name: summarise(samples[each.name], each.calls) for each in timed}


def summarise(seconds: Sequence[float], calls: int) -> Summary:
    median, low, high = (float(x) for x in 1e3 * np.percentile(seconds, (50, 10, 90)))
    return Summary(median, low, high, len(seconds), calls)


def _seconds(timed: Timed, calls: int) -> float:
    start = time.perf_counter()
    timed.run(calls)
    return (time.perf_counter() - start) / calls
