"""Zero padding of operands to the sizes that kernels take; zeros change no result."""

import jax
import jax.numpy as jnp


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def pad_axis(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """``x`` with ``axis`` grown to ``size`` at its end; ``x`` itself if it has that size."""
    missing = size - x.shape[axis]
    if missing == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths, constant_values=value)
