"""How tree attention is cut into programs, decided by static sizes alone.

The rows of a key head are the queries of all nodes and of all query heads that share it, in blocks
of 64: what one warpgroup multiplies. At width 256 a block's outputs fill half of a warpgroup's
registers, so a program has at most two of them. Three blocks go to a pair of programs that share
every tile of keys and values through multicast copies: each has a block of its own, and both take
turns with the third, one tile each. More blocks are more pairs, which read the context again.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.padding import round_up
from pallas_kernels.tiles import swizzled

BLOCK = 64
"""Rows of a warpgroup."""

TILE = 64
"""Keys, or values, of a tile."""

WORD = 32
"""Bits of a word of the mask."""

ALIGNMENT = 8
"""Bulk copies start at multiples of so many rows, and move multiples of them."""

MOST_BLOCKS = 3
"""Blocks of a pair; with 2 there would be no pairs, and three blocks would read the context twice
through the L2."""

MULTIPROCESSORS = 132
"""Of an H200; a program takes one to itself."""

SMEM_LIMIT = 227 * 1024
MOST_SLOTS = 8
MOST_NODES = 128

PAIR = "pair"
"""Axis of the two programs that share tiles."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call.

    Attributes:
      nodes: rows of the tree block, as ``padded_nodes`` gives them.
      group: query heads a key head.
      width: D. capacity: rows of a cache, the spare one included. layers: La.
    """

    batch: int
    nodes: int
    key_heads: int
    group: int
    width: int
    capacity: int
    layers: int

    @property
    def cache_rows(self) -> int:
        """Rows of all caches: the kernel sees them in one dimension."""
        return self.layers * self.batch * self.capacity

    @property
    def row_tiles(self) -> int:
        """How many programs, or pairs, share the rows of a key head."""
        return -(-self._blocks // MOST_BLOCKS)

    @property
    def blocks(self) -> int:
        """Blocks of rows of a program, or of a pair: 1, 2 or 3."""
        return -(-self._blocks // self.row_tiles)

    @property
    def rows(self) -> int:
        """Rows of a key head, padded to whole blocks."""
        return BLOCK * self.blocks * self.row_tiles

    @property
    def paired(self) -> bool:
        return self.blocks == 3

    @property
    def programs(self) -> int:
        """Programs that share a tile."""
        return 2 if self.paired else 1

    @property
    def warpgroups(self) -> int:
        """That compute; one more starts the copies."""
        return min(self.blocks, 2)

    @property
    def block_tiles(self) -> int:
        """Tiles of the tree block."""
        return -(-self.nodes // TILE)

    @property
    def words(self) -> int:
        """Words of a row's mask."""
        return self.block_tiles * TILE // WORD

    @property
    def splits(self) -> int:
        """Splits of a sequence's context: as many as fill the GPU, and no more than tiles."""
        programs = self.batch * self.key_heads * self.row_tiles * self.programs
        tiles = -(-self.capacity // TILE) + self.block_tiles
        return max(1, min(MULTIPROCESSORS // programs, tiles))

    @property
    def slots(self) -> int:
        """Tiles that SMEM holds beside the queries; keys and values take turns."""
        room = SMEM_LIMIT - 2048 - 2 * BLOCK * self.warpgroups * self.width
        return min(MOST_SLOTS, room // (2 * TILE * self.width))

    @property
    def copies(self) -> int:
        """Copies that fill a tile of the tree block: rows of a small one come again and again."""
        return math.ceil(TILE / min(self.nodes, TILE))

    @property
    def _blocks(self) -> int:
        return -(-self.nodes * self.group // BLOCK)


def padded_nodes(nodes: int) -> int:
    """Nodes such that the tree block is whole tiles, or a part of one that copies can fill up."""
    return round_up(nodes, ALIGNMENT if nodes <= TILE else TILE)


def sizes_of(q: jax.Array, keys: jax.Array) -> Sizes:
    batch, nodes, heads, width = q.shape
    layers, _, capacity, key_heads, _ = keys.shape
    group = heads // key_heads
    return Sizes(batch, padded_nodes(nodes), key_heads, group, width, capacity, layers)


def scratch_types(sizes: Sizes) -> dict[str, Any]:
    """SMEM and barriers of a program.

    ``free`` counts the warpgroups of both programs of a pair: a copy writes into both.
    """
    free: Any = plgpu.Barrier(num_arrivals=sizes.warpgroups, num_barriers=sizes.slots)
    if sizes.paired:
        free = plgpu.ClusterBarrier(
            collective_axes=(PAIR,), num_arrivals=sizes.warpgroups, num_barriers=sizes.slots
        )
    return {
        "queries": swizzled((sizes.warpgroups * BLOCK, sizes.width), jnp.bfloat16, sizes.width),
        "ring": swizzled((sizes.slots, TILE, sizes.width), jnp.bfloat16, sizes.width),
        "asked": plgpu.Barrier(num_arrivals=1, num_barriers=sizes.warpgroups),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=sizes.slots),
        "own": plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=2 * sizes.block_tiles),
        "free": free,
    }
