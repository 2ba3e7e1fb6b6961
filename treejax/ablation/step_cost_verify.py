"""Verify with one integration change undone: the product's forward with another ``Mixing``.

Each layer's own derivation depends on that layer's rows through a barrier, or the compiler would
see that all of them are the same and keep one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treejax import layers
from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.model import Mixing, Output, forward
from treejax.policies import Path, Policy, kernel_rows
from treejax.shapes import Array
from treejax.state import State
from treejax.steps import verify as product
from treejax.steps.publish import publish_path
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch
from treejax.tree import Topology, Tree, describe, sort_rows

CHANGES = ("slots", "taps", "attention")


def verify_changed(
    off: str, config: ModelConfig, params: layers.Params, state: State, tree: Tree
) -> tuple[Output, Scratch]:
    """``steps.verify.verify_trees`` with one of ``CHANGES`` undone."""
    wide = tree if state.policy.implementation == "xla" else tree.pad(kernel_rows(tree.capacity))
    topology, place = describe(wide), None
    tokens = wide.tokens
    if off == "slots":
        mixing = Unsorted(state, topology)
        hooks, carry = Mixing(mixing.operands, mixing.delta, mixing.attend), lambda: mixing.carry
    else:
        if wide is not tree:
            tokens = jnp.take_along_axis(tokens, topology.order, axis=1)
            topology, place = jax.vmap(sort_rows)(topology)
            place = place[:, : tree.capacity]
        hooks, carry = product._tree_mixing(state, topology)
        if off == "taps":
            hooks = hooks._replace(operands=windows_by_layer(state, topology))
        else:
            hooks = hooks._replace(attend=product._plain_attention(state, topology))
    positions = state.length[:, None] + topology.depth
    hidden, records = forward(config, params, layers.embed(params, tokens), positions, hooks)
    if place is not None:
        hidden = jnp.take_along_axis(hidden, place[:, :, None], axis=1)
    hidden = hidden[:, : tree.capacity]
    kept = map(tuple, (records.delta, records.conv, records.keys, records.values))
    scratch = Scratch(
        *(carry(), *kept),
        tree=tree,
        length=state.length,
        place=place,
        policy=state.policy,
    )
    return Output(layers.logits(params, hidden), hidden), scratch


def windows_by_layer(state: State, topology: Topology) -> Any:
    """``Mixing.operands`` that derives its windows in every layer."""

    def operands(
        i: int, config: ModelConfig, p: layers.Params, made: layers.Projections
    ) -> Operands:
        own, _ = lax.optimization_barrier((topology, p["A_log"]))  # of this layer alone
        return product._tree_mixing(state, own)[0].operands(i, config, p, made)

    return operands


def attention_acts(state: State, tree: Tree) -> bool:
    """Whether the product attends by kernels here; shapes are enough."""
    config, dtype = state.config, state.keys.dtype
    shape = tree.tokens.shape[0], kernel_rows(tree.capacity)
    q = jax.ShapeDtypeStruct((*shape, config.num_attention_heads, config.head_dim), dtype)
    k = jax.ShapeDtypeStruct((*shape, config.num_key_value_heads, config.head_dim), dtype)
    seen: list[str] = []  # what they close over is not traced

    def trace(state: State, tree: Tree) -> None:
        topology = describe(tree.pad(shape[1]))
        own = product._tree_mixing(state, topology)[0].attend
        for attend in (
            own,
            product._plain_attention(state, topology),
        ):
            seen.append(str(jax.make_jaxpr(functools.partial(attend, 0))(q, k, k)))

    jax.eval_shape(trace, state, tree)
    return seen[0] != seen[1]


class Unsorted:
    """Mixing in the rows that the drafter packed: every consumer of every layer derives its own
    order, moves its rows there and back, and sorts nothing for anyone else."""

    def __init__(self, state: State, topology: Topology):
        self.state, self.topology = state, topology
        self.carry = state.recurrent

    def operands(
        self, i: int, config: ModelConfig, p: layers.Params, made: layers.Projections
    ) -> Operands:
        """In sorted rows, which is where the scan of the same layer wants them."""
        mixing, order, _ = self._own(p["A_log"])
        moved = jax.tree.map(lambda x: _move(x, order), made)
        return mixing.operands(i, config, p, moved)

    def delta(self, i: int, operands: Operands) -> tuple[Array, Any]:
        own, _ = lax.optimization_barrier((self.topology, operands.beta))
        sorted_topology, place = jax.vmap(sort_rows)(own)
        state = self.state.replace(recurrent=self.carry)
        mixing, carry = product._tree_mixing(state, sorted_topology)
        outputs, scratch = mixing.delta(i, operands)
        self.carry = carry()
        return _move(outputs, place), scratch

    def attend(self, i: int, q: Array, k: Array, v: Array) -> Array:
        mixing, order, place = self._own(q)
        return _move(mixing.attend(i, *(_move(x, order) for x in (q, k, v))), place)

    def _own(self, tie: Array) -> tuple[Mixing, Array, Array]:
        """A mixing over sorted rows, and the orders there and back; ``tie``: what only one layer
        has, or the compiler would sort once for all."""
        own, _ = lax.optimization_barrier((self.topology, tie))
        sorted_topology, place = jax.vmap(sort_rows)(own)
        return product._tree_mixing(self.state, sorted_topology)[0], own.order, place


def _move(x: Array, order: Array) -> Array:
    """Rows [B, N, ...] in an order [B, N]."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)


def publish_unsorted(state: State, scratch: Scratch, choice: Choice) -> State:
    """``publish_path`` after ``Unsorted``: factors lie in sorted rows, all else as packed."""
    tree = scratch.tree
    policy: Policy = state.policy
    if policy.implementation != "xla":
        tree = tree.pad(kernel_rows(tree.capacity))
    _, place = jax.vmap(sort_rows)(describe(tree))
    rows = jnp.take_along_axis(place, jnp.maximum(choice.path, 0), axis=1)
    path = Path(jnp.where(choice.path >= 0, rows, -1), choice.length)
    carry = policy.commit(scratch.carry, scratch.recurrent, path)
    made = publish_path(state, scratch.replace(recurrent=(), place=None), choice)
    return made.replace(recurrent=carry)
