"""WY: one ancestor-masked triangular solve a layer; the state is rebuilt from pseudo-values.

TreeWY's form of the rule (design section 3): (I + L) U = rhs over all nodes at once, outputs and
the accepted state from U. Nothing is stored per node but its pseudo-value, its key and its
cumulative decay. Products and the solve are IEEE float32 on every device unless asked otherwise.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.config import ModelConfig
from treejax.delta_rule import HIGHEST, Operands, value_heads
from treejax.policies.base import Path, Scanned, by_sequence, kernel_rows, stack
from treejax.shapes import Array
from treejax.tree import Topology

PRECISIONS: dict[str, lax.Precision | lax.DotAlgorithmPreset] = {
    "ieee": HIGHEST,
    "bf16x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
}


class Factors(struct.PyTreeNode):
    """What the solve leaves: pseudo-values u [B, N, Hv, dv], k [B, N, Hk, dk], and the log decay
    [B, N, Hv]: summed from the root in "xla", each node's own for the kernel."""

    u: Array
    k: Array
    decay: Array


@dataclasses.dataclass(frozen=True)
class WY:
    """The wy policy.

    Attributes:
      precision: of the products: "ieee" is float32; "bf16x3" and "tf32" are for GPUs.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".
    """

    name: ClassVar[str] = "wy"
    precision: str = "ieee"
    implementation: str = "xla"

    def __post_init__(self):
        check_precision(self.precision)

    def init(self, R: Array, key_heads: int) -> Array:
        return R

    def plan(self, topology: Topology) -> Topology:
        return topology

    def scan(self, carry: Array, layer: int, operands: Operands, plan: Topology) -> Scanned:
        o = operands
        if self.implementation == "xla":
            precision = product_precision(self.precision)
            solve = by_sequence(lambda R, o, topology: solve_tree(R, o, topology, precision))
            out, u, G = solve(carry[layer], o, plan)
            return Scanned(out, Factors(u, o.k, G), carry)
        from pallas_kernels.wy_solve import wy_solve

        rows = o.q, o.k, o.v, o.g, o.beta, plan.ancestors, plan.size
        precision, how = self.precision, self.implementation
        at = jnp.int32(layer)
        out, u = wy_solve(carry, at, *rows, precision=precision, implementation=how)
        return Scanned(out, Factors(u, o.k, o.g), carry)

    def commit(self, carry: Array, scratch: Sequence[Factors], path: Path) -> Array:
        if self.implementation == "xla":
            precision = product_precision(self.precision)
            commit = by_sequence(lambda R, factors, path: rebuild(R, factors, path, precision))
            return jax.vmap(commit, in_axes=(0, 0, None))(carry, stack(scratch), path)
        from pallas_kernels.wy_commit import wy_commit

        rows = stack(scratch)
        factors = rows.k, rows.u, rows.decay
        return wy_commit(
            carry, *factors, path.nodes, path.length, implementation=self.implementation
        )

    def read(self, carry: Array) -> Array:
        return carry

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        layers, heads = len(config.linear_layers), config.linear_num_value_heads
        if self.implementation != "xla":
            capacity = kernel_rows(capacity)
        rows = batch * layers * capacity
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        return {
            "pseudo_values": 4 * rows * heads * config.linear_value_head_dim,
            "keys": 4 * rows * keys,
            "decays": 4 * rows * heads,
        }


def check_precision(name: str) -> None:
    if name not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ValueError(f"precision {name!r} is unknown, expected one of: {known}")


def product_precision(name: str) -> lax.Precision | lax.DotAlgorithmPreset:
    """What XLA's products take; only GPUs know the faster ones."""
    platform = jax.default_backend()
    if name != "ieee" and platform != "gpu":
        raise ValueError(f"precision {name!r} needs a GPU, the device is a {platform}: use 'ieee'")
    return PRECISIONS[name]


def substitute(L: Array, right: Array, order: Array) -> Array:
    """(I + L)^-1 right by forward substitution: L [Hv, N, N] and right [Hv, N, dv] in any packing.

    In topological order the system is lower triangular. Rows are moved by products with the
    permutation matrix, which are exact; on a CPU a gather of rows costs ten times as much.
    """
    permute = (order[:, None] == jnp.arange(order.shape[0])[None, :]).astype(L.dtype)
    lower = jnp.einsum("ri,hij,sj->hrs", permute, L, permute, precision=HIGHEST)
    moved = jnp.einsum("ri,hiv->hrv", permute, right, precision=HIGHEST)
    u = lax.linalg.triangular_solve(lower, moved, left_side=True, lower=True, unit_diagonal=True)
    return jnp.einsum("ri,hrv->hiv", permute, u, precision=HIGHEST)


def solve_tree(
    R0: Array,
    operands: Operands,
    topology: Topology,
    precision: lax.PrecisionLike,
    solve: Callable[[Array, Array], Array] | None = None,
) -> tuple[Array, Array, Array]:
    """One tree: outputs and pseudo-values [N, Hv, dv], and G [N, Hv], the decays summed.

    ``solve`` maps the strict system L [Hv, N, N] and right sides [Hv, N, dv] to (I + L)^-1 times
    the right sides; by default forward substitution in float32.
    """
    count, heads = operands.v.shape[:2]
    q, k = value_heads(operands.q, heads), value_heads(operands.k, heads)
    v, g, beta = operands.v, operands.g, operands.beta
    related = topology.ancestors[:, :, None]

    G = jnp.einsum("ij,jh->ih", topology.ancestors.astype(jnp.float32), g, precision=HIGHEST)
    # The difference is masked before exp: exp of a positive difference overflows.
    difference = jnp.where(related, G[:, None, :] - G[None, :, :], -jnp.inf)
    decay = jnp.moveaxis(jnp.exp(difference), 2, 0)  # [Hv, N, N]
    kk = jnp.einsum("ihk,jhk->hij", k, k, precision=precision)
    strict = ~jnp.eye(count, dtype=bool)
    L = jnp.where(strict[None], beta.T[:, :, None] * kk * decay, 0.0)

    grown = jnp.exp(G)[:, :, None]
    predicted = jnp.einsum("ihk,hvk->ihv", k, R0, precision=precision)
    right = beta[:, :, None] * (v - grown * predicted)
    solve = solve or (lambda L, right: substitute(L, right, topology.order))
    u = solve(L, jnp.moveaxis(right, 0, 1))
    inner = jnp.einsum("ihk,jhk->hij", q, k, precision=precision) * decay
    out = grown * jnp.einsum("ihk,hvk->ihv", q, R0, precision=precision)
    out = out + jnp.einsum("hij,hjv->ihv", inner, u, precision=precision)
    return out, jnp.moveaxis(u, 1, 0), G


def rebuild(R0: Array, factors: Factors, path: Path, precision: lax.PrecisionLike) -> Array:
    """The state after one path, from the factors of its nodes."""
    last = jnp.maximum(path.nodes[jnp.maximum(path.length - 1, 0)], 0)
    on_path = (path.nodes[:, None] == jnp.arange(factors.decay.shape[0])[None, :]).any(axis=0)
    G = factors.decay[last]
    weight = jnp.exp(jnp.where(on_path[:, None], G[None, :] - factors.decay, -jnp.inf))  # [N, Hv]
    k = value_heads(factors.k, R0.shape[0])
    written = jnp.einsum("jhv,jhk->hvk", factors.u * weight[:, :, None], k, precision=precision)
    return jnp.where(path.length > 0, jnp.exp(G)[:, None, None] * R0 + written, R0)
