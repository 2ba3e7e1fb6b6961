"""The tree scan for Hopper: one program walks a sequence's whole tree for 64 value rows of a head.

The state tile stays in registers from the root to the last node. States of nodes with several
children wait in a small stack: the first slots in shared memory, deeper ones, which only wide and
deep trees reach, in global memory. The alternative, one launch a level with cut states in global
memory, reloads 3 MB a cut at 48 heads x 128 x 128 (33 MB a layer and sequence for a 28-node tree
with 11 reloads). With the batch in the grid there are programs enough without it.

Each thread reads back exactly what it saved, so the stack needs no barrier; the loop of the path
scan has none. ``export`` adds the store of every state, through a ring of two buffers and
asynchronous copies, so that the stores overlap the arithmetic of the next nodes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.path_scan import memory
from pallas_kernels.path_scan.memory import COPY, GROUP, TILE
from pallas_kernels.tiles import COLS, ROWS, WG, Ref, compiler_params, interpreter, load, swizzled
from pallas_kernels.update import advance, read
from pallas_kernels.walk import RESTART, Walk


@functools.partial(jax.jit, static_argnames=("export", "chosen"))
def tree_scan(
    R: jax.Array,
    layer: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    walk: Walk,
    *,
    export: bool,
    chosen: str,
) -> list[jax.Array]:
    """[out] or, with ``export``, [out, states]. Sizes as the kernel takes them: dk, N and steps
    multiples of 8, dv of 64, and gates padded to a multiple of ``GROUP`` value heads."""
    batch, capacity, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    steps = walk.node.shape[1]
    restarts = steps > capacity
    pieces = [pl.ds(at, min(COPY, steps - at)) for at in range(0, steps, COPY)]
    plan = memory.plan(capacity, steps, key_dim, q.dtype, export)
    spilled = memory.saved_states(capacity, steps) - plan.slots
    out_type = [jax.ShapeDtypeStruct(v.shape, jnp.float32)]
    if export:
        out_type.append(jax.ShapeDtypeStruct((*v.shape, key_dim), jnp.float32))
    if spilled:
        spill = (batch, value_heads, spilled, value_dim, key_dim)
        out_type.append(jax.ShapeDtypeStruct(spill, jnp.float32))

    def body(layer_r, q_r, k_r, v_r, a_r, b_r, node_r, load_r, save_r, size_r, R_r, *rest, **smem):
        out_r, states_r, spill_r = rest[0], rest[export], rest[-1]  # the last two if they exist
        b, h, tile_index = lax.axis_index("b"), lax.axis_index("h"), lax.axis_index("v")
        rows = pl.ds(tile_index * TILE, TILE)
        size, layer = size_r[b], layer_r[0]
        spill = spill_r.at[b, h, :, rows] if spilled else None
        stack = _Stack(smem.get("stack"), spill, key_dim)

        def clear(t, _):
            out_r[b, node_r[b, t], h, rows] = plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), ROWS)
            return _

        @pl.when(size == 0)
        def _():
            lax.fori_loop(0, capacity, clear, 0)

        @pl.when((size > 0) & (layer >= 0))  # always so: it has both fetched at once
        def _():
            key_head = h // (value_heads // key_heads)
            group = pl.ds(h // GROUP * GROUP, GROUP)
            R = load(R_r.at[layer, b, h, rows], WG)
            for source, target in (
                (k_r.at[b, :, key_head], smem["key"]),
                (q_r.at[b, :, key_head], smem["query"]),
                (v_r.at[b, :, h, rows], smem["value"]),
                (a_r.at[b, :, group], smem["gates"].at[0]),
                (b_r.at[b, :, group], smem["gates"].at[1]),
                *(
                    (table.at[b, piece], smem["walk"].at[i, piece])
                    for i, table in enumerate((node_r, load_r, save_r))
                    for piece in pieces
                ),
            ):
                plgpu.copy_gmem_to_smem(source, target, smem["barrier"])
            # While the copies arrive. A longer walk may name active rows after the inactive ones;
            # their visits are still to come, and a thread's stores keep their order.
            last = jnp.minimum(size + capacity, steps) if restarts else capacity
            lax.fori_loop(size, last, clear, 0)
            plgpu.barrier_wait(smem["barrier"])
            keys, queries = smem["key"], smem["query"]
            if plan.widen:
                keys, queries = smem["wide_key"], smem["wide_query"]
                _widen(smem["key"], keys)
                _widen(smem["query"], queries)
                plgpu.commit_smem()

            def visit(t):
                """What a step needs at once; read a step early so that none starts with waits."""
                node, kept, gates = smem["walk"][0, t], smem["walk"], smem["gates"]
                head = h % GROUP
                return node, kept[1, t], kept[2, t], gates[0, node, head], gates[1, node, head]

            def restart(slot, R):
                def again(_):
                    if export:  # nodes of the paths before may be written again
                        plgpu.wait_smem_to_gmem(0)
                    return load(R_r.at[layer, b, h, rows], WG)

                return lax.cond(slot == RESTART, again, lambda R: R, R)

            def step(t, carry):
                R, (node, slot, keep, alpha, beta) = carry
                following = visit(jnp.minimum(t + 1, steps - 1))
                R = restart(slot, R) if restarts else stack.load(slot, R)
                key = load(keys.at[node], COLS).astype(jnp.float32)
                value = load(smem["value"].at[node], ROWS).astype(jnp.float32)
                R = advance(R, key, value, alpha, beta)
                o = read(R, load(queries.at[node], COLS).astype(jnp.float32))
                stack.save(keep, R)
                out_r[b, node, h, rows] = o
                if export:
                    _export(smem["ring"].at[t % 2], states_r.at[b, node, h, rows], R)
                return R, following

            lax.fori_loop(0, size, step, (R, visit(0)))
            if export:
                plgpu.wait_smem_to_gmem(0)

    scratch: dict[str, Any] = {name: plgpu.SMEM(*array) for name, array in plan.arrays.items()}
    if export:
        scratch["ring"] = swizzled(*plan.arrays["ring"], columns=key_dim)
    scratch["barrier"] = plgpu.Barrier(num_arrivals=5 + 3 * len(pieces))
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(batch, value_heads, value_dim // TILE),
        grid_names=("b", "h", "v"),
        scratch_types=scratch,
        compiler_params=compiler_params(),
        interpret=interpreter(chosen),
        kernel_name="node_scan" if export else "path_scan",
    )
    tables = (walk.node, walk.load, walk.save, walk.size)
    return kernel(layer, q, k, v, alpha, beta, *tables, R)[: 1 + export]


class _Stack(NamedTuple):
    """The saved states: slots in shared memory, then slots in global memory."""

    shared: Ref
    spill: Ref
    key_dim: int

    def _slots(self):
        count = 0 if self.shared is None else self.shared.shape[0]
        if self.shared is not None:
            yield self.shared.at[:, :, pl.ds(0, self.key_dim)], 0, count
        if self.spill is not None:
            yield self.spill, count, count + self.spill.shape[0]

    def load(self, slot: jax.Array, R: jax.Array) -> jax.Array:
        """The state in ``slot``, or R where slot is -1."""
        for ref, low, high in self._slots():
            inside = (slot >= low) & (slot < high)

            def fetch(_, ref=ref, low=low):
                return load(ref.at[slot - low], WG)

            R = lax.cond(inside, fetch, lambda R: R, R)
        return R

    def save(self, slot: jax.Array, R: jax.Array) -> None:
        """Keep R in ``slot``; nothing where slot is -1."""
        for ref, low, high in self._slots():

            @pl.when((slot >= low) & (slot < high))
            def _(ref=ref, low=low):
                ref[slot - low] = R


def _widen(narrow: Ref, wide: Ref) -> None:
    """Copy bfloat16 rows to float32, eight rows at a time over all threads."""
    rows, columns = narrow.shape
    layout = plgpu.Layout.WG_STRIDED((8, columns), vec_size=math.gcd(8, columns // 16))

    def some(i, _):
        at = pl.ds(8 * i, 8)
        wide[at] = load(narrow.at[at], layout).astype(jnp.float32)
        return _

    lax.fori_loop(0, rows // 8, some, 0)


def _export(buffer: Ref, target: Ref, R: jax.Array) -> None:
    """Start copying R to global memory, once the copy before the last has left its buffer."""
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    buffer[...] = R
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)
