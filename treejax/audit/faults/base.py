"""Planted faults: an otherwise right engine that goes wrong in one place.

A fault overrides one of the hooks that ``step.cycle`` calls around the shipped propose, verify,
select and publish. Where it strikes is data, one place a sequence, so that a batch holds as many
seeds as it has sequences and no seed compiles anything.
"""

import dataclasses
from typing import Any

from flax import struct

from treejax.drafters.base import Draft
from treejax.model import Output
from treejax.policies import Policy
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch
from treejax.tree import Tree


class Strike(struct.PyTreeNode):
    """Where a fault strikes: [B] int32 each, one place a sequence.

    Attributes:
      cycle: the step; -1 never.
      layer: among the layers of the struck kind; heads alike. Larger numbers wrap round.
      row: of the tree or of the path, as the fault says; larger numbers wrap round.
    """

    cycle: Array
    layer: Array
    head: Array
    row: Array


class Hit(struct.PyTreeNode):
    """A strike as hooks see it: ``now`` [B] bool says whose turn it is in this step.

    ``before`` is the path that was published in the previous step, length 0 at first.
    """

    now: Array
    layer: Array
    head: Array
    row: Array
    before: Choice


@dataclasses.dataclass(frozen=True)
class Fault:
    """An engine that does everything right: what a fault overrides, it does wrong.

    Every hook works inside jit on whole batches and must leave sequences whose ``hit.now`` is
    false exactly as they are.

    Attributes:
      name: the registry's.
      says: what goes wrong, in one sentence.
      policies: names of the policies that it can strike, or None for all.
      drafted: whether it needs a drafter with an MTP head.
    """

    name: str = "none"
    says: str = "nothing is wrong"
    policies: tuple[str, ...] | None = None
    drafted: bool = False

    def tree(self, tree: Tree, hit: Hit) -> Tree:
        """The tree that is verified in place of the proposed one."""
        return tree

    def policy(self, policy: Policy, hit: Hit) -> Policy:
        """The policy whose scan, commit and read serve this step."""
        return policy

    def verified(
        self, state: State, tree: Tree, out: Output, scratch: Scratch, hit: Hit
    ) -> tuple[Output, Scratch]:
        """What verifying left."""
        return out, scratch

    def chosen(self, tree: Tree, choice: Choice, hit: Hit) -> Choice:
        """The choice that is published and emitted in place of the selected one."""
        return choice

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        """The state that goes on; ``state`` is the one before, ``after`` the right one."""
        return after

    def shown(self, params: Any, hidden: Array, hit: Hit) -> Array:
        """The hidden rows [B, N, H] that the drafter is shown."""
        return hidden

    def observed(self, before: Draft, after: Draft, hit: Hit) -> Draft:
        """The drafter's data that go on."""
        return after


def masked(hit: Hit, array: Array, axis: int = 0) -> Array:
    """``hit.now`` shaped to meet ``array`` whose batch axis is ``axis``."""
    shape = [1] * array.ndim
    shape[axis] = hit.now.shape[0]
    return hit.now.reshape(shape)
