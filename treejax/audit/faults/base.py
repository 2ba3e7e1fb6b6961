"""Planted faults: an otherwise right engine that goes wrong in one place.

A fault overrides one of the hooks that ``step.cycle`` calls around the shipped propose, verify,
select and publish. Where it strikes is data, one place a sequence, so that a batch holds as many
seeds as it has sequences and no seed compiles anything.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax.config import ModelConfig
from treejax.drafters.base import Draft
from treejax.model import Output
from treejax.policies import Policy
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch
from treejax.tree import Tree

HEADS = ("mtp", "mtp_tree")
"""Drafters whose memory is the cache of the MTP head and nothing else."""


class Strike(struct.PyTreeNode):
    """Where a fault strikes: [B] int32 each, one place a sequence.

    Attributes:
      cycle: the step; -1 never.
      layer: among the layers of the struck kind; heads alike. Larger numbers wrap round.
      row: of the tree or of the path, as the fault says; larger numbers wrap round.
      which: among the faults that one program holds (``anyone.AnyOf``), or None.
    """

    cycle: Array
    layer: Array
    head: Array
    row: Array
    which: Array | None = None


class Hit(struct.PyTreeNode):
    """A strike as hooks see it: ``now`` [B] bool says whose turn it is in this step.

    ``before`` is the path that was published in the previous step, length 0 at first; its
    ``pending`` is the root that this path began with.
    """

    now: Array
    layer: Array
    head: Array
    row: Array
    before: Choice
    which: Array | None = None


@dataclasses.dataclass(frozen=True)
class Course:
    """What a right engine goes through: known before a strike, so that it falls where it shows.

    Attributes:
      parents: [T, B, N] of the trees of T steps, -1 for root and inactive rows.
      depths: [T, B, N].
      sizes: [T, B] rows in use.
      tokens: [T, B, N] of the trees; a column of roots first.
      tails: [T, B, W] the last tokens before each step, the pending one not among them.
      paths: [T, B, P] published nodes, -1 padded; lengths: [T, B].
    """

    parents: np.ndarray
    depths: np.ndarray
    sizes: np.ndarray
    tokens: np.ndarray
    tails: np.ndarray
    paths: np.ndarray
    lengths: np.ndarray

    @property
    def always(self) -> np.ndarray:
        return np.ones_like(self.lengths, bool)

    @property
    def before(self) -> np.ndarray:
        """[T, B] the lengths one step earlier, 0 at first."""
        return np.concatenate([np.zeros_like(self.lengths[:1]), self.lengths[:-1]])

    @property
    def scattered(self) -> np.ndarray:
        """[T, B, P] places of the path whose node does not lie in the row of that number."""
        return (self.paths >= 0) & (self.paths != np.arange(self.paths.shape[2]))


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
      needs: "recurrent" or "attention" layers, if it strikes one; "" else.
      only_xla: whether it reads scratch that the kernels lay out in another way.
    """

    name: str = "none"
    says: str = "nothing is wrong"
    policies: tuple[str, ...] | None = None
    drafted: bool = False
    needs: str = ""
    only_xla: bool = False

    def check(self, config: ModelConfig, policy: Policy, drafter: Any) -> None:
        """Refuse what this fault cannot strike.

        Raises:
          ValueError: one line: the policy, the drafter or the model has nothing to strike.
        """
        if self.policies is not None and policy.name not in self.policies:
            known = ", ".join(self.policies)
            raise ValueError(
                f"fault {self.name!r} cannot act on policy {policy.name!r}, expected of: {known}"
            )
        if self.only_xla and policy.implementation != "xla":
            raise ValueError(
                f"fault {self.name!r} cannot act on the kernels' scratch, expected a policy with "
                "implementation 'xla'"
            )
        if self.drafted and drafter.name not in HEADS:
            raise ValueError(
                f"fault {self.name!r} strikes an MTP head's cache and drafter {drafter.name!r} "
                f"keeps none alone, expected of: {', '.join(HEADS)}"
            )
        layers = {"recurrent": config.linear_layers, "attention": config.full_layers}
        if self.needs and not layers[self.needs]:
            raise ValueError(
                f"fault {self.name!r} strikes {self.needs} layers and the model has none"
            )

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        """[T, B] bool: the steps in which this fault changes anything."""
        return course.always

    def tree(self, tree: Tree, hit: Hit) -> Tree:
        """The tree that is verified in place of the proposed one."""
        return tree

    def policy(self, policy: Policy, hit: Hit) -> Policy:
        """The policy whose scan, commit and read serve this step."""
        return policy

    def verified(self, tree: Tree, out: Output, scratch: Scratch, hit: Hit) -> Output:
        """What verifying gave."""
        return out

    def chosen(self, tree: Tree, choice: Choice, hit: Hit) -> Choice:
        """The choice that is published and emitted in place of the selected one."""
        return choice

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        """The state that goes on; ``state`` is the one before, ``after`` the right one."""
        return after

    def shown(self, params: Any, hidden: Array, choice: Choice, hit: Hit) -> Array:
        """The hidden rows [B, N, H] that the drafter is shown."""
        return hidden

    def observed(self, before: Draft, after: Draft, hit: Hit) -> Draft:
        """The drafter's data that go on; ``before`` as proposing left them."""
        return after


def masked(hit: Hit, array: Array, axis: int = 0) -> Array:
    """``hit.now`` shaped to meet ``array`` whose batch axis is ``axis``."""
    shape = [1] * array.ndim
    shape[axis] = hit.now.shape[0]
    return hit.now.reshape(shape)


def struck(hit: Hit, layers: int, heads: int | None = None) -> Array:
    """[L, B] bool, or [L, B, heads]: the layer and head that are struck now."""
    layer = jnp.arange(layers)[:, None] == (hit.layer % layers)[None, :]
    layer = layer & hit.now[None, :]
    if heads is None:
        return layer
    head = jnp.arange(heads)[None, :] == (hit.head % heads)[:, None]
    return layer[:, :, None] & head[None]


def nth(mask: Array, number: Array) -> Array:
    """[B] the place of the ``number``-th [B] true entry of mask [B, N], round and round; or 0."""
    wanted = number % jnp.maximum(mask.sum(axis=1, dtype=jnp.int32), 1)
    rank = jnp.cumsum(mask.astype(jnp.int32), axis=1) - 1
    return jnp.argmax(mask & (rank == wanted[:, None]), axis=1).astype(jnp.int32)
