"""Verify, select, publish and draft as programs of their own: what the phases of a step cost.

A state goes round in two parts, as in the laboratory: the floating point leaves of the policy's
carry are donated to verify and publish, so that kernels write in place, and its marks, a few
integers a sequence, are given anew. Verify also hands out the operands of a few recurrent layers,
from which the gate replays what was published. They are there anyway: handing them out costs
nothing but their memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from treejax import layers
from treejax.ablation.lab_programs import Programs, Split
from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.drafters.base import Draft
from treejax.model import Output
from treejax.policies import Path, Policy, Scanned
from treejax.sampling import Sampling, per_sequence
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import publish_path
from treejax.steps.rules.base import Rule
from treejax.steps.select import Choice, select
from treejax.steps.verify import Scratch, verify_trees
from treejax.tree import Topology, Tree


@dataclasses.dataclass(frozen=True)
class Probed:
    """A policy whose scratch carries the operands of some layers beside its own."""

    inner: Policy
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def implementation(self) -> str:
        return self.inner.implementation

    def init(self, R: Array, key_heads: int) -> Any:
        return self.inner.init(R, key_heads)

    def plan(self, topology: Topology) -> Any:
        return self.inner.plan(topology)

    def scan(self, carry: Any, layer: int, operands: Operands, plan: Any) -> Scanned:
        made = self.inner.scan(carry, layer, operands, plan)
        probe = operands if layer in self.layers else None
        return made._replace(scratch=(made.scratch, probe))

    def commit(self, carry: Any, scratch: Any, path: Path) -> Any:
        return self.inner.commit(carry, [own for own, _ in scratch], path)

    def read(self, carry: Any) -> Array:
        return self.inner.read(carry)

    def buffers(self, config: ModelConfig, capacity: int, batch: int = 1) -> dict[str, int]:
        return self.inner.buffers(config, capacity, batch)


class Verified(NamedTuple):
    """What verify leaves: ``scratch`` is without the policy's carry, which comes apart.

    ``probes`` are the operands of the probed layers, in the rows of the scratch.
    """

    output: Output
    scratch: Scratch
    probes: tuple[Operands, ...]
    carry: Split


def probed_layers(config: ModelConfig) -> tuple[int, ...]:
    """Three recurrent layers, first, middle and last, among the recurrent ones."""
    count = len(config.linear_layers)
    return tuple(sorted({0, count // 2, count - 1}))


@functools.partial(jax.jit, static_argnames=("config", "split"), donate_argnames="floats")
def verify(
    config: ModelConfig,
    split: Programs,
    params: layers.Params,
    floats: tuple[Array, ...],
    marks: tuple[Array, ...],
    rest: State,
    tree: Tree,
) -> Verified:
    """Verify the trees; ``rest`` is the state without its carry."""
    policy = Probed(split.policy, probed_layers(config))
    state = rest.replace(recurrent=split.join(floats, marks), policy=policy)
    output, scratch = verify_trees(config, params, state, tree)
    probes = tuple(probe for _, probe in scratch.recurrent if probe is not None)
    own = tuple(own for own, _ in scratch.recurrent)
    carry = split.split(scratch.carry)
    scratch = scratch.replace(carry=(), recurrent=own, policy=split.policy)
    return Verified(output, scratch, probes, carry)


@functools.partial(jax.jit, static_argnames="rule")
def choose(
    rule: Rule, tree: Tree, logits: Array, sampling: Sampling, keys: Array, position: Array
) -> Choice:
    """Select a path of every tree."""
    return select(tree, logits, sampling=sampling, key=keys, position=position, rule=rule)


@functools.partial(jax.jit, static_argnames="split", donate_argnames=("floats", "rest"))
def publish(
    split: Programs,
    floats: tuple[Array, ...],
    marks: tuple[Array, ...],
    rest: State,
    scratch: Scratch,
    choice: Choice,
) -> tuple[Split, State]:
    """Publish a path of every tree: the carry in its parts, and the rest of the state."""
    carry = split.join(floats, marks)
    state = publish_path(rest.replace(recurrent=carry), scratch.replace(carry=carry), choice)
    return split.split(state.recurrent), state.replace(recurrent=())


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="draft")
def propose(
    drafter: Any,
    weights: Any,
    draft: Draft,
    rest: State,
    pending: Array,
    keys: Array,
    sampling: Sampling,
) -> tuple[Tree, Draft]:
    """One proposal; ``draft`` is without its weights, which stay."""
    size = draft.config.vocab_size
    own, *_ = per_sequence(rest.batch, sampling, keys, rest.length, size)
    given = draft.replace(weights=weights, sampling=own)
    tree, _, after = drafter.propose(given, rest, pending, keys)
    return tree, after.replace(weights=(), sampling=None)
