"""What a state policy is: how a recurrent layer verifies a tree and how its state becomes durable.

A policy is a frozen dataclass of settings with pure functions over a *carry*, what it keeps between
steps. They take whole batches, the carry of all layers and the index of a layer, because that is
what kernels take: the pool of states is never sliced. Each policy has two implementations of the
same functions: plain JAX ("xla"), written for one sequence and mapped with ``vmap``, and the
kernels of ``pallas_kernels``, which are imported when they are first traced.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.shapes import Array
from treejax.tree import Topology


class Path(struct.PyTreeNode):
    """Accepted paths: nodes [B, max_depth + 1] int32, -1 padded, and length [B] int32."""

    nodes: Array
    length: Array


class Scanned(NamedTuple):
    """What a scan of one layer gives.

    Attributes:
      outputs: [B, N, Hv, dv] float32.
      scratch: what ``commit`` needs of this layer.
      carry: the one that was given, unless the policy writes while it verifies.
    """

    outputs: Array
    scratch: Any
    carry: Any


class Policy(Protocol):
    """The functions of a policy."""

    name: str

    @property
    def implementation(self) -> str:
        """ "xla", "mosaic_gpu" or "interpret"; "auto" until ``make_policy`` has resolved it."""
        ...

    def init(self, R: Array, key_heads: int) -> Any:
        """Carry from states R [Lg, B, Hv, dv, dk] of a model with Hk key heads; axis 1 of every
        leaf is the batch."""
        ...

    def plan(self, topology: Topology) -> Any:
        """What every layer's scan reads of the trees [B, ...]: derived once a verify."""
        ...

    def scan(self, carry: Any, layer: int, operands: Operands, plan: Any) -> Scanned:
        """One layer, operands [B, N, ...]: outputs [B, N, Hv, dv] float32, and commit's scratch.

        Layers are scanned in order, each with the carry that the one before it returned.
        """
        ...

    def commit(self, carry: Any, scratch: Sequence[Any], path: Path) -> Any:
        """The carry after the paths, from the carry and the scratch that the scans left.

        A path of length 0 leaves its sequence's bytes as they are; where a policy defers
        its writes, the state that they stand for, to rounding.
        """
        ...

    def read(self, carry: Any) -> Array:
        """The states R that a carry stands for."""
        ...

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        """Bytes of each named buffer that verifying a tree of this capacity needs."""
        ...


def over_batch(bound: Array) -> Array:
    """The largest ``bound`` of the batch, the same for every sequence, under ``by_sequence``.

    A loop whose trip count differs by sequence would cost a select over the whole state each turn;
    with the batch's maximum there is one trip count, and rows that are done are masked. The count
    stays data, so no compiler unrolls the loop or merges its body with what surrounds it.
    """
    return lax.pmax(bound, "batch")


def by_sequence[F: Callable[..., Any]](function: F) -> F:
    """A function of one sequence as one of a batch."""
    return jax.vmap(function, axis_name="batch")


def stack(layers: Sequence[Any]) -> Any:
    """Trees of arrays, one a layer, as one tree with a leading layer axis.

    A commit kernel picks the path's rows itself. Gathering them first would move fewer bytes, but
    XLA fuses the gathers of all layers into one kernel that is slower than stacking.
    """
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def kernel_rows(capacity: int) -> int:
    """Rows that kernels give a tree of a capacity, so that none pads its operands by itself."""
    return -(-capacity // 8) * 8


def kernel_problem(config: ModelConfig, capacity: int = 1) -> str | None:
    """Why the kernels cannot serve a model, or trees of a capacity; None if they can."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    widths = config.linear_key_head_dim, config.linear_value_head_dim
    if config.linear_layers and not all(w % 8 == 0 and 8 <= w <= 256 for w in widths):
        return f"the kernels take head widths of 8, 16, .. 256, not {widths[0]} x {widths[1]}"
    if config.linear_layers and values > 8 * keys:
        return f"the kernels take at most 8 value heads a key head, not {values // keys}"
    if capacity > 128:
        return f"the kernels take trees of at most 128 rows, not {capacity}"
    return None


def state_bytes(config: ModelConfig) -> int:
    """Bytes of one recurrent state R of one layer and sequence, float32."""
    heads = config.linear_num_value_heads
    return 4 * heads * config.linear_value_head_dim * config.linear_key_head_dim


def operand_bytes(config: ModelConfig) -> int:
    """Bytes of one node's recorded operands (k, v, alpha, beta) in one layer, float32."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads = config.linear_num_value_heads
    return 4 * (keys + heads * config.linear_value_head_dim + 2 * heads)
