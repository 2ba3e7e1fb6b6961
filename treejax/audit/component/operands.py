"""Operands and trees of the component audit: drawn by NumPy from seeds, without a model.

An *instance* is one recurrent layer of one sequence, with a state and operands of its own. Layers
are an axis of the states and sequences another, so that an instance that reads its neighbour's
numbers is as visible as one that reads its own wrongly.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from treejax.delta_rule import Operands
from treejax.drafters.topologies import NAMED, Hydra
from treejax.layers import decays
from treejax.tree import Tree

_TREE = Hydra(*NAMED["hydra27"])
HYDRA = _TREE.parents
"""Parents of LumoTree's 28 active rows."""
MASKED = (_TREE.rescue_rows(1)[-1], 28, 29, 30)
"""Parents of its four masked rows, behind the active ones: what the rescue chain below the root's
second runner-up would be beyond its two tokens. Its 32 rows have them in between; treejax packs
active rows first."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one audited program.

    Attributes:
      layers, batch: their product is the number of instances.
      rows: capacity of the trees. depth: their static bound on it.
    """

    layers: int = 4
    batch: int = 12
    key_heads: int = 3
    value_heads: int = 6
    key_dim: int = 64
    value_dim: int = 64
    rows: int = 32
    depth: int = 11

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads do not share {self.key_heads} key heads evenly"
            )

    @property
    def instances(self) -> int:
        return self.layers * self.batch

    def __str__(self) -> str:
        return (
            f"{self.layers}x{self.batch} instances, {self.value_heads}/{self.key_heads} heads x "
            f"{self.value_dim} x {self.key_dim}, {self.rows} rows"
        )


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Operands [L, B, N, heads, ...] of every instance, float32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    def layers(self) -> tuple[Operands, ...]:
        """What policies take: one of [B, N, ...] a layer, on the device."""
        every = dataclasses.astuple(self)
        return tuple(Operands(*(jnp.asarray(x[i]) for x in every)) for i in range(len(self.q)))


def draw(shape: Shape, seed: Sequence[int]) -> Drawn:
    """Operands of all instances, inactive rows included; another seed is another set.

    Even sequences have the decays of a trained Gated DeltaNet at its initialisation (A uniform in
    1..16, time steps log-uniform in 1e-3..0.1) and unrelated keys. Odd ones are the hard case of
    the delta rule: keys that overlap, strong writes, hardly any decay, so that no error is
    forgotten.
    """
    rng = np.random.default_rng(list(seed))
    lead, heads = (shape.layers, shape.batch, shape.rows), shape.value_heads
    hard = (np.arange(shape.batch) % 2 == 1)[None, :, None, None]
    keys = (shape.key_heads, shape.key_dim)
    k = rng.standard_normal((*lead, *keys))
    shared = rng.standard_normal((shape.layers, shape.batch, 1, *keys))
    k = np.where(hard[..., None], 0.3 * k + 0.7 * shared, k)
    A = rng.uniform(1.0, 16.0, (shape.layers, shape.batch, 1, heads))
    step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), A.shape))
    bias = step + np.log(-np.expm1(-step))  # the inverse of softplus
    g = -A * np.log1p(np.exp(rng.standard_normal((*lead, heads)) + bias))
    logit = 1.5 * rng.standard_normal((*lead, heads)) + np.where(hard, 3.0, 0.0)
    # As the model makes them from a gate's input, on the device under audit.
    alpha, g = jax.jit(decays)(np.where(hard, -1e-3, g).astype(np.float32))
    return Drawn(
        q=(_unit(rng.standard_normal((*lead, *keys))) * shape.key_dim**-0.5).astype(np.float32),
        k=_unit(k).astype(np.float32),
        v=rng.standard_normal((*lead, heads, shape.value_dim)).astype(np.float32),
        g=np.asarray(g),
        alpha=np.asarray(alpha),
        beta=(1.0 / (1.0 + np.exp(-logit))).astype(np.float32),
    )


def draw_states(shape: Shape, seed: Sequence[int]) -> np.ndarray:
    """States [L, B, Hv, dv, dk] float32 before the first step."""
    rng = np.random.default_rng([*seed, 7])
    size = (shape.layers, shape.batch, shape.value_heads, shape.value_dim, shape.key_dim)
    return 0.3 * rng.standard_normal(size, dtype=np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def plant(shape: Shape, parents: Sequence[Sequence[int]]) -> Tree:
    """A tree a sequence; one without rows has no nodes at all."""
    rows = [list(row) or [-1] for row in parents]
    tree = Tree.from_parents([range(len(row)) for row in rows], rows, shape.rows, shape.depth)
    sizes = np.array([len(row) for row in parents], np.int32)
    return tree if sizes.all() else tree.replace(size=jnp.asarray(sizes))


def random_parents(rng: np.random.Generator, size: int, depth: int) -> list[int]:
    """A random tree of ``size`` rows, no node below ``depth``, rows 1.. in a random order."""
    parents, depths = [-1], [0]
    while len(parents) < size:
        open_rows = [row for row, at in enumerate(depths) if at < depth]
        # Half of the nodes continue one of the last rows: deep trees as well as bushy ones.
        above = int(rng.choice(open_rows[-3:] if rng.random() < 0.5 else open_rows))
        parents.append(above)
        depths.append(depths[above] + 1)
    order = [0, *(1 + rng.permutation(size - 1)).tolist()]
    place = {old: new for new, old in enumerate(order)}
    return [-1 if parents[old] < 0 else place[parents[old]] for old in order]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Rows from the root down to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def downwards(parents: Sequence[int]) -> list[int]:
    """Rows in an order in which parents come before their children."""
    return sorted(range(len(parents)), key=lambda row: len(path_to(parents, row)))
