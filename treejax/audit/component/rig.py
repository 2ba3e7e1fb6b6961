"""A policy at work without a model: its verify, commit and read, each compiled by itself.

Rows reach the policy as ``steps.verify`` gives them: as they are packed to plain JAX, parents first
and padded to a multiple of eight to the kernels.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.component.operands import Drawn, Shape
from treejax.audit.component.truth import Row, Step, native
from treejax.delta_rule import Operands
from treejax.policies import Path, Policy, Replay, kernel_rows, make_policy
from treejax.shapes import Array
from treejax.steps.publish import path_in_scratch
from treejax.tree import Tree, describe, sort_rows


class Verified(NamedTuple):
    """Outputs [L, B, N, Hv, dv]; scratch of every layer; the carry; where rows went, or None."""

    outputs: Array
    scratch: tuple[Any, ...]
    carry: Any
    place: Array | None


def as_policy(policy: Any) -> Policy:
    """The object itself, on the implementation it names, or an error that says what it lacks.

    Raises:
      ValueError: one line.
    """
    if isinstance(policy, str):
        raise ValueError(
            f"a policy is an object, got the name {policy!r}: make_policy({policy!r}) makes it one"
        )
    return make_policy(policy)


@dataclasses.dataclass(frozen=True, eq=False)
class Rig:
    """Programs of one policy; a new rig compiles them anew."""

    policy: Policy

    @functools.cached_property
    def verify(self) -> Any:
        """(carry, operands of every layer, tree) -> Verified."""
        return jax.jit(self._verify)

    @functools.cached_property
    def commit(self) -> Any:
        """(carry, scratch of every layer, path, place) -> carry."""
        return jax.jit(self._commit)

    @functools.cached_property
    def read(self) -> Any:
        """carry -> R."""
        return jax.jit(self._read)

    @functools.cached_property
    def init(self) -> Any:
        """(R, number of key heads) -> carry."""
        return jax.jit(self._init, static_argnums=1)

    @property
    def sorts(self) -> bool:
        return self.policy.implementation != "xla"

    def _init(self, R: Array, heads: int) -> Any:
        return self.policy.init(R, heads)

    def _verify(self, carry: Any, operands: tuple[Operands, ...], tree: Tree) -> Verified:
        place = None
        if self.sorts:
            wide = tree.pad(kernel_rows(tree.capacity))
            topology, place = jax.vmap(sort_rows)(describe(wide))
            order = jnp.argsort(place, axis=1)
            operands = jax.tree.map(lambda x: _rows(x, order), operands)
        else:
            topology = describe(tree)
        plan = self.policy.plan(topology)
        outputs, scratch = [], []
        for i, layer in enumerate(operands):
            made = self.policy.scan(carry, i, layer, plan)
            carry = made.carry
            out = made.outputs
            if place is not None:
                out = jnp.take_along_axis(out, place[:, : tree.capacity, None, None], axis=1)
            outputs.append(out)
            scratch.append(made.scratch)
        return Verified(jnp.stack(outputs), tuple(scratch), carry, place)

    def _commit(self, carry: Any, scratch: tuple[Any, ...], path: Path, place: Array | None) -> Any:
        path = path_in_scratch(path.nodes, path.length, place)
        return self.policy.commit(carry, scratch, path)

    def _read(self, carry: Any) -> Array:
        return self.policy.read(carry)

    def publish(self, verified: Verified, path: Path) -> Any:
        """The carry after the paths."""
        return self.commit(verified.carry, verified.scratch, path, verified.place)

    def states(self, carry: Any) -> np.ndarray:
        return np.asarray(self.read(carry))

    def native(self) -> Step:
        """The single-token step that this policy's results are held against."""
        if not self.sorts:
            return native
        replay: Any = Replay(implementation=self.policy.implementation)
        rig = Rig(replay)

        def decode(R: np.ndarray, row: Row) -> tuple[np.ndarray, np.ndarray]:
            batch = R.shape[1]
            one = Drawn(*(x[:, :, None] for x in row)).layers()
            tree = Tree.root_only(jnp.zeros(batch, jnp.int32))
            path = Path(jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32))
            verified = rig.verify(jnp.asarray(R), one, tree)
            return np.asarray(verified.outputs[:, :, 0]), rig.states(rig.publish(verified, path))

        return decode

    def check(self, shape: Shape, drawn: Drawn, tree: Tree) -> None:
        """Trace it once, without running, and see that it gives what policies give.

        Raises:
          ValueError: one line, what it gave and what was expected.
          Exception: whatever the policy raises.
        """
        s, name = shape, self.policy.name
        pool = (s.layers, s.batch, s.value_heads, s.value_dim, s.key_dim)
        path = pack([[0]] * s.batch, s.depth)
        R = jax.ShapeDtypeStruct(pool, jnp.float32)
        carry = jax.eval_shape(lambda R: self._init(R, s.key_heads), R)
        verified = jax.eval_shape(self.verify, carry, drawn.layers(), tree)
        parts = verified.scratch, path, verified.place
        after = jax.eval_shape(self.commit, verified.carry, *parts)
        states = jax.eval_shape(self.read, after)
        _expect(
            name, "outputs of all layers", verified.outputs, (s.layers, s.batch, s.rows, *pool[2:4])
        )
        _expect(name, "states that read() gives", states, pool)
        if _forms(after) != _forms(carry):
            raise ValueError(
                f"policy {name!r}: the carry after commit() has leaves {_forms(after)}, expected "
                f"those of init(), {_forms(carry)}: the next step could not take it"
            )


def pack(paths: Sequence[Sequence[int]], depth: int) -> Path:
    """A path a sequence, -1 padded; an empty one has length 0."""
    nodes = np.full((len(paths), depth + 1), -1, np.int32)
    for line, path in zip(nodes, paths, strict=True):
        line[: len(path)] = path
    lengths = np.array([len(path) for path in paths], np.int32)
    return Path(jnp.asarray(nodes), jnp.asarray(lengths))


def _rows(x: Array, order: Array) -> Array:
    """Rows of operands [B, N, ...] in the kernels' order; rows past N are its last again."""
    index = jnp.minimum(order, x.shape[1] - 1)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def _forms(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(tree)]


def _expect(name: str, what: str, made: Any, shape: tuple[int, ...]) -> None:
    if (made.shape, made.dtype) != (shape, jnp.float32):
        raise ValueError(
            f"policy {name!r}: the {what} have shape {made.shape} and dtype {made.dtype.name}, "
            f"expected {shape} and float32"
        )
