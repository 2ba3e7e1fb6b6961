"""What a program of the tree scan keeps in shared memory, decided by static sizes alone.

A program wants its keys and queries as float32 and its saved states close by; a multiprocessor
wants two programs, so that one works while the other waits. When not everything fits, states move
to global memory first, then bfloat16 rows stay as they are and are widened at every node.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.padding import round_up
from pallas_kernels.walk import slots

TILE = 64
"""Value rows of a program: what one warpgroup holds in the layout ``WG``."""

GROUP = 4
"""Value heads whose gates are staged together: a bulk copy moves 16 bytes at least."""

SHARED_SLOTS = 2
"""Saved states kept in shared memory at most; two serve all but wide and deep trees."""

COPY = 256
"""Elements along a dimension that one bulk copy moves at most."""

ALIGNMENT = 128
"""Bytes: where the target of a bulk copy may start in shared memory."""

BLOCK_BYTES = 227 * 1024
"""What one program may use on Hopper; two have 228 KB together, of which each loses one."""

PAIRED_BYTES = 113 * 1024


class Plan(NamedTuple):
    """Shape and dtype of every array; how many saved states are among them; bytes in all."""

    arrays: dict[str, tuple[tuple[int, ...], jnp.dtype]]
    slots: int
    bytes: int

    @property
    def widen(self) -> bool:
        """Whether keys and queries are widened to float32 once, ahead of the walk."""
        return "wide_key" in self.arrays


def saved_states(capacity: int, steps: int) -> int:
    """States that a walk may keep; one longer than its rows keeps none, it starts again."""
    return slots(capacity) if steps == capacity else 0


def plan(capacity: int, steps: int, key_dim: int, dtype: jnp.dtype, export: bool) -> Plan:
    """The best use of shared memory: of those that pair, else of those that fit, the first."""
    most = min(SHARED_SLOTS, saved_states(capacity, steps))
    widen = dtype.itemsize < 4 and key_dim % 16 == 0
    wanted = [(True, n) for n in range(most, min(most, 1) - 1, -1)] * widen
    wanted += [(False, n) for n in range(most, -1, -1)]
    plans = [_plan(capacity, steps, key_dim, dtype, export, *choice) for choice in wanted]
    for limit in (PAIRED_BYTES, BLOCK_BYTES):
        fitting = [candidate for candidate in plans if candidate.bytes <= limit]
        if fitting:
            return fitting[0]
    return plans[-1]


def _plan(
    capacity: int, steps: int, key_dim: int, dtype: jnp.dtype, export: bool, widen: bool, kept: int
) -> Plan:
    wide = jnp.dtype(jnp.float32)
    rows = (capacity, key_dim)
    arrays = {
        "key": (rows, dtype),
        "query": (rows, dtype),
        "value": ((capacity, TILE), dtype),
        "gates": ((2, capacity, GROUP), wide),
        "walk": ((3, round_up(steps, ALIGNMENT // 4)), jnp.dtype(jnp.int32)),
    }
    if widen:
        arrays |= {"wide_key": (rows, wide), "wide_query": (rows, wide)}
    if kept:
        # Eight columns more than a tile, so that the rows of a warp fall into different banks.
        arrays["stack"] = ((kept, TILE, key_dim + 8), wide)
    if export:
        arrays["ring"] = ((2, TILE, key_dim), wide)
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in arrays.values()]
    # Every array starts at a multiple of 1024 bytes; the last 1024 are for the barrier.
    return Plan(arrays, kept, sum(round_up(size, 1024) for size in sizes) + 1024)
