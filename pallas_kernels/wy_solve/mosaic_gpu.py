"""The tree WY solve as one launch: one program a sequence, value head and 128 value channels.

Two warpgroups share a program. Each multiplies its 64 rows of R0 with all keys and queries on the
tensor cores. Then the first solves for U by forward substitution and the second forms the outputs
one block behind it. Where programs are too few to fill the GPU, each has two more warpgroups: they
prepare while the others multiply, and then help them.

K K^T and Q K^T are formed by every value head: handing them over from one program a key head would
cost a launch, recomputing them costs 8 tensor-core instructions.

Rows are in topological order. Trees of more than 32 rows go in segments of 32. A program of four
warpgroups takes two segments in one pass: the state is read once, two warpgroups multiply it with
each segment's rows, and the substitution goes on from one segment to the next without a break.
Otherwise each segment is a pass of its own.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tiles
from pallas_kernels.tiles import ROWS, load
from pallas_kernels.wy_solve import substitution, tensor_cores
from pallas_kernels.wy_solve.couplings import Seen, add_earlier_segments, couple, sum_decays
from pallas_kernels.wy_solve.path import commit_path, drop_path, stage_path
from pallas_kernels.wy_solve.program import Program, together
from pallas_kernels.wy_solve.sizes import BLOCK, CHANNELS, SEGMENT, Sizes, scratch_types

INPUTS = ("layer", "count", "seen", "q", "k", "v", "g", "beta")
PATH = ("path_k", "path_u", "path_g", "path_length", "path_write")


def solve(
    sizes: Sizes, arrays: dict[str, jax.Array], R: Any, U: Any, interpret: Any
) -> tuple[jax.Array, Any]:
    """Outputs and pseudo-values, both [B, N, Hv, dv] float32; dv is that of the padded ``v``.

    Args:
      arrays: ``INPUTS``, and ``PATH`` if ``sizes.path``: layer [1], count [B]; seen
        [B, S, S, 64] int32, bit j tells whether a row of the first segment, each given twice, is
        or descends from row j of the second; q, k, v as in the contract; g and beta [B, N, 8 n];
        the path's factors, padded alike, with a layer axis of L or of 1; path_write [B], whether
        the committed state is written.
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
                writes=inputs.path_write[b] > 0 if sizes.path else False,
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
    """One warpgroup's whole program; a sequence without rows and without a path costs nothing, or
    the copies of its rows where programs are few."""
    busy = p.count > 0
    if p.sizes.path:
        busy = busy | (p.length > 0)
    # Always true, and so makes the layer arrive with the count, not after it.
    busy = busy & (p.layer >= 0)
    if p.sizes.wide:
        # The copies start before it is known whether they are needed.
        stage(p, 0, p.sizes.path > 0)

        @pl.when(~busy)
        def _():
            plgpu.barrier_wait(p.s.loaded)
            if p.sizes.path:
                drop_path(p)

    @pl.when(busy)
    def _():
        alone = p.sizes.passes == 1 or p.sizes.path > 0
        if alone:
            run_pass(p, jnp.int32(0), first=True)
        if p.sizes.passes > 1:
            # A later pass reads the state from GMEM: committed, or as it was and commits again.
            again = dataclasses.replace(p, length=jnp.where(p.writes, 0, p.length), writes=False)

            def later(segment, carry):
                together(p)
                run_pass(again, segment, first=False)
                return carry

            lax.fori_loop(int(alone), (p.count + SEGMENT - 1) // SEGMENT, later, 0)

    @pl.when(p.group == 1)
    def _():
        substitution.clear_rows(p)


def run_pass(p: Program, segment: jax.Array, first: bool) -> None:
    """Solve the rows of a pass: couplings to all rows before, products, substitution, outputs.

    ``segment`` is its first; ``first`` is for a pass that has none before it: it couples while the
    state arrives. A second segment of the pass is coupled while the first one is solved: its
    couplings would delay every row otherwise.
    """
    commits = p.sizes.path > 0
    start = SEGMENT * segment

    if not p.sizes.wide:
        stage(p, start, commits)
    span = p.sizes.span
    fetches, prepares = (p.group < 2, p.group >= 2) if p.sizes.wide else (True, True)
    multiplies = fetches if span == 1 else True
    when(fetches, lambda: tensor_cores.fetch_state(p, 0))
    bits = p.inputs.seen.at[p.b]
    seen = tuple(
        tuple(load(bits.at[segment + part, segment + source], ROWS) for source in range(part + 1))
        for part in range(span)
    )
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
            couple(p, 0, 0, seen[0][0])
        if p.sizes.wide and span == 1:
            together(p)

    def multiply():
        if commits and p.sizes.wide:
            when(fetches, lambda: commit_path(p))
            if span > 1:
                together(p)
        total = tensor_cores.products(p, commits)
        if commits and first:
            # Later passes read the state back from GMEM.
            plgpu.wait_smem_to_gmem(0, wait_read_only=p.sizes.passes == 1)
        together(p)  # the products take the place of the state
        columns = p.keys_and_queries(p.part)
        p.s.products.at[p.rows, columns][...] = tensor_cores.scaled(p, total)

    when(prepares, prepare)
    when(multiplies, multiply)
    together(p)
    if not first:
        add_earlier_segments(p, segment)
        couple(p, 0, 0, seen[0][0])
        together(p)
    if span > 1:
        when(prepares, lambda: couple_second(p, seen))
    substitution.run_pass(p, start)


def couple_second(p: Program, seen: Seen) -> None:
    """Form the couplings of a pass's second segment."""
    couple(p, 1, 0, seen[1][0])
    couple(p, 1, 1, seen[1][1])
    plgpu.commit_smem()
    plgpu.barrier_arrive(p.s.coupled)


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
    """Start copying the operands of the segment's rows into SMEM. Behind the rows of a short last
    segment stay those of the one before: finite, and nobody's."""
    sizes = p.sizes
    if sizes.passes == 1 or sizes.last_rows == SEGMENT:
        copy_rows(p, start, sizes.pass_rows)
        return
    last = start == SEGMENT * (sizes.segments - 1)
    pl.when(~last)(lambda: copy_rows(p, start, SEGMENT))
    pl.when(last)(lambda: copy_rows(p, start, sizes.last_rows))


def copy_rows(p: Program, start: int | jax.Array, rows: int) -> None:
    """Start the copies of a pass's rows: of its gates and values at once, of keys and queries by
    segments."""
    s, here, eight = p.s, pl.ds(start, rows), pl.ds((p.h // BLOCK) * BLOCK, BLOCK)
    keys = s.raw if p.sizes.staged else s.kq.at[0]
    for before in range(0, rows, SEGMENT):
        count = min(rows - before, SEGMENT)
        for name, to in (("k", 2 * before), ("q", 2 * before + SEGMENT)):
            source = getattr(p.inputs, name).at[p.b, pl.ds(start + before, count), p.key_head]
            plgpu.copy_gmem_to_smem(source, keys.at[pl.ds(to, count)], s.loaded)
    target = s.v if rows == p.sizes.pass_rows else s.v.at[pl.ds(0, rows)]
    plgpu.copy_gmem_to_smem(p.inputs.v.at[p.b, here, p.h, p.channels], target, s.loaded)
    for which, gate in enumerate((p.inputs.g, p.inputs.beta)):
        target = s.gates.at[which, pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(gate.at[p.b, here, eight], target, s.loaded)
