"""What every drafter is: settings that never change, and a ``Draft`` that travels with the loop.

A drafter is a frozen dataclass of settings, static under jit. What it knows of the sequences lives
in its ``Draft`` and never in the model's State. Only ``memory`` changes; ``weights`` refers to
arrays that others own, so the loop may donate the former and must not donate the latter. A drafter
is never told which state policy verifies its trees.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
from flax import struct

from treejax.config import ModelConfig
from treejax.drafters.pace import Steady
from treejax.drafters.topologies import Best, StaticTree, parse
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.tree import Tree


class Draft(struct.PyTreeNode):
    """A drafter's data: ``weights`` (read only), ``memory`` (changes), the model's ``config``.

    Attributes:
      sampling: the settings that the target draws with, prepared, one value a sequence; None while
        prompts are taken in. Drafters that draw, or that rank with the target's noise, follow them.
    """

    weights: Any
    memory: Any
    config: ModelConfig = struct.field(pytree_node=False)
    sampling: Sampling | None = None


PROPOSALS = ("fixed", "coupled", "iid", "without_replacement")
"""How candidates may come about, which is what an acceptance rule must know to be lossless.

``fixed``: a function of the context alone. ``coupled``: ranked with the noise that the target draws
with. ``iid``: siblings drawn from q with replacement, equal ones kept. ``without_replacement``:
siblings drawn from q one after the other, each time without those drawn before, rank by rank.
Only the last two, ``DRAWN``, have a q.
"""
DRAWN = PROPOSALS[2:]


class Drafter(Protocol):
    """The methods that the loop calls; all but ``init`` work inside jit.

    ``name`` is the registry's.
    """

    name: ClassVar[str]

    @property
    def proposals(self) -> str:
        """One of ``PROPOSALS``."""
        ...

    @property
    def shape(self) -> StaticTree | Best:
        """The tree that is filled; ``shape.name`` as the user would write it."""
        ...

    @property
    def capacity(self) -> int:
        """Rows of every proposed tree, the root's included."""
        ...

    @property
    def max_depth(self) -> int:
        """Depth bound of every proposed tree."""
        ...

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        """Empty memory for ``batch`` sequences of at most ``max_length`` tokens.

        Raises:
          ValueError: this drafter cannot serve this model.
        """
        ...

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        """Take in a piece of prompt: hidden [B, T, H], tokens [B, T], real tokens lengths [B]."""
        ...

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, Array | None, Draft]:
        """A tree below ``pending`` [B] and its q [B, N, V], row v for the children of v, or None.

        q are the probabilities that the candidates were drawn with, where ``proposals`` says that
        they were drawn. ``key``: [B] keys; ``draft.sampling`` says who is greedy.
        """
        ...

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        """Follow the accepted path of the proposed tree: hidden [B, N, H] by row of ``tree``.

        Sequences whose ``choice.length`` is 0 did not take part and stay as they are.
        """
        ...

    def rest(self, draft: Draft, pending: Array) -> Draft:
        """In place of ``propose``: nothing is proposed, and the root alone is observed next."""
        ...

    def learn(self, tokens: Sequence[int]) -> None:
        """Take in a finished response, on the host: generations begun later may draw on it."""
        ...

    @property
    def forms(self) -> tuple[Any, ...]:
        """The drafters that the loop may run, step by step, over one memory; mostly just this one.

        All are static under jit, and a step is compiled for each.
        """
        ...

    def pace(self, sampling: Sampling) -> Any:
        """What says which form runs next, for one run of the loop; see ``drafters.pace``."""
        ...


@dataclasses.dataclass(frozen=True)
class Shaped:
    """Settings shared by all drafters here: the tree, as text or as an object."""

    tree: str | StaticTree | Best

    name: ClassVar[str]

    @property
    def proposals(self) -> str:
        return "fixed"

    @property
    def shape(self) -> StaticTree | Best:
        return parse(self.tree) if isinstance(self.tree, str) else self.tree

    @property
    def static_shape(self) -> StaticTree:
        """``shape``, for drafters that need a fixed one."""
        if isinstance(self.shape, Best):
            raise refuse_tree(self.name, "trees of fixed shape", self.shape)
        return self.shape

    def rest(self, draft: Draft, pending: Array) -> Draft:
        """Most drafters have nothing to do before a step that drafts nothing."""
        return draft

    def learn(self, tokens: Sequence[int]) -> None:
        """Most drafters keep nothing beyond a generation."""

    @property
    def forms(self) -> tuple[Any, ...]:
        return (self,)

    def pace(self, sampling: Sampling) -> Steady:
        return Steady()

    @property
    def capacity(self) -> int:
        return self.shape.capacity

    @property
    def max_depth(self) -> int:
        return self.shape.max_depth


def path_tokens(tree: Tree, path: Array) -> Array:
    """Tokens along ``path`` [B, P] of row ids; unspecified where the path is padded with -1."""
    return jnp.take_along_axis(tree.tokens, jnp.maximum(path, 0), axis=1)


def refuse_tree(drafter: str, takes: str, shape: StaticTree | Best) -> ValueError:
    """The error for a tree that a drafter cannot fill."""
    return ValueError(f"drafter {drafter!r} cannot fill the tree {shape.name!r}, it takes {takes}")
