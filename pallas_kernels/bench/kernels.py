"""Which kernels a program launches and how long they run, from CUPTI: no gaps, no dispatch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic.gpu import profiler


class Kernel(NamedTuple):
    """Launches of one kernel in one call, and the milliseconds of all of them."""

    name: str
    count: int
    ms: float


def list_kernels(step: Callable, pool: jax.Array, operands: Any) -> list[Kernel]:
    """The kernels of ``step(pool, operands)``, longest first.

    The pool is not donated here, so a publishing program also copies it: a memory copy, which is
    not a kernel.
    """
    measured = profiler.measure(jax.jit(step), aggregate=False)
    _, launches = measured(pool, operands)
    return _group(launches or [])


def _group(launches: list[tuple[str, float]]) -> list[Kernel]:
    totals: dict[str, tuple[int, float]] = {}
    for name, ms in launches:
        count, total = totals.get(name, (0, 0.0))
        totals[name] = count + 1, total + ms
    kernels = [Kernel(name, count, ms) for name, (count, ms) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)
