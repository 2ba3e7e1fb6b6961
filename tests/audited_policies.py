"""Policies for the tests of the component audit: a user's own, and wrong ones.

In a module of their own, so that a fresh process can import them.
"""

import dataclasses
import sys
from typing import ClassVar

import jax.numpy as jnp

from treejax.policies import WY, Snapshot
from treejax.policies.ring import Ring


class Own:
    """A user's policy: no dataclass, no base class, some functions of its own around others."""

    name = "own"
    implementation = "xla"

    def init(self, R, key_heads):
        return R

    def plan(self, topology):
        return topology

    def scan(self, carry, layer, operands, plan):
        return WY().scan(carry, layer, operands, plan)

    def commit(self, carry, scratch, path):
        return WY().commit(carry, scratch, path)

    def read(self, carry):
        return carry

    def buffers(self, config, capacity, batch=1):
        return {}


@dataclasses.dataclass(frozen=True)
class Forgetful(Snapshot):
    """Publishes nothing."""

    name: ClassVar[str] = "forgetful"

    def commit(self, carry, scratch, path):
        return carry


@dataclasses.dataclass(frozen=True)
class Rounding(Snapshot):
    """Keeps its state in bfloat16."""

    name: ClassVar[str] = "rounding"

    def commit(self, carry, scratch, path):
        R = super().commit(carry, scratch, path)
        return R.astype(jnp.bfloat16).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class TwiceAhead(Ring):
    """Moves its cursor by one row too many at the second commit: nothing is wrong before."""

    name: ClassVar[str] = "twice_ahead"

    def commit(self, carry, scratch, path):
        after = super().commit(carry, scratch, path)
        return after.replace(count=after.count + (carry.commits == 1).astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class Restless(Snapshot):
    """Touches one bit of a sequence that takes no part; published states are right."""

    name: ClassVar[str] = "restless"

    def commit(self, carry, scratch, path):
        R = super().commit(carry, scratch, path)
        idle = (path.length == 0)[None, :, None, None, None]
        return jnp.where(idle, jnp.nextafter(R, jnp.float32(9.0)), R)


@dataclasses.dataclass(frozen=True)
class Leaking(WY):
    """Outputs take a trace of every row, far below what rounding hides."""

    name: ClassVar[str] = "leaking"

    def scan(self, carry, layer, operands, plan):
        made = super().scan(carry, layer, operands, plan)
        trace = 1e-12 * operands.v.sum(axis=1, keepdims=True)
        return made._replace(outputs=made.outputs + jnp.broadcast_to(trace, made.outputs.shape))


@dataclasses.dataclass(frozen=True)
class ByProcess(WY):
    """Outputs differ outside the process of the tests, within rounding."""

    name: ClassVar[str] = "by_process"

    def scan(self, carry, layer, operands, plan):
        made = super().scan(carry, layer, operands, plan)
        units = 0 if "pytest" in sys.modules else 1
        return made._replace(outputs=made.outputs * jnp.float32(1 + units * 2**-23))


class Unhashable(Own):
    """Equality without a hash: Python then takes the hash away."""

    def __eq__(self, other):
        return self is other


class Unsized(Own):
    """Says of its memory what cannot be."""

    name = "unsized"

    def buffers(self, config, capacity, batch=1):
        return {"scratch": -capacity, "ring": batch * 1.5, "rest": True, "right": 0}


class Halved(Own):
    """Outputs of half their precision."""

    name = "halved"

    def scan(self, carry, layer, operands, plan):
        made = super().scan(carry, layer, operands, plan)
        return made._replace(outputs=made.outputs.astype(jnp.bfloat16))


class Growing(Own):
    """A carry that is longer after every commit."""

    name = "growing"

    def commit(self, carry, scratch, path):
        R = super().commit(carry, scratch, path)
        return jnp.concatenate([R, R])

    def read(self, carry):
        return carry[:2]


class Broken(Own):
    """Cannot be traced."""

    name = "broken"

    def plan(self, topology):
        raise KeyError("no such plan")


class Narrow(Own):
    """Cannot take few rows."""

    name = "narrow"

    def plan(self, topology):
        if topology.parent.shape[1] < 32:
            raise ValueError("too narrow\nby far")
        return topology


@dataclasses.dataclass(frozen=True)
class RaisesElsewhere(WY):
    """Cannot run outside the process of the tests."""

    name: ClassVar[str] = "raises_elsewhere"

    def plan(self, topology):
        if "pytest" not in sys.modules:
            raise RuntimeError
        return super().plan(topology)
