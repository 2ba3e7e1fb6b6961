"""The operands of a cell: caches of some layers filled on the device, and the rows of a tree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.attention.settings import Settings
from pallas_kernels.bench.trees import Tree, make_tree
from pallas_kernels.padding import round_up

BEYOND_CACHE = 10**9
"""Bytes that a call reads at least, so that nothing it reads is in the L2 from the call before."""

MOST_LAYERS = 64
ITEM = 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of the grid. ``tree.capacity`` rows, of which ``tree.size`` take part."""

    batch: int
    context: int
    tree: Tree
    heads: int
    key_heads: int
    width: int
    layers: int

    @property
    def bytes(self) -> int:
        """A layer's floor: keys and values once, queries and own rows in, outputs out."""
        rows = self.context + self.tree.size
        cache = 2 * rows * self.key_heads * self.width
        return ITEM * self.batch * (cache + 2 * self.tree.size * self.heads * self.width)

    @property
    def flops(self) -> int:
        """Of a layer: two products of every row with the context."""
        return 4 * self.batch * self.tree.size * self.heads * self.width * self.context


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays of all layers: q, k, v [L, B, N, ..]; keys, values [L, B, S, Hkv, D]."""

    cell: Cell
    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: jax.Array
    keys: jax.Array
    values: jax.Array
    length: jax.Array


def make_cell(settings: Settings, batch: int, context: int, rows: int) -> Cell:
    cell = Cell(
        batch,
        context,
        _tree(rows),
        settings.heads,
        settings.key_heads,
        settings.width,
        settings.layers or 1,
    )
    if settings.layers is None:
        layers = min(MOST_LAYERS, max(2, -(-BEYOND_CACHE // cell.bytes)))
        cell = dataclasses.replace(cell, layers=layers)
    return cell


def _tree(rows: int) -> Tree:
    if rows in (1, 6):
        return Tree(f"chain of {rows}", tuple(range(-1, rows - 1)), 8)
    return make_tree("hydra27" if rows == 28 else "random64")


def make_case(cell: Cell, seed: int) -> Case:
    """Scores of a few units, so that softmax is neither flat nor one row alone."""
    keys = jax.random.split(jax.random.key(seed), 5)
    own = (cell.layers, cell.batch, cell.tree.capacity)
    # Caches end in a spare row, and in as many more as the kernel asks for.
    capacity = round_up(cell.context + 1, 8)
    cache = cell.layers, cell.batch, capacity, cell.key_heads, cell.width
    mask = np.repeat(cell.tree.ancestors()[None], cell.batch, 0)
    return Case(
        cell=cell,
        q=_normal(keys[0], (*own, cell.heads, cell.width), 2.0),
        k=_normal(keys[1], (*own, cell.key_heads, cell.width), 1.0),
        v=_normal(keys[2], (*own, cell.key_heads, cell.width), 1.0),
        mask=jnp.asarray(mask),
        keys=_filled(keys[3], cache),
        values=_filled(keys[4], cache),
        length=jnp.full(cell.batch, cell.context, jnp.int32),
    )


def _filled(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Layer by layer: the random bits of all at once would take more memory than the cache."""
    cache = jnp.zeros(shape, jnp.bfloat16)
    for layer in range(shape[0]):
        cache = _place(cache, jax.random.fold_in(key, layer), layer)
    return cache


@functools.partial(jax.jit, donate_argnums=0)
def _place(cache: jax.Array, key: jax.Array, layer: int) -> jax.Array:
    return cache.at[layer].set(jax.random.normal(key, cache.shape[1:], jnp.bfloat16))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return jnp.asarray(scale, jnp.bfloat16) * jax.random.normal(key, shape, jnp.bfloat16)
