"""The tree WY solve as one launch: one program a sequence, value head and 128 value channels.

Two warpgroups share a program. Each multiplies its 64 rows of R0 with all keys and queries on the
tensor cores. Then the first solves for U by forward substitution and the second forms the outputs
one block behind it. Where programs are too few to fill the GPU, each has two more warpgroups: they
prepare while the others multiply, and then help them.

K K^T and Q K^T are formed by every value head: handing them over from one program a key head would
cost a launch, recomputing them costs 8 tensor-core instructions.

Rows are in topological order. Trees of more than 32 rows go in segments of 32.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tiles
from pallas_kernels.tiles import COLS, ROWS, WG, Ref, along_columns, along_rows, load, store
from pallas_kernels.wy_solve import substitution, tensor_cores
from pallas_kernels.wy_solve.path import commit_path, stage_path
from pallas_kernels.wy_solve.program import Program, pick, together
from pallas_kernels.wy_solve.sizes import BLOCK, CHANNELS, SEGMENT, Sizes, scratch_types

INPUTS = ("layer", "count", "seen", "q", "k", "v", "g", "beta")
PATH = ("path_k", "path_u", "path_g", "path_length")


def solve(
    sizes: Sizes, arrays: dict[str, jax.Array], R: Any, U: Any, interpret: Any
) -> tuple[jax.Array, Any]:
    """Outputs and pseudo-values, both [B, N, Hv, dv] float32; dv is that of the padded ``v``.

    Args:
      arrays: ``INPUTS``, and ``PATH`` if ``sizes.path``: layer [1], count [B]; seen
        [B, S, S, 64] int32, bit j tells whether a row of the first segment, each given twice, is
        or descends from row j of the second; q, k, v as in the contract; g and beta [B, N, 8 n];
        the path's factors, padded alike.
      R: the pool, an array, or a mutable reference if a path is committed first.
      U: a mutable reference [L, B, N, Hv, dv] for the pseudo-values, returned as it is; or None.
    """
    names = (*INPUTS, *(PATH if sizes.path else ()))
    width = arrays["v"].shape[-1]
    rows = jax.ShapeDtypeStruct((sizes.batch, sizes.rows, sizes.value_heads, width), jnp.float32)

    def program(*refs, **scratch):
        inputs = SimpleNamespace(**dict(zip(names, refs, strict=False)), R=refs[len(names)])
        b, h = lax.axis_index("b"), lax.axis_index("h")
        layer = inputs.layer[0]
        if U is None:
            out, u = refs[len(names) + 1 :]
        else:
            pool, out = refs[len(names) + 1 :]
            u = pool.at[layer]
        state, (products, pseudo_values) = scratch.pop("shared")
        shared = {"state": state, "products": products, "u": pseudo_values}
        if sizes.path:
            path, coupling = scratch.pop("early")
            shared |= {"coupling": coupling}
            shared |= dict(zip(("path_k", "path_u", "path_g"), path, strict=True))
        run(
            Program(
                sizes=sizes,
                interpreted=interpret is not None,
                group=lax.axis_index("group"),
                b=b,
                h=h,
                tile=lax.axis_index("tile"),
                layer=layer,
                count=inputs.count[b],
                length=inputs.path_length[b] if sizes.path else 0,
                s=SimpleNamespace(**scratch, **shared),
                inputs=inputs,
                out=out,
                u=u,
            )
        )

    kernel = plgpu.kernel(
        program,
        out_type=[rows, rows] if U is None else [rows],
        grid=(sizes.batch, sizes.value_heads, width // CHANNELS),
        grid_names=("b", "h", "tile"),
        num_threads=sizes.warpgroups,
        thread_name="group",
        scratch_types=scratch_types(sizes),
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        kernel_name="wy_solve",
    )
    operands = [arrays[name] for name in names]
    if U is None:
        out, u = kernel(*operands, R)
        return out, u
    (out,) = kernel(*operands, R, U)
    return out, U


def run(p: Program) -> None:
    """One warpgroup's whole program; a sequence without rows and without a path costs nothing."""
    busy = p.count > 0
    if p.sizes.path:
        busy = busy | (p.length > 0)
    # Always true, and so makes the layer arrive with the count, not after it.
    busy = busy & (p.layer >= 0)
    if p.sizes.wide:
        # The copies start before it is known whether they are needed: few programs, little waste.
        stage(p, 0, p.sizes.path > 0)

        @pl.when(~busy)
        def _():
            plgpu.barrier_wait(p.s.loaded)
            if p.sizes.path:
                plgpu.barrier_wait(p.s.path_loaded)

    @pl.when(busy)
    def _():
        alone = p.sizes.segments == 1 or p.sizes.path > 0
        if alone:
            run_segment(p, jnp.int32(0), first=True)
        if p.sizes.segments > 1:

            def later(segment, carry):
                together(p)
                run_segment(p, segment, first=False)
                return carry

            lax.fori_loop(int(alone), (p.count + SEGMENT - 1) // SEGMENT, later, 0)

    @pl.when(p.group == 1)
    def _():
        substitution.clear_rows(p)


def run_segment(p: Program, segment: jax.Array, first: bool) -> None:
    """Solve 32 rows of the tree: couplings to all rows before, products, substitution, outputs.

    ``first`` is for a segment that has none before it: it couples while the state arrives.
    """
    commits = first and p.sizes.path > 0
    start = SEGMENT * segment

    if not p.sizes.wide:
        stage(p, start, commits)
    multiplies, prepares = (p.group < 2, p.group >= 2) if p.sizes.wide else (True, True)
    when(multiplies, lambda: tensor_cores.fetch_state(p, 0))
    seen = load(p.inputs.seen.at[p.b, segment, segment], ROWS)
    plgpu.barrier_wait(p.s.loaded)
    if p.sizes.staged:
        tensor_cores.convert(p, p.s.kq)
        together(p)

    def prepare():
        sum_decays(p, segment, seen)
        if commits and not p.sizes.wide:
            commit_path(p)
            together(p)  # the couplings take the place of the path
        if first:
            couple(p, segment, segment, seen, p.s.kq)
        if p.sizes.wide:
            together(p)

    def multiply():
        if commits and p.sizes.wide:
            commit_path(p)
        total = tensor_cores.products(p, commits)
        if commits:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        together(p)  # the products take the place of the state
        p.s.products.at[p.rows, pl.ds(0, 2 * SEGMENT)][...] = tensor_cores.scaled(p, total)

    when(prepares, prepare)
    when(multiplies, multiply)
    together(p)
    if not first:
        add_earlier_segments(p, segment)
        couple(p, segment, segment, seen, p.s.kq)
        together(p)
    substitution.run_segment(p, start)


def when(condition: Any, action: Callable[[], None]) -> None:
    """``pl.when`` for a condition that may be known to hold."""
    action() if condition is True else pl.when(condition)(action)


def stage(p: Program, start: int | jax.Array, path: bool) -> None:
    """Start copying what the products and the substitution need besides the state."""

    @pl.when(p.group == 0)
    def _():
        stage_rows(p, start)
        if path:
            stage_path(p)


def stage_rows(p: Program, start: int | jax.Array) -> None:
    """Start copying the operands of the segment's rows into SMEM."""
    s, rows = p.s, p.sizes.segment_rows
    here, eight = pl.ds(start, rows), pl.ds((p.h // BLOCK) * BLOCK, BLOCK)
    keys = s.raw if p.sizes.staged else s.kq.at[0]
    for name, to in (("k", 0), ("q", SEGMENT)):
        source = getattr(p.inputs, name).at[p.b, here, p.key_head]
        plgpu.copy_gmem_to_smem(source, keys.at[pl.ds(to, rows)], s.loaded)
    plgpu.copy_gmem_to_smem(p.inputs.v.at[p.b, here, p.h, p.channels], s.v, s.loaded)
    for which, gate in enumerate((p.inputs.g, p.inputs.beta)):
        target = s.gates.at[which, pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(gate.at[p.b, here, eight], target, s.loaded)


def sum_decays(p: Program, segment: jax.Array, seen: jax.Array) -> None:
    """Write this warpgroup's ``lines``: log decays G, -beta (of the first 32 rows), exp G and g."""
    s, head = p.s, p.h % BLOCK
    line = s.lines.at[p.half]
    g, beta = (pick(load(s.gates.at[which], WG), head, WG) for which in (0, 1))
    line.at[1][...] = -beta
    line.at[3][...] = g
    plgpu.commit_smem()
    G = _decay_from(seen, line.at[3])
    if p.sizes.segments > 1:
        past = s.past.at[p.half]
        past.at[0, segment][...] = g

        def add(source, G):
            bits = load(p.inputs.seen.at[p.b, segment, source], ROWS)
            return G + _decay_from(bits, past.at[0, source])

        G = lax.fori_loop(0, segment, add, G)
        past.at[1, segment][...] = G
    line.at[0][...] = G
    line.at[2][...] = jnp.exp(G)
    plgpu.commit_smem()


def _decay_from(seen: jax.Array, g: Ref) -> jax.Array:
    """[64]: the log decays that rows take from those of the 32 that they see."""
    shape = (2 * SEGMENT, SEGMENT)
    decays = along_columns(load(g.at[pl.ds(0, SEGMENT)], COLS), shape)
    return jnp.sum(jnp.where(_sees(seen, shape, 0), decays, 0.0), axis=1)


def _sees(seen: jax.Array, shape: tuple[int, int], first: Any) -> jax.Array:
    """Bits of ``seen`` [64] from the first on, as bool [64, n]."""
    bit = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WG) + first
    return lax.shift_right_logical(along_rows(seen, shape), bit) & 1 != 0


def couple(p: Program, segment: jax.Array, source: jax.Array, seen: jax.Array, keys: Ref) -> None:
    """Write how pseudo-values of ``source`` enter the rows of ``segment``, a line of SMEM for each.

    Each warpgroup takes half of the keys; both must have arrived before a line is read.
    """
    shape, first = tensor_cores.COUPLING, tensor_cores.KEYS * p.half
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WG)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WG) + first
    # L is strictly lower; an output reads its own row's pseudo-value too.
    enters = _sees(seen, shape, first) & ((key != row) | (segment != source))
    G = p.s.lines.at[p.half, 0] if segment is source else p.s.past.at[p.half, 1, source]
    mine = pl.ds(first, tensor_cores.KEYS)
    tile = tensor_cores.couplings(p, keys, enters, load(G.at[mine], COLS))
    store(p.s.coupling.at[mine].T, plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED))


def add_earlier_segments(p: Program, segment: jax.Array) -> None:
    """Take the contributions of the rows of earlier segments into this segment's products."""

    def add(source, carry):
        @pl.when(p.group == 1)
        def _():
            rows = pl.ds(SEGMENT * source, SEGMENT)
            keys = p.s.raw if p.sizes.staged else p.s.earlier.at[0]
            fetch = p.inputs.k.at[p.b, rows, p.key_head], keys.at[pl.ds(0, SEGMENT)]
            plgpu.copy_gmem_to_smem(*fetch, p.s.fetched)
            plgpu.barrier_wait(p.s.fetched)

        together(p)
        if p.sizes.staged:
            tensor_cores.convert(p, p.s.earlier)
            together(p)
        seen = load(p.inputs.seen.at[p.b, segment, source], ROWS)
        couple(p, segment, source, seen, p.s.earlier)
        together(p)
        substitution.add_earlier_segment(p, source)
        together(p)
        return carry

    lax.fori_loop(0, segment, add, 0)
