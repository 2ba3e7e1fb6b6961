"""Operands on the device: distinct layers spread from a few that NumPy draws, and pools of states.

Layer i is a base layer with its key heads, and with them its value heads, moved round: cheap on the
device, and every layer differs. One set for the largest batch and capacity serves all smaller ones.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import operands as drawing
from pallas_kernels.bench.cases import base_count
from treejax.config import LINEAR, ModelConfig
from treejax.delta_rule import Operands

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Recurrent layers of a model, and what their operands are.

    Attributes:
      dtype: of q, k and v. Plain JAX ("xla") takes float32 alone: there the values are rounded to
        this dtype and held as float32.
      operands: "realistic" or "correlated".
    """

    layers: int = 48
    value_heads: int = 48
    key_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    operands: str = "realistic"

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of: {', '.join(DTYPES)}")
        if self.operands not in drawing.KINDS:
            known = ", ".join(drawing.KINDS)
            raise ValueError(f"operands {self.operands!r} are unknown, expected one of: {known}")

    @property
    def config(self) -> ModelConfig:
        """A model of nothing but these layers: what policies count their buffers from."""
        return ModelConfig(
            family="qwen3_5",
            vocab_size=1,
            hidden_size=1,
            layer_types=(LINEAR,) * self.layers,
            intermediate_size=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=1,
            linear_num_key_heads=self.key_heads,
            linear_num_value_heads=self.value_heads,
            linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim,
        )

    @property
    def state_bytes(self) -> int:
        """One state of one layer and sequence, float32."""
        return 4 * self.value_heads * self.value_dim * self.key_dim

    def item_bytes(self, implementation: str) -> int:
        """Of a number of q, k and v as the device holds them."""
        return 2 if self.dtype == "bfloat16" and implementation != "xla" else 4

    def operand_bytes(self, batch: int, rows: int, implementation: str) -> int:
        """q, k, v and gates of all layers, as the device holds them."""
        item = self.item_bytes(implementation)
        width = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return self.layers * batch * rows * (width * item + 3 * 4 * self.value_heads)

    @property
    def probed_layers(self) -> list[int]:
        """Layers that the gate compares: first, middle, last."""
        return sorted({0, self.layers // 2, self.layers - 1})

    @property
    def probed_keys(self) -> list[int]:
        """Key heads whose value heads the gate compares: the first and the last."""
        return sorted({0, self.key_heads - 1})

    def output_bytes(self, batch: int, rows: int) -> int:
        return 4 * self.layers * batch * rows * self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Operands of all layers [B, N, ...] and the states R [L, B, Hv, dv, dk] before the first."""

    sizes: Sizes
    layers: tuple[Operands, ...]
    R: jax.Array

    def cut(self, batch: int, rows: int) -> "Drawn":
        """The first sequences and rows of the same operands."""
        if (self.R.shape[1], self.layers[0].g.shape[1]) == (batch, rows):
            return self
        layers = tuple(_cut(layer, batch, rows) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, R=_cut_states(self.R, batch))


def draw(sizes: Sizes, batch: int, rows: int, seed: int, implementation: str) -> Drawn:
    """Operands from the seed, on the device."""
    shape = drawing.Shape(
        batch, rows, sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim
    )
    held = jnp.dtype("float32" if implementation == "xla" else sizes.dtype)
    count = base_count(sizes.key_heads, sizes.layers)
    bases = [_base(shape, sizes, seed + base, held) for base in range(count)]
    ratio = sizes.value_heads // sizes.key_heads
    layers = tuple(_moved(bases[i % count], i // count, ratio=ratio) for i in range(sizes.layers))
    states = [jnp.asarray(drawing.make_state(shape, 1, seed + base)[0]) for base in range(count)]
    R = jnp.zeros((sizes.layers, *states[0].shape), jnp.float32)
    for i in range(sizes.layers):
        R = _place(R, states[i % count], i, i // count * ratio)
    return Drawn(sizes, layers, R)


def _base(shape: drawing.Shape, sizes: Sizes, seed: int, held: jnp.dtype) -> Operands:
    drawn = drawing.make_operands(shape, sizes.operands, seed)
    wide = (jnp.asarray(x.astype(np.float32), sizes.dtype) for x in (drawn.q, drawn.k, drawn.v))
    q, k, v = (x.astype(held) for x in wide)
    g, beta = (jnp.asarray(x.astype(np.float32)) for x in (drawn.g, drawn.beta))
    return Operands(q, k, v, g, jnp.exp(g), beta)


@functools.partial(jax.jit, static_argnames="ratio")
def _moved(base: Operands, shift: jax.Array, ratio: int) -> Operands:
    def keys(x: jax.Array) -> jax.Array:
        return jnp.roll(x, shift, axis=2)

    def values(x: jax.Array) -> jax.Array:
        return jnp.roll(x, shift * ratio, axis=2)

    b = base
    return Operands(keys(b.q), keys(b.k), *map(values, (b.v, b.g, b.alpha, b.beta)))


@functools.partial(jax.jit, donate_argnums=0)
def _place(R: jax.Array, base: jax.Array, layer: jax.Array, shift: jax.Array) -> jax.Array:
    return R.at[layer].set(jnp.roll(base, shift, axis=1))


@functools.partial(jax.jit, static_argnames=("batch", "rows"))
def _cut(layer: Operands, batch: int, rows: int) -> Operands:
    return jax.tree.map(lambda x: x[:batch, :rows], layer)


@functools.partial(jax.jit, static_argnames="batch")
def _cut_states(R: jax.Array, batch: int) -> jax.Array:
    return R[:, :batch]


def rows_of(layer: Operands, row: int, count: int, heads: Sequence[int]) -> tuple[np.ndarray, ...]:
    """q, k, v, g, beta of one sequence's first rows in float64, for some key heads.

    The value heads that belong to them come along, in order.
    """
    keys = np.asarray(heads)
    ratio = layer.v.shape[2] // layer.k.shape[2]
    values = value_heads_of(heads, ratio)

    def pick(x: jax.Array, which: np.ndarray) -> np.ndarray:
        return np.asarray(x[row])[:count, which].astype(np.float64)

    q, k = pick(layer.q, keys), pick(layer.k, keys)
    return q, k, *(pick(x, values) for x in (layer.v, layer.g, layer.beta))


def value_heads_of(heads: Sequence[int], ratio: int) -> np.ndarray:
    """Value heads of some key heads."""
    return np.concatenate([np.arange(head * ratio, (head + 1) * ratio) for head in heads])
