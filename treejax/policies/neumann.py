"""Neumann: the WY system iterated as often as the tree is deep; the state rebuilt as ``wy`` does.

In a tree of depth D the strict system L has L^(D+1) = 0, so the Neumann sum of (I + L)^-1 ends
(Bole). It is summed in Horner's form, D turns of U <- rhs - L U, which stays at the error of the
recurrence; powers of L, which lose everything for alike keys (design section 3), are never formed.
Nothing depends on the order of the rows.

The iteration has no kernel: under "mosaic_gpu" and "interpret" the scan is plain JAX too, and
publishing runs on the kernel ``wy_commit``.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.policies.base import Path, Scanned, by_sequence
from treejax.policies.wy import WY, Factors, product_precision, solve_tree
from treejax.shapes import Array
from treejax.tree import Topology


@dataclasses.dataclass(frozen=True)
class Neumann:
    """The neumann policy.

    Attributes:
      precision: of the products, the iteration's too: "ieee" is float32; "bf16x3" and "tf32" are
        for GPUs.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".
    """

    name: ClassVar[str] = "neumann"
    precision: str = "ieee"
    implementation: str = "xla"

    def __post_init__(self):
        _ = self._rebuilds  # checks the precision

    @property
    def _rebuilds(self) -> WY:
        return WY(self.precision, self.implementation)

    def init(self, R: Array, key_heads: int) -> Array:
        return R

    def plan(self, topology: Topology) -> Topology:
        return topology

    def scan(self, carry: Array, layer: int, operands: Operands, plan: Topology) -> Scanned:
        precision, turns = product_precision(self.precision), plan.depth.max()
        # Kernels take bfloat16 rows and multiply them exactly; plain products would round.
        operands = jax.tree.map(lambda x: x.astype(jnp.float32), operands)

        def solve(L: Array, right: Array) -> Array:
            return iterate(L, right, turns, precision)

        one_tree = by_sequence(lambda R, o, tree: solve_tree(R, o, tree, precision, solve))
        out, u, G = one_tree(carry[layer], operands, plan)
        decay = G if self.implementation == "xla" else operands.g
        return Scanned(out, Factors(u, operands.k, decay), carry)

    def commit(self, carry: Array, scratch: Sequence[Factors], path: Path) -> Array:
        return self._rebuilds.commit(carry, scratch, path)

    def read(self, carry: Array) -> Array:
        return carry

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        return self._rebuilds.buffers(config, capacity, batch)


def iterate(L: Array, right: Array, turns: Array, precision: lax.PrecisionLike) -> Array:
    """(I + L)^-1 right, L [Hv, N, N] and right [Hv, N, dv]: at depth d after d turns.

    The turns [] are data, the depth of the batch's deepest tree: one trip count for all sequences.
    """

    def turn(_: Array, u: Array) -> Array:
        return right - jnp.einsum("hij,hjv->hiv", L, u, precision=precision)

    return lax.fori_loop(0, turns, turn, right)
