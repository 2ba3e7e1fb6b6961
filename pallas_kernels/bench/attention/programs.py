"""What is timed in a cell: the kernel over all layers, and attention as JAX offers it otherwise.

A peer gets every layer's cache as an array of its own, so that nothing is sliced; cuDNN also gets
the block's rows behind the cached ones, written before the clock starts, and one mask for both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.attention.cases import Case
from pallas_kernels.tree_attention import tree_attention

KERNEL, XLA, CUDNN = "tree_attention", "xla attention", "cudnn attention"

Step = Callable[[Any, Any], tuple[Any, None]]


def kernel_program(case: Case, implementation: str) -> tuple[Step, Any]:
    """All layers read the one pool of caches, as a model's do."""
    call = jax.jit(partial(tree_attention, implementation=implementation))

    def step(pool: Any, operands: Any) -> tuple[Any, None]:
        layers, mask, length = operands
        outputs = [
            call(q, k, v, mask, *pool, jnp.int32(i), length) for i, (q, k, v) in enumerate(layers)
        ]
        return tuple(outputs), None

    return step, (_layers(case.q, case.k, case.v), case.mask, case.length)


def xla_program(case: Case) -> tuple[Step, Any]:
    """The reference of the kernel: two products with the cache, as ``treejax.layers`` has them."""
    call = jax.jit(partial(tree_attention, implementation="xla"))

    def step(_: Any, operands: Any) -> tuple[Any, None]:
        layers, mask, length = operands
        outputs = [
            call(q, k, v, mask, keys[None], values[None], jnp.int32(0), length)
            for q, k, v, keys, values in layers
        ]
        return tuple(outputs), None

    operands = _layers(case.q, case.k, case.v, case.keys, case.values)
    return step, (operands, case.mask, case.length)


def cudnn_program(case: Case) -> tuple[Step, Any]:
    call = jax.jit(partial(jax.nn.dot_product_attention, implementation="cudnn"))
    cell = case.cell

    @jax.jit
    def joined(cache: jax.Array, own: jax.Array) -> jax.Array:
        return jnp.concatenate([cache[:, : cell.context], own], axis=1)

    def step(_: Any, operands: Any) -> tuple[Any, None]:
        layers, mask = operands
        return tuple(call(q, keys, values, mask=mask) for q, keys, values in layers), None

    layers = []
    for q, k, v, keys, values in _layers(case.q, case.k, case.v, case.keys, case.values):
        layers.append((q, joined(keys, k), joined(values, v)))
    # Rows that take no part would have no key at all: they see the cache.
    cached = jnp.ones((cell.batch, cell.tree.capacity, cell.context), bool)
    mask = jnp.concatenate([cached, case.mask], axis=2)[:, None]
    return step, (tuple(layers), mask)


def _layers(*arrays: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
    """The arrays of each layer, copied out of those of all."""
    return tuple(tuple(_layer(x, i) for x in arrays) for i in range(arrays[0].shape[0]))


@jax.jit
def _layer(stacked: jax.Array, layer: int) -> jax.Array:
    return stacked[layer]
