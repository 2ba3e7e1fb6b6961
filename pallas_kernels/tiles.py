"""Register layouts and the few tile operations that several kernels share.

``WG`` is the accumulator layout of wgmma: a tile [64 k, 8 n] with each row spread over four lanes.
``ROWS`` and ``COLS`` are the layouts of vectors along a tile's rows and along its columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WG = plgpu.Layout.WGMMA
ROWS = WG.reduce(1)
COLS = WG.reduce(0)

Ref = Any
"""A memory reference inside a kernel; Pallas has no public type for it."""


def compiler_params() -> plgpu.CompilerParams:
    """Kernels place their own barriers: automatic ones would stand after every SMEM access.

    Sums stay within a warp, so they need none of the 2 KB of SMEM that Pallas would reserve.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)


def interpreter(chosen: str) -> plgpu.InterpretGPUParams | None:
    """What ``plgpu.kernel(interpret=...)`` takes for a resolved implementation."""
    return plgpu.InterpretGPUParams() if chosen == "interpret" else None


def swizzled(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """SMEM in tiles of 8 rows by (at most) ``columns``, swizzled over the banks.

    Bulk copies and wgmma understand the form, and a slice of whole tiles can be cut from it.
    """
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    # Abstract to pyright, as jax leaves out one method that only interpretation needs.
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))


def load(ref: Ref, layout: Any) -> jax.Array:
    """Read a tile or vector into registers in the given layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Ref, x: jax.Array) -> None:
    """Write registers to memory, whatever part of a cache line a row is.

    From jax 0.12 on a plain assignment insists on whole cache lines, and this function exists.
    """
    any_part = getattr(plgpu, "store", None)
    if any_part is None:
        ref[...] = x
    else:
        any_part(ref, x, optimized=False)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A vector with one entry a row, repeated over the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A vector with one entry a column, repeated over the rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def split_bf16(x: jax.Array, terms: int) -> tuple[jax.Array, ...]:
    """Float32 as a sum of bfloat16 terms, largest first; three terms are exact.

    Each term takes the eight leading bits of what is left by masking: rounding conversions run at
    a sixteenth of the rate of integer arithmetic.
    """
    parts = []
    for _ in range(terms):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return tuple(parts)
