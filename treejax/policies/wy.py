"""WY: one ancestor-masked triangular solve a layer; the state is rebuilt from pseudo-values.

TreeWY's form of the rule (design section 3): (I + L) U = rhs over all nodes at once, outputs and
the accepted state from U. Nothing is stored per node but its pseudo-value, its key and its
cumulative decay. Products and the solve are IEEE float32 on every device.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.config import ModelConfig
from treejax.delta_rule import HIGHEST, Operands, value_heads
from treejax.policies.base import Path
from treejax.shapes import Array
from treejax.tree import Topology


class Factors(struct.PyTreeNode):
    """What the solve leaves: pseudo-values u [N, Hv, dv], k [N, Hk, dk], cumulative log decay
    G [N, Hv]."""

    u: Array
    k: Array
    G: Array


@dataclasses.dataclass(frozen=True)
class WY:
    """The wy policy; it has no settings yet."""

    name: ClassVar[str] = "wy"
    commit_together: ClassVar[bool] = True

    def init(self, R: Array) -> Array:
        return R

    def scan(self, carry: Array, operands: Operands, topology: Topology) -> tuple[Array, Factors]:
        count, heads = operands.v.shape[:2]
        q, k = value_heads(operands.q, heads), value_heads(operands.k, heads)
        v, g, beta = operands.v, operands.g, operands.beta
        related = topology.ancestors[:, :, None]

        G = jnp.einsum("ij,jh->ih", topology.ancestors.astype(jnp.float32), g, precision=HIGHEST)
        # The difference is masked before exp: exp of a positive difference overflows.
        difference = jnp.where(related, G[:, None, :] - G[None, :, :], -jnp.inf)
        decay = jnp.moveaxis(jnp.exp(difference), 2, 0)  # [Hv, N, N]
        kk = jnp.einsum("ihk,jhk->hij", k, k, precision=HIGHEST)
        strict = ~jnp.eye(count, dtype=bool)
        L = jnp.where(strict[None], beta.T[:, :, None] * kk * decay, 0.0)

        grown = jnp.exp(G)[:, :, None]
        predicted = jnp.einsum("ihk,hvk->ihv", k, carry, precision=HIGHEST)
        right = beta[:, :, None] * (v - grown * predicted)
        u = _solve(L, jnp.moveaxis(right, 0, 1), topology.order)
        inner = jnp.einsum("ihk,jhk->hij", q, k, precision=HIGHEST) * decay
        out = grown * jnp.einsum("ihk,hvk->ihv", q, carry, precision=HIGHEST)
        out = out + jnp.einsum("hij,hjv->ihv", inner, u, precision=HIGHEST)
        return out, Factors(u=jnp.moveaxis(u, 1, 0), k=operands.k, G=G)

    def commit(self, carry: Array, scratch: Factors, path: Path) -> Array:
        last = jnp.maximum(path.nodes[jnp.maximum(path.length - 1, 0)], 0)
        on_path = (path.nodes[:, None] == jnp.arange(scratch.G.shape[0])[None, :]).any(axis=0)
        G = scratch.G[last]
        weight = jnp.exp(jnp.where(on_path[:, None], G[None, :] - scratch.G, -jnp.inf))  # [N, Hv]
        k = value_heads(scratch.k, carry.shape[0])
        written = jnp.einsum("jhv,jhk->hvk", scratch.u * weight[:, :, None], k, precision=HIGHEST)
        return jnp.where(path.length > 0, jnp.exp(G)[:, None, None] * carry + written, carry)

    def read(self, carry: Array) -> Array:
        return carry

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        layers, heads = len(config.linear_layers), config.linear_num_value_heads
        rows = batch * layers * capacity
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        return {
            "pseudo_values": 4 * rows * heads * config.linear_value_head_dim,
            "keys": 4 * rows * keys,
            "decays": 4 * rows * heads,
        }


def _solve(L: Array, right: Array, order: Array) -> Array:
    """(I + L)^-1 right by forward substitution: L [Hv, N, N] and right [Hv, N, dv] in any packing.

    In topological order the system is lower triangular. Rows are moved by products with the
    permutation matrix, which are exact; on a CPU a gather of rows costs ten times as much.
    """
    permute = (order[:, None] == jnp.arange(order.shape[0])[None, :]).astype(L.dtype)
    lower = jnp.einsum("ri,hij,sj->hrs", permute, L, permute, precision=HIGHEST)
    moved = jnp.einsum("ri,hiv->hrv", permute, right, precision=HIGHEST)
    u = lax.linalg.triangular_solve(lower, moved, left_side=True, lower=True, unit_diagonal=True)
    return jnp.einsum("ri,hrv->hiv", permute, u, precision=HIGHEST)
