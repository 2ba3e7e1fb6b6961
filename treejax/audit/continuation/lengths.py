"""Paths of every length, on purpose: in some steps a script proposes in the drafter's place.

What a drafter has accepted of its proposals is its own affair, and a fault that shows only at
exactly k accepted rows would go by where k never comes up. The script knows plain's next tokens and
gets as many of them right as it is told. The drafter's memory follows as ever: it proposes in these
steps too, to no effect, and observes what was accepted.

Whether a step is scripted is data, so that the program that runs all other steps runs these.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax.audit.continuation.limits import with_limits
from treejax.audit.step import Subject
from treejax.drafters import Drafter
from treejax.drafters.base import Draft
from treejax.drafters.scripted import Script, Scripted
from treejax.drafters.topologies import StaticTree
from treejax.shapes import Array
from treejax.steps.rules import REGISTRY as RULES
from treejax.tree import Tree


class Prompted(struct.PyTreeNode):
    """What a ``Prompter`` reads.

    Attributes:
      weights: of its drafter's ``Draft``.
      answers: [B, D + 1] plain's tokens from the pending one on.
      right: [B] how many candidates of one path are right; -1 leaves the drafter its proposal.
      turn: [B] which of the tree's paths of that length.
    """

    weights: Any
    answers: Array
    right: Array
    turn: Array


@dataclasses.dataclass(frozen=True)
class Prompter:
    """``inner``, in whose place a script proposes where it is told to. Static under jit."""

    inner: Drafter

    name: ClassVar[str] = "prompter"

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, Array | None, Draft]:
        told: Prompted = draft.weights
        tree, q, own = self.inner.propose(draft.replace(weights=told.weights), state, pending, key)
        script = script_of(self.inner, draft.config.vocab_size)
        nothing = jnp.zeros_like(told.right)
        step = jnp.maximum(told.right, 0) + len(script.schedule or ()) * told.turn
        written = Draft(told.answers, Script(emitted=nothing, step=step), draft.config)
        scripted, _, _ = script.propose(written, state, pending, key)
        scripted = scripted.pad(tree.capacity).replace(max_depth=tree.max_depth)

        def choose(mine: Array, its: Array) -> Array:
            return jnp.where((told.right >= 0).reshape(-1, *[1] * (its.ndim - 1)), mine, its)

        return jax.tree.map(choose, scripted, tree), q, own.replace(weights=told)

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        told: Prompted = draft.weights
        own = self.inner.observe(draft.replace(weights=told.weights), tree, choice, hidden)
        return own.replace(weights=told)


def deepest(drafter: Drafter) -> int:
    """The most candidates that one step of a drafter can have accepted."""
    return min(drafter.max_depth, drafter.capacity - 1)


def script_of(drafter: Drafter, vocabulary: int) -> Scripted:
    """Proposes trees of the drafter's shape; step k of its schedule has k right tokens."""
    depth, shape = deepest(drafter), drafter.shape
    fits = isinstance(shape, StaticTree) and (shape.capacity, shape.max_depth) == (
        drafter.capacity,
        depth,
    )
    if not isinstance(shape, StaticTree) or not fits or 1 + max(shape.ranks) >= vocabulary:
        shape = bushy(drafter.capacity, depth, vocabulary)
    schedule = tuple((depth, right) for right in range(depth + 1))
    return Scripted(tree=shape, truth=((0,),), schedule=schedule)


def bushy(capacity: int, depth: int, vocabulary: int) -> StaticTree:
    """A tree for drafters whose shape is data: a path of that depth, whose nodes share the other
    rows as siblings, each before the node that goes on; fewer where tokens are few."""
    parents, main, others = [-1], 0, capacity - 1 - depth
    for level in range(depth):
        more = others // depth + (level < others % depth)
        parents += [main] * (1 + min(more, max(vocabulary - 2, 0)))
        main = len(parents) - 1
    return StaticTree("scripted", tuple(parents))


def runnable(subject: Subject) -> Subject:
    """The subject as it is run: told which steps to keep short, and which to propose itself."""
    limited = with_limits(subject)
    prompted: Any = Prompter(subject.drafter)
    return dataclasses.replace(limited, drafter=prompted)


def unread(subject: Subject) -> Subject:
    """The subject for scripted steps: by rule ``match`` where its own reads what candidates were
    drawn from, as those of a script are drawn from nothing."""
    if not subject.rule.needs_q and "fixed" in subject.rule.serves:
        return subject
    return dataclasses.replace(subject, rule=RULES["match"])


def not_by_its_rule(subject: Subject) -> list[dict[str, str]]:
    """What is left out where ``unread`` takes another rule, and why: a row of the report."""
    if unread(subject).rule == subject.rule:
        return []
    left = {"subject": subject.name, "left out": "paths of every length by its own rule"}
    why = "it reads what candidates were drawn from, and a script draws none: by rule match instead"
    return [left | {"why": why}]


def free(subject: Subject, weights: Any, batch: int) -> Prompted:
    """For steps in which every drafter proposes itself."""
    nobody = jnp.full(batch, -1, jnp.int32)
    answers = jnp.zeros((batch, deepest(subject.drafter) + 1), jnp.int32)
    return Prompted(weights, answers, nobody, jnp.zeros_like(nobody))


def told(weights: Any, answers: np.ndarray, right: np.ndarray, turn: int) -> Prompted:
    """For a step in which ``right`` [B] candidates are right."""
    turns = jnp.full(len(right), turn, jnp.int32)
    return Prompted(weights, jnp.asarray(answers, jnp.int32), jnp.asarray(right, jnp.int32), turns)


def plan_of(batch: int, depth: int) -> np.ndarray:
    """[steps, B] how many candidates are right: every number from 0 to ``depth`` at least once."""
    steps = -(-(depth + 1) // batch)
    return np.arange(steps * batch).reshape(steps, batch) % (depth + 1)
