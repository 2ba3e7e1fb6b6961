"""Static sizes of a tree WY solve, the SMEM it takes, and the limits of a kernel."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.padding import round_up
from pallas_kernels.tiles import swizzled

SEGMENT = 32  # rows of a tree whose keys and queries make one operand of the tensor cores
CHANNELS = 128  # value channels of a program, one a thread
HALF = 64  # rows of R0 that a warpgroup multiplies
BLOCK = 8  # rows of the substitution that share a register tile
CHUNK = 32  # columns of R0 that are split and multiplied at a time
WINDOW = 4  # chunks of R0 that SMEM holds, unless a path is committed into them
PATH_BLOCK = 16  # rows of a path that are in SMEM and multiplied at a time
SMEM_LIMIT = 227 * 1024
COPY_LIMIT = 256  # rows that one bulk copy can move
MULTIPROCESSORS = 132  # of an H100 SXM or H200

PAIRS = {
    # (term of the left factor, term of the right one): smallest products first.
    "ieee": ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)),
    "bf16x3": ((1, 0), (0, 1), (0, 0)),
    "tf32": ((0, 0),),  # one term, float32 in memory
}
PRECISIONS = tuple(PAIRS)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one call, padded: rows to 8s, dk to 16 or to 32s, dv to 64s.

    Attributes:
      rows: N, rows of a tree.
      window: chunks of R0 that SMEM holds at once; all, if a path is committed into them first.
      wide: four warpgroups a program, which solve one or two segments in one pass, where no
        multiprocessor would have a second program.
      path: rows of the previous path that is committed first, padded to 16; 0 for none.
    """

    batch: int
    rows: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    precision: str
    window: int
    wide: bool = False
    path: int = 0

    @property
    def warpgroups(self) -> int:
        return 4 if self.wide else 2

    @property
    def segments(self) -> int:
        return -(-self.rows // SEGMENT)

    @property
    def span(self) -> int:
        """Segments that are solved in one pass, which reads the state once."""
        return self.segments if self.wide else 1

    @property
    def passes(self) -> int:
        return -(-self.segments // self.span)

    @property
    def pass_rows(self) -> int:
        """Rows of a pass; the last one may have fewer."""
        return min(self.rows, SEGMENT * self.span)

    @property
    def last_rows(self) -> int:
        """Rows of the last segment."""
        return self.rows - SEGMENT * (self.segments - 1)

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return min(self.key_dim, CHUNK)

    @property
    def chunks(self) -> int:
        return self.key_dim // self.chunk

    @property
    def tf32(self) -> bool:
        return self.precision == "tf32"

    @property
    def terms(self) -> int:
        """Bfloat16 terms of a key or query; a bfloat16 one is exact by itself."""
        if self.dtype == jnp.bfloat16:
            return 1
        return 1 + max(right for _, right in PAIRS[self.precision])

    @property
    def path_terms(self) -> int:
        """Bfloat16 terms of a key of the path, which is committed exactly in every precision."""
        return 1 if self.dtype == jnp.bfloat16 else 3

    @property
    def staged(self) -> bool:
        """Keys and queries are converted on their way to the tensor cores."""
        return (self.dtype == jnp.bfloat16) == self.tf32

    @property
    def state_pairs(self) -> tuple[tuple[int, int], ...]:
        """Terms of R0 and of a key that are multiplied."""
        return tuple(pair for pair in PAIRS[self.precision] if pair[1] < self.terms)

    @property
    def key_pairs(self) -> tuple[tuple[int, int], ...]:
        """Terms of two keys that are multiplied."""
        return tuple(pair for pair in self.state_pairs if pair[0] < self.terms)


def scratch_types(sizes: Sizes) -> dict[str, Any]:
    """SMEM of one program; ``lines`` and ``past`` are there twice, for two warpgroups.

    What is needed early shares its memory with what comes later, which leaves room for a second
    program on a multiprocessor: the state with the products and solution, the path with couplings
    (these only if the program is not wide).
    """
    width, rows, f32 = sizes.key_dim, sizes.pass_rows, jnp.float32
    pairs, terms = 2 * SEGMENT * sizes.span, sizes.terms
    state = swizzled((2 * HALF, sizes.window * sizes.chunk), f32, sizes.chunk)
    products = swizzled((CHANNELS, pairs), f32, BLOCK)
    later = (products, plgpu.SMEM((rows, CHANNELS), f32))
    coupling = plgpu.SMEM((SEGMENT * sizes.span, pairs), f32)
    operand = f32 if sizes.tf32 else jnp.bfloat16
    types: dict[str, Any] = {
        "kq": _operands((terms, pairs, width), operand),
        "v": plgpu.SMEM((rows, CHANNELS), sizes.dtype),
        # 64 rows from a segment's first are read; those behind the last segment are nobody's.
        "gates": swizzled((2, SEGMENT * (sizes.span + 1), BLOCK), f32, BLOCK),
        "lines": plgpu.SMEM((2, sizes.span, 4, 2 * SEGMENT), f32),
        "shared": plgpu.RefUnion(state, later),
        "loaded": plgpu.Barrier(num_arrivals=2 * sizes.span + 3),
        "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "together": plgpu.Barrier(num_arrivals=sizes.warpgroups),
        "solved": plgpu.Barrier(num_arrivals=1, num_barriers=rows // BLOCK),
    }
    if sizes.wide:
        types["helped"] = plgpu.Barrier(num_arrivals=1, num_barriers=rows // BLOCK)
    if not sizes.path:
        types["coupling"] = coupling
    if sizes.staged:
        types["raw"] = plgpu.SMEM((pairs, width), sizes.dtype)
    if sizes.span > 1:
        types["coupled"] = plgpu.Barrier(num_arrivals=2)
    if sizes.passes > 1:
        types["past"] = plgpu.SMEM((2, 2, sizes.segments, 2 * SEGMENT), f32)
        types["earlier"] = _operands((terms, 2 * SEGMENT, width), operand)
        types["fetched"] = plgpu.Barrier(num_arrivals=1)
    if sizes.path:
        path = (
            swizzled((sizes.path_terms, PATH_BLOCK, width), jnp.bfloat16, PATH_BLOCK),
            plgpu.SMEM((PATH_BLOCK, CHANNELS), f32),
            plgpu.SMEM((sizes.path, BLOCK), f32),
        )
        types["early"] = (path, coupling) if sizes.wide else plgpu.RefUnion(path, coupling)
        types["path_gates"] = plgpu.Barrier(num_arrivals=1)
        types["path_loaded"] = plgpu.Barrier(num_arrivals=sizes.path_terms + 1)
        if sizes.path > PATH_BLOCK:
            types["path_free"] = plgpu.Barrier(num_arrivals=2)
    return types


def smem_bytes(sizes: Sizes) -> int:
    """Bytes of SMEM of one program: Pallas starts every array at a multiple of 1024."""
    total = 1024  # barriers
    for smem in jax.tree.leaves(scratch_types(sizes)):
        if not isinstance(smem, plgpu.Barrier):
            size = math.prod(smem.shape) * jnp.dtype(smem.dtype).itemsize
            total += round_up(size, 1024)
    return total


def _operands(shape: tuple[int, ...], dtype: Any) -> Any:
    """SMEM in the tiling that wgmma reads, in tiles that a chunk can be cut from."""
    return swizzled(shape, dtype, min(shape[-1], CHUNK))
