"""One warpgroup of a program of tree attention: where it stands, its tiles, and their copies.

Tiles of a sequence are numbered in the order of the work: cached ones, then those of the tree
block. A split is a run of them. Every tile is two items of the ring in SMEM, keys and values, in
the order of their use: the keys of a tile are needed while the weights of the one before are
formed, before that one's values.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import Ref
from pallas_kernels.tree_attention.sizes import ALIGNMENT, BLOCK, PAIR, TILE, Sizes

KEYS, VALUES = 0, 1


@dataclasses.dataclass(frozen=True)
class Split:
    """Where a warpgroup stands.

    Attributes:
      interpreted: True under the interpreter, which lacks multicast and wgmma with registers.
      group: which warpgroup; the last one starts the copies. pair: which program of a pair.
      b, head, row_tile: sequence, key head, and which ``blocks`` of its rows.
      base: the sequence's first row among all rows of all caches, in this layer.
      length: cached rows. cached: tiles of them. first, last: the tiles of this split.
      s: SMEM and barriers by the names of ``scratch_types``.
      inputs: GMEM references by name.
      shares: this warpgroup takes turns with the other program's at their common block.
    """

    sizes: Sizes
    interpreted: bool
    group: Any
    pair: Any
    b: Any
    head: Any
    row_tile: Any
    base: Any
    length: Any
    cached: Any
    first: Any
    last: Any
    s: SimpleNamespace
    inputs: SimpleNamespace
    shares: bool = False

    @property
    def rows(self) -> Any:
        """This warpgroup's rows among those of the key head."""
        block = self.group
        if self.sizes.paired:
            block = 2 if self.shares else self.pair
        block = self.row_tile * self.sizes.blocks + block
        return pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK)

    def slot(self, tile: Any, which: int) -> Any:
        return lax.rem(self.item(tile, which), self.sizes.slots)

    def item(self, tile: Any, which: int) -> Any:
        """Its place in the order K0 K1 V0 K2 V1 ... of the split's copies."""
        turn = tile - self.first
        if which == KEYS:
            return jnp.maximum(2 * turn - 1, 0)
        return jnp.minimum(2 * turn + 2, 2 * (self.last - self.first) - 1)

    def nominal(self, tile: Any) -> Any:
        """The first row of a cached tile, among all rows of all caches.

        Tiles start at multiples of ``ALIGNMENT``, up to 7 rows before the sequence. The tile that
        holds its first row comes last, so that the tiles that need no mask are in one run.
        """
        place = jnp.where(tile + 1 < self.cached, tile + 1, 0)
        return self.base - lax.rem(self.base, ALIGNMENT) + place * TILE

    def start(self, tile: Any) -> Any:
        """The same, but at the array's end a tile begins earlier."""
        return jnp.minimum(self.nominal(tile), self.sizes.cache_rows - TILE)

    def visible(self, tile: Any) -> tuple[Any, Any]:
        """The first row of a cached tile that is seen, and the one after the last."""
        return jnp.maximum(self.base, self.nominal(tile)), self.base + self.length

    @property
    def unmasked(self) -> Any:
        """Tiles before this one lie wholly within the cached rows."""
        whole = (self.length + lax.rem(self.base, ALIGNMENT)) // TILE - 1
        return jnp.clip(whole, self.first, self.last)


def tiles_of(sizes: Sizes, base: Any, length: Any, takes_part: Any) -> tuple[Any, Any]:
    """Cached tiles of a sequence, and tiles of each split: 0 if the sequence takes no part."""
    rows = jnp.where(length > 0, length + lax.rem(base, ALIGNMENT), 0)
    cached = (rows + TILE - 1) // TILE
    total = jnp.where(takes_part, cached + sizes.block_tiles, 0)
    return cached, (total + sizes.splits - 1) // sizes.splits


def copy_tiles(p: Split) -> None:
    """Copy all tiles of the split, each as soon as its slots are free, and wait for their release.

    A program that has ended could be neither copied to nor told of free slots by the other one.
    """
    slots = p.sizes.slots

    def copy(tile: Any, which: int) -> None:
        @pl.when(p.item(tile, which) >= slots)
        def _() -> None:
            plgpu.barrier_wait(p.s.free.at[p.slot(tile, which)])

        _copy(p, tile, which)

    def both(tile: Any, carry: Any) -> Any:
        pl.when(tile + 1 < p.last)(lambda: copy(tile + 1, KEYS))
        copy(tile, VALUES)
        return carry

    def drain(item: Any, carry: Any) -> Any:
        plgpu.barrier_wait(p.s.free.at[lax.rem(item, slots)])
        return carry

    copy(p.first, KEYS)
    lax.fori_loop(p.first, p.last, both, None)
    items = 2 * (p.last - p.first)
    lax.fori_loop(jnp.maximum(items - slots, 0), items, drain, None)


def _copy(p: Split, tile: Any, which: int) -> None:
    slot = p.slot(tile, which)
    target = p.s.ring.at[slot]
    # The interpreter copies for each program by itself.
    shared = PAIR if p.sizes.paired and not p.interpreted else None

    @pl.when(tile < p.cached)
    def _() -> None:
        cache = (p.inputs.keys, p.inputs.values)[which]
        rows = pl.ds(pl.multiple_of(p.start(tile), ALIGNMENT), TILE)
        here = p.s.full.at[slot]
        plgpu.copy_gmem_to_smem(cache.at[rows, p.head], target, here, collective_axes=shared)

    own = (p.inputs.k, p.inputs.v)[which]
    rows = min(p.sizes.nodes, TILE)
    for index in range(p.sizes.block_tiles):

        @pl.when(tile == p.cached + index)
        def _(index: int = index) -> None:
            for piece in range(p.sizes.copies):
                count = min(rows, TILE - rows * piece)
                plgpu.copy_gmem_to_smem(
                    own.at[p.b, pl.ds(TILE * index, count), p.head],
                    target.at[pl.ds(rows * piece, count)],
                    p.s.own.at[2 * index + which],
                )


def wait_for(p: Split, tile: Any, which: int, cached: bool) -> Ref:
    """The SMEM of an item once it has arrived; ``cached`` if it is known to be a cached one."""
    slot = p.slot(tile, which)
    if cached:
        plgpu.barrier_wait(p.s.full.at[slot])
        return p.s.ring.at[slot]

    @pl.when(tile < p.cached)
    def _() -> None:
        plgpu.barrier_wait(p.s.full.at[slot])

    @pl.when(tile >= p.cached)
    def _() -> None:
        plgpu.barrier_wait(p.s.own.at[2 * (tile - p.cached) + which])

    return p.s.ring.at[slot]


def release(p: Split, tile: Any, which: int) -> None:
    """This warpgroup has read an item."""
    plgpu.barrier_arrive(p.s.free.at[p.slot(tile, which)])


def skip(p: Split, tile: Any, which: int) -> None:
    """Leave an item to the other program: a slot that has not arrived must not be released."""
    wait_for(p, tile, which, cached=False)
    release(p, tile, which)
