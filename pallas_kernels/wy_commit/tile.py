"""Committing a path into a register tile of the state.

    R <- exp(G) R + sum over rows j of exp(G - G_j) u_j k_j^T

G is the path's total log decay and G_j the part up to row j. The exponents are sums over the rows
*after* j, added up from the end: a difference of large numbers would lose their digits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiles import along_columns, along_rows

Reader = Callable[[jax.Array], jax.Array]


def commit(
    tile: jax.Array, length: jax.Array, log_decay: Reader, u: Reader, k: Reader
) -> jax.Array:
    """Commit ``length`` rows into a tile [rows, columns]; the three readers give row t's part.

    Length 0 leaves the tile's bits as they are.
    """
    shape = tile.shape
    total = lax.fori_loop(0, length, lambda t, G: G + log_decay(t), jnp.float32(0))

    def write(back, carry):
        tile, after = carry
        t = length - 1 - back
        weighed = along_rows(u(t) * jnp.exp(after), shape)
        return tile + weighed * along_columns(k(t), shape), after + log_decay(t)

    return lax.fori_loop(0, length, write, (tile * jnp.exp(total), jnp.float32(0)))[0]
