"""The compiled programs of one policy at one shape: verify, publish, and both in one step.

A carry is handed round in two parts. ``state`` are its floating point leaves, which are donated, so
that kernels write in place. ``marks`` are the rest, a few integers a sequence, which a caller may
keep: a policy that defers its writes does different work at different marks.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from treejax.delta_rule import Operands
from treejax.policies import Path, Policy
from treejax.shapes import Array
from treejax.tree import Topology, Tree, describe, sort_rows


class Split(NamedTuple):
    """A carry in its two parts, each a tuple of leaves."""

    state: tuple[Array, ...]
    marks: tuple[Array, ...]


class Verified(NamedTuple):
    """Outputs [B, N, Hv, dv] and scratch of every layer, and the carry."""

    outputs: tuple[Array, ...]
    scratch: tuple[Any, ...]
    carry: Split


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions of one policy; shapes come with the arguments.

    Attributes:
      treedef: of the policy's carry; ``floating`` says which leaves are part of ``state``.
    """

    policy: Policy
    treedef: Any
    floating: tuple[bool, ...]

    @classmethod
    def of(cls, policy: Policy, R: jax.ShapeDtypeStruct, key_heads: int) -> "Programs":
        carry = jax.eval_shape(lambda R: policy.init(R, key_heads), R)
        leaves, treedef = jax.tree.flatten(carry)
        kinds = tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in leaves)
        return cls(policy, treedef, kinds)

    def split(self, carry: Any) -> Split:
        pairs = list(zip(jax.tree.leaves(carry), self.floating, strict=True))
        return Split(
            tuple(leaf for leaf, floating in pairs if floating),
            tuple(leaf for leaf, floating in pairs if not floating),
        )

    def join(self, state: tuple[Array, ...], marks: tuple[Array, ...]) -> Any:
        parts = {True: iter(state), False: iter(marks)}
        return jax.tree.unflatten(self.treedef, [next(parts[kind]) for kind in self.floating])

    @functools.cached_property
    def init(self) -> Any:
        """R -> Split; the pool is copied, since later programs write in place."""

        def init(R: Array, key_heads: int) -> Split:
            return self.split(self.policy.init(jnp.copy(R), key_heads))

        return jax.jit(init, static_argnames="key_heads")

    @functools.cached_property
    def verify(self) -> Any:
        """(state, marks, operands, tree) -> Verified."""

        def verify(
            state: tuple[Array, ...],
            marks: tuple[Array, ...],
            operands: tuple[Operands, ...],
            tree: Tree,
        ) -> Verified:
            carry = self.join(state, marks)
            outputs, scratch, carry = _scan_layers(self.policy, carry, operands, tree)
            return Verified(outputs, scratch, self.split(carry))

        return jax.jit(verify, donate_argnums=0)

    @functools.cached_property
    def verify_alone(self) -> Any:
        """(state, marks, operands, tree) -> (a number, Split), to be timed.

        The number needs every layer's outputs. Handing over hundreds of arrays would take the host
        longer than a verify takes the device.
        """

        def verify_alone(
            state: tuple[Array, ...],
            marks: tuple[Array, ...],
            operands: tuple[Operands, ...],
            tree: Tree,
        ) -> tuple[Array, Split]:
            carry = self.join(state, marks)
            made = _scan_layers(self.policy, carry, operands, tree)
            outputs, _, carry = lax.optimization_barrier(made)
            return _after(outputs, tree.size), self.split(carry)

        return jax.jit(verify_alone, donate_argnums=0)

    @functools.cached_property
    def publish(self) -> Any:
        """(state, marks, scratch, path) -> Split."""

        def publish(
            state: tuple[Array, ...],
            marks: tuple[Array, ...],
            scratch: tuple[Any, ...],
            path: Path,
        ) -> Split:
            carry = self.join(state, marks)
            return self.split(self.policy.commit(carry, scratch, path))

        return jax.jit(publish, donate_argnums=0)

    @functools.cached_property
    def step(self) -> Any:
        """(state, marks, operands, tree, path) -> (outputs, Split)."""

        def step(
            state: tuple[Array, ...],
            marks: tuple[Array, ...],
            operands: tuple[Operands, ...],
            tree: Tree,
            path: Path,
        ) -> tuple[tuple[Array, ...], Split]:
            carry = self.join(state, marks)
            outputs, scratch, carry = _scan_layers(self.policy, carry, operands, tree)
            path = path.replace(length=_after(outputs, path.length))
            return outputs, self.split(self.policy.commit(carry, scratch, path))

        return jax.jit(step, donate_argnums=0)

    @functools.cached_property
    def probe(self) -> Any:
        """(state, marks, layers, row, heads) -> R [l, h, dv, dk] of a sequence, as published."""

        def probe(
            state: tuple[Array, ...],
            marks: tuple[Array, ...],
            layers: Array,
            row: Array,
            heads: Array,
        ) -> Array:
            R = self.policy.read(self.join(state, marks))
            return R[layers[:, None], row, heads[None, :]]

        return jax.jit(probe)


def _scan_layers(
    policy: Policy, carry: Any, operands: tuple[Operands, ...], tree: Tree
) -> tuple[tuple[Array, ...], tuple[Any, ...], Any]:
    """All layers in order. The laboratory's trees are packed by depth, so that sorting the rows for
    kernels, which is part of verifying, leaves operands, outputs and paths where they are."""
    topology: Topology = describe(tree)
    if policy.implementation != "xla":
        topology, _ = jax.vmap(sort_rows)(topology)
    plan = policy.plan(topology)
    outputs, scratch = [], []
    for layer, rows in enumerate(operands):
        out, kept, carry = policy.scan(carry, layer, rows, plan)
        outputs.append(out)
        scratch.append(kept)
    return tuple(outputs), tuple(scratch), carry


def _after(outputs: tuple[Array, ...], length: Array) -> Array:
    """``length``, known only once every layer has its outputs, as it is in a model."""
    first = jnp.stack([out[0, 0, 0, 0] for out in outputs])
    return jnp.where(jnp.isnan(first.sum()), 0, length)
