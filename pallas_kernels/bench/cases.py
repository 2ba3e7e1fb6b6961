"""Operands on the device: a pool of states, distinct layers, and the tables of the tree.

NumPy makes a few base layers from the seed; the other layers are those with their key heads (and
with them their value heads) moved round, which is cheap on the device and makes every layer differ.
All sequences of a batch have the same tree and operands of their own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.operands import Shape, make_operands, make_state
from pallas_kernels.bench.settings import Settings
from pallas_kernels.bench.traffic import CONV_WIDTH
from pallas_kernels.bench.trees import Tree
from pallas_kernels.padding import round_up
from pallas_kernels.wy_solve.sizes import PATH_BLOCK

BASES = 4
"""Layers drawn by NumPy, unless the heads are too few to make all others from them."""


class Layer(NamedTuple):
    """Operands of one layer, or of all with a leading axis."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    alpha: jax.Array
    beta: jax.Array


class Factors(NamedTuple):
    """What an earlier step left to commit: arbitrary pseudo-values, keys and decays of a path."""

    k: jax.Array
    u: jax.Array
    g: jax.Array


class Conv(NamedTuple):
    """Arguments of ``tree_conv`` for one layer; the history of all layers is apart."""

    inputs: jax.Array
    taps: jax.Array
    a: jax.Array
    b: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that the programs of one batch size read.

    Attributes:
      pool: [L, B, Hv, dv, dk] states; nothing writes it, publishing programs get a copy.
      stacked: operands of all layers [L, B, N, ...].
      layers: the same, one layer each, so that no program slices.
      u: [L, B, N, Hv, dv] pseudo-values to commit, arbitrary.
      factors: [L, B, P, ...]: the published path's rows of k, u and g, P a multiple of 16.
      nodes: [B, P] the published path, -1 padded; ``length`` [B].
    """

    settings: Settings
    tree: Tree
    batch: int
    pool: jax.Array
    stacked: Layer
    layers: tuple[Layer, ...]
    u: jax.Array
    factors: Factors
    parent: jax.Array
    size: jax.Array
    ancestors: jax.Array
    nodes: jax.Array
    length: jax.Array

    @functools.cached_property
    def conv(self) -> tuple[tuple[Conv, ...], jax.Array, jax.Array]:
        """Layers, history [L, B, K-1, C] and rows [B, N, K]; made when first asked for."""
        return _make_conv(self)


def make_case(settings: Settings, batch: int, tree: Tree, layers: int, kind: str) -> Case:
    """A case with the settings' heads, widths, dtype and seed."""
    shape = Shape(
        batch,
        tree.capacity,
        settings.key_heads,
        settings.value_heads,
        settings.key_dim,
        settings.value_dim,
    )
    bases = base_count(settings.key_heads, layers)
    dtype = jnp.dtype(settings.dtype)
    drawn = [_to_device(shape, kind, settings.seed + base, dtype) for base in range(bases)]
    shifts = [layer // bases for layer in range(layers)]
    ratio = settings.ratio
    stacked = Layer(
        *(
            _spread([each[field] for each in drawn], shifts, axis=2, step=1 if keys else ratio)
            for field, keys in enumerate((True, True, False, False, False, False))
        )
    )
    states = [jnp.asarray(make_state(shape, 1, settings.seed + base)[0]) for base in range(bases)]
    pool = _spread(states, shifts, axis=1, step=ratio)
    u = _pseudo_values(stacked.v)
    path = tree.published
    nodes = np.full((batch, tree.bound), -1, np.int32)
    nodes[:, : len(path)] = path
    padded = np.zeros(round_up(tree.bound, PATH_BLOCK), np.int32)  # a length that costs no copy
    padded[: len(path)] = path
    rows = jnp.asarray(padded)
    return Case(
        settings=settings,
        tree=tree,
        batch=batch,
        pool=pool,
        stacked=stacked,
        layers=tuple(Layer(*(_layer(x, i) for x in stacked)) for i in range(layers)),
        u=u,
        factors=Factors(*(_rows(x, rows) for x in (stacked.k, u, stacked.g))),
        parent=_tile(tree.padded_parents(), batch),
        size=jnp.full(batch, tree.size, jnp.int32),
        ancestors=_tile(tree.ancestors(), batch),
        nodes=jnp.asarray(nodes),
        length=jnp.full(batch, len(path), jnp.int32),
    )


def base_count(heads: int, layers: int) -> int:
    """Base layers to draw: each serves once for every way to move its key heads round."""
    return max(min(BASES, layers), -(-layers // heads))


def _to_device(shape: Shape, kind: str, seed: int, dtype: jnp.dtype) -> Layer:
    drawn = make_operands(shape, kind, seed)
    q, k, v = (jnp.asarray(x.astype(np.float32), dtype) for x in (drawn.q, drawn.k, drawn.v))
    g, beta = (jnp.asarray(x, jnp.float32) for x in (drawn.g, drawn.beta))
    return Layer(q, k, v, g, jnp.exp(g), beta)


def _spread(bases: Sequence[jax.Array], shifts: Sequence[int], axis: int, step: int) -> jax.Array:
    """[L, ...]: layer i is base i % len(bases), moved round by ``shifts[i] * step`` along axis."""
    whole = jnp.zeros((len(shifts), *bases[0].shape), bases[0].dtype)
    for layer, shift in enumerate(shifts):
        whole = _place(whole, bases[layer % len(bases)], layer, shift * step, axis)
    return whole


@functools.partial(jax.jit, donate_argnums=0, static_argnums=4)
def _place(whole: jax.Array, base: jax.Array, layer: int, shift: int, axis: int) -> jax.Array:
    return whole.at[layer].set(jnp.roll(base, shift, axis))


@jax.jit
def _layer(stacked: jax.Array, layer: int) -> jax.Array:
    return stacked[layer]


@jax.jit
def _rows(stacked: jax.Array, rows: jax.Array) -> jax.Array:
    return stacked[:, :, rows]


@jax.jit
def _pseudo_values(v: jax.Array) -> jax.Array:
    return 0.5 * v.astype(jnp.float32)


def _tile(x: np.ndarray, batch: int) -> jax.Array:
    return jnp.asarray(np.repeat(x[None], batch, 0))


def conv_rows(tree: Tree) -> np.ndarray:
    """[N, K]: rows of concat(history, inputs) under each node's taps, oldest first."""
    rows = np.zeros((tree.capacity, CONV_WIDTH), np.int32)
    for node in range(tree.size):
        path = [CONV_WIDTH - 1 + row for row in tree.path_to(node)]
        rows[node] = [*range(CONV_WIDTH - 1), *path][-CONV_WIDTH:]
    return rows


def _make_conv(case: Case) -> tuple[tuple[Conv, ...], jax.Array, jax.Array]:
    settings, layers = case.settings, len(case.layers)
    dtype = jnp.dtype(settings.dtype)
    channels = 2 * settings.key_heads * settings.key_dim
    channels += settings.value_heads * settings.value_dim
    rng = np.random.default_rng([settings.seed, 11])

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    bases = min(BASES, layers)
    step = max(1, channels // layers)
    inputs = [draw(case.batch, case.tree.capacity, channels) for _ in range(bases)]
    history = [draw(case.batch, CONV_WIDTH - 1, channels) for _ in range(bases)]
    move = jax.jit(lambda x, shift: jnp.roll(x, shift, -1))
    gates = (case.batch, case.tree.capacity, settings.value_heads)
    made = []
    for layer in range(layers):
        decay = np.log(rng.uniform(1.0, 16.0, settings.value_heads))
        bias = rng.uniform(-6.0, -2.0, settings.value_heads)
        made.append(
            Conv(
                inputs=move(inputs[layer % bases], layer * step),
                taps=draw(CONV_WIDTH, channels),
                a=draw(*gates),
                b=draw(*gates),
                A_log=jnp.asarray(decay, jnp.float32),
                dt_bias=jnp.asarray(bias, jnp.float32),
            )
        )
    shifts = list(range(layers))
    return tuple(made), _spread(history, shifts, 2, step), _tile(conv_rows(case.tree), case.batch)
