"""What the parts of a running WY program share: its place in the grid and its memory."""

import dataclasses
from collections.abc import Sequence
from functools import reduce
from itertools import chain
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import Ref
from pallas_kernels.wy_solve.sizes import CHANNELS, HALF, SEGMENT, Sizes


@dataclasses.dataclass(frozen=True)
class Program:
    """One warpgroup of one program.

    Attributes:
      interpreted: True under the interpreter, which lacks wgmma with registers.
      group: 0 solves, 1 reads; both multiply. In a wide program 2 and 3 prepare the couplings
        meanwhile and multiply for a second segment, then 2 helps to solve and 3 to read.
      b, h, tile: sequence, value head and tile of 128 value channels.
      layer: of the pool.
      count: active rows of the tree.
      length: rows of the path that is committed first.
      writes: whether the committed state goes back to GMEM.
      s: SMEM by the names of ``sizes.scratch_types``, with the shared part taken apart.
      inputs: GMEM references by name.
      out, u: [B, N, Hv, dv] outputs and pseudo-values in GMEM.
    """

    sizes: Sizes
    interpreted: bool
    group: Any
    b: Any
    h: Any
    tile: Any
    layer: Any
    count: Any
    length: Any
    writes: Any
    s: SimpleNamespace
    inputs: SimpleNamespace
    out: Ref
    u: Ref

    @property
    def half(self) -> Any:
        """Of what two warpgroups share, the half that is this one's."""
        return self.group % 2

    @property
    def part(self) -> Any:
        """The segment of a pass for which this warpgroup multiplies."""
        return self.group // 2 if self.sizes.span > 1 else 0

    def keys_and_queries(self, part: Any) -> Any:
        """Where those of a segment of a pass are, 32 of each."""
        return pl.ds(2 * SEGMENT * part, 2 * SEGMENT)

    @property
    def key_head(self) -> Any:
        return self.h // (self.sizes.value_heads // self.sizes.key_heads)

    @property
    def channels(self) -> Any:
        return pl.ds(self.tile * CHANNELS, CHANNELS)

    def columns(self, chunk: Any) -> Any:
        """The columns of a chunk of keys, queries or states."""
        return pl.ds(self.sizes.chunk * chunk, self.sizes.chunk)

    def state(self, window: Any) -> Ref:
        """A window of columns of the 64 rows of the state that this warpgroup multiplies.

        Past the last value row (dv = 64) the last rows are read again; nobody uses the result.
        """
        last = self.sizes.value_dim - HALF
        first = jnp.minimum(self.tile * CHANNELS + self.half * HALF, last)
        width = self.sizes.window * self.sizes.chunk
        rows, columns = pl.ds(first, HALF), pl.ds(width * window, width)
        return self.inputs.R.at[self.layer, self.b, self.h, rows, columns]

    @property
    def rows(self) -> Any:
        """This warpgroup's rows of what SMEM holds of the state."""
        return pl.ds(HALF * self.half, HALF)

    @property
    def arrived(self) -> Ref:
        """The barrier of this warpgroup's part of the state."""
        return self.s.arrived.at[self.half]

    @property
    def owns_state(self) -> Any:
        """False for a warpgroup that reads somebody else's rows."""
        return self.tile * CHANNELS + self.half * HALF < self.sizes.value_dim


def together(p: Program) -> None:
    """Wait until all warpgroups are here; what any wrote before is visible after."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(p.s.together)
    plgpu.barrier_wait(p.s.together)


def accumulate(p: Program, shape: tuple[int, int], *parts: Sequence[tuple[Any, Ref]]) -> jax.Array:
    """The sum of products x y of bfloat16 (or tf32) terms, tiles or SMEM, on the tensor cores.

    Each part has an accumulator of its own, and the parts are added in registers.
    """
    if p.interpreted:
        wide = [(x[...].astype(jnp.float32), y[...].astype(jnp.float32)) for x, y in chain(*parts)]
        return reduce(jnp.add, (jnp.dot(x, y, precision="highest") for x, y in wide))

    def scoped(*sums):
        for total, part in zip(sums, parts, strict=True):
            for x, y in part:
                plgpu.wgmma(total, x, y)
        return [total[...] for total in sums]

    accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    sums = pl.run_scoped(scoped, *[accumulator] * len(parts))
    return reduce(jnp.add, map(lax.optimization_barrier, sums))


def pick(tile: jax.Array, column: Any, layout: Any) -> jax.Array:
    """One column of a register tile, as a vector along its rows.

    With a static column and a thread a row it compiles to nothing: adding -0.0 changes no bits.
    """
    index = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1, layout=layout)
    return jnp.sum(jnp.where(index == column, tile, -0.0), axis=1)
