"""D-Cut: of all that a batch's drafters propose, only the most promising nodes are verified.

Each sequence's drafter proposes freely; the nodes of all sequences are then ranked together by the
chance that they are accepted, and the best are kept, so that budget flows to the sequences whose
text is easy (reference, part B). With one sequence it cuts the tree to the shape that measured
acceptance makes optimal: the N largest path products.

The chance of a node is a product along its path of a[d][r], the acceptance of rank r below depth d
given that the parent was accepted. It is counted while decoding, for each sequence by itself, and
starts from what the whole batch has seen. It is known before anything is drawn, so that what is cut
cannot depend on the draws.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.drafters.base import DRAWN, Draft, Shaped
from treejax.drafters.topologies import Best, StaticTree
from treejax.shapes import Array
from treejax.tree import Tree, depths

POOLED = 8.0
"""Candidates of its own that outweigh, for a sequence, what the whole batch has seen."""


class CutMemory(struct.PyTreeNode):
    """The inner drafter's memory, and counts by the parent's depth and the child's rank.

    Attributes:
      offered, accepted: [B, D, R] float32 candidates below accepted nodes, and those accepted.
      active: [B] bool, who took part in the last step; the others get no share of the budget.
    """

    inner: Any
    offered: Array
    accepted: Array
    active: Array


@dataclasses.dataclass(frozen=True)
class DCut(Shaped):
    """Keeps the best of what ``inner`` proposes.

    Attributes:
      inner: the drafter; its candidates may not be drawn from q, since a rule that needs q is wrong
        for candidates that were chosen among.
      nodes: candidates kept, times the number of sequences that take part: they share them.
      ranks: ranks that are counted apart; later ones count as the last.
      decay: what a count is worth one step later.
    """

    tree: str | StaticTree | Best | None = None
    inner: Any = None
    nodes: int = 8
    ranks: int = 4
    decay: float = 0.99

    name: ClassVar[str] = "dcut"

    def __post_init__(self):
        if self.tree is not None:
            raise ValueError("drafter 'dcut' cuts its inner drafter's tree: leave out the tree")
        if self.inner is None:
            raise ValueError("drafter 'dcut' needs an inner drafter, whose tree it cuts: inner=...")
        if self.inner.proposals in DRAWN:
            raise ValueError(
                f"drafter 'dcut' cannot cut candidates that are drawn ({self.inner.proposals}), "
                "expected a drafter that ranks them"
            )
        if len(self.inner.forms) > 1:
            raise ValueError(
                f"drafter 'dcut' cannot cut {self.inner.name!r}, which chooses among sizes: "
                "cut one of them"
            )
        if not (1 <= self.nodes < self.inner.capacity and self.ranks >= 1):
            raise ValueError(
                f"drafter 'dcut' keeps {self.nodes} nodes by {self.ranks} ranks of at most "
                f"{self.inner.capacity - 1} proposed, expected fewer than that and 1 or more"
            )

    @property
    def shape(self) -> StaticTree | Best:
        return self.inner.shape

    @property
    def proposals(self) -> str:
        return self.inner.proposals

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        draft = self.inner.init(model, batch, max_length)
        # Two arrays, since the loop donates both.
        offered, accepted = (jnp.zeros((batch, self.max_depth, self.ranks)) for _ in range(2))
        active = jnp.ones(batch, bool)
        return draft.replace(memory=CutMemory(draft.memory, offered, accepted, active))

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        memory = draft.memory
        made = self.inner.prime(draft.replace(memory=memory.inner), hidden, tokens, lengths)
        return made.replace(memory=memory.replace(inner=made.memory))

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, None, Draft]:
        memory = draft.memory
        inner = draft.replace(memory=memory.inner)
        tree, _, inner = self.inner.propose(inner, state, pending, key)
        value = path_products(tree, chances(memory))
        count = self.nodes * memory.active.sum(dtype=jnp.int32)
        tree = keep_best(tree, jnp.where(memory.active[:, None], value, 0.0), count)
        return tree, None, inner.replace(memory=memory.replace(inner=inner.memory))

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        memory = draft.memory
        made = self.inner.observe(draft.replace(memory=memory.inner), tree, choice, hidden)
        offered, accepted = counts(tree, choice, self.max_depth, self.ranks)
        memory = CutMemory(
            inner=made.memory,
            offered=self.decay * memory.offered + offered,
            accepted=self.decay * memory.accepted + accepted,
            active=choice.length > 0,
        )
        return made.replace(memory=memory)

    def rest(self, draft: Draft, pending: Array) -> Draft:
        made = self.inner.rest(draft.replace(memory=draft.memory.inner), pending)
        return made.replace(memory=draft.memory.replace(inner=made.memory))

    def learn(self, tokens: Sequence[int]) -> None:
        self.inner.learn(tokens)


def chances(memory: CutMemory) -> Array:
    """a [B, D, R]: acceptance by depth and rank of each sequence, never rising with rank.

    A place is estimated from the sequence's own counts and ``POOLED`` candidates accepted as the
    batch has it, and the batch's from its counts and two candidates of which 1/2, 1/4, ... were.
    """
    share = 0.5 ** (1.0 + jnp.arange(memory.offered.shape[-1], dtype=jnp.float32))[None, :]
    every = memory.offered.sum(axis=0), memory.accepted.sum(axis=0)
    batch = (every[1] + 2.0 * share) / (every[0] + 2.0)
    own = (memory.accepted + POOLED * batch[None]) / (memory.offered + POOLED)
    return lax.cummin(own, axis=2)


def path_products(tree: Tree, chance: Array) -> Array:
    """Product of ``chance`` [B, D, R] along each row's path: [B, N], 1 at the root."""

    def one(parent: Array, rank: Array, chance: Array) -> Array:
        above = depths(parent, tree.max_depth) - 1
        own = chance[jnp.maximum(above, 0), jnp.minimum(rank, chance.shape[1] - 1)]
        own = jnp.where(parent >= 0, own, 1.0)
        value, node = jnp.ones_like(own), jnp.arange(parent.shape[0], dtype=jnp.int32)
        for _ in range(tree.max_depth):
            value = value * jnp.where(node >= 0, own[jnp.maximum(node, 0)], 1.0)
            node = jnp.where(node >= 0, parent[jnp.maximum(node, 0)], -1)
        return value

    return jax.vmap(one)(tree.parent, tree.rank, chance)


def keep_best(tree: Tree, value: Array, count: int | Array) -> Tree:
    """The trees with the ``count`` candidates of highest ``value`` [B, N] of the whole batch.

    Values must not rise along a path. Equal ones are taken by depth, so that a parent comes before
    its children, then by sequence and row.
    """
    rows = jnp.arange(tree.capacity, dtype=jnp.int32)[None, :]
    depth = jax.vmap(lambda parent: depths(parent, tree.max_depth))(tree.parent)
    candidate = (rows < tree.size[:, None]) & (rows > 0)
    falling = jnp.where(candidate, -value, jnp.inf).reshape(-1)
    places = jnp.arange(falling.size, dtype=jnp.int32)
    *_, order = lax.sort((falling, depth.reshape(-1), places), num_keys=2, is_stable=True)
    place = jnp.zeros_like(places).at[order].set(places, unique_indices=True)
    chosen = (place < count).reshape(value.shape) & candidate
    return tree.keep(chosen | (rows == 0))


def counts(tree: Tree, choice: Any, bound: int, ranks: int) -> tuple[Array, Array]:
    """[B, bound, ranks] by the parent's depth and the child's rank: candidates offered below
    accepted nodes, and accepted ones."""

    def one(parent: Array, rank: Array, path: Array, length: Array) -> tuple[Array, Array]:
        steps = jnp.arange(path.shape[0], dtype=jnp.int32)
        on_path = (steps < length) & (path >= 0)
        below = (parent[None, :] == path[:, None]) & on_path[:, None]  # [P, N]
        column = jnp.minimum(rank, ranks - 1)
        hot = (column[:, None] == jnp.arange(ranks)[None, :]).astype(jnp.float32)
        offered = below.astype(jnp.float32) @ hot
        following = jnp.pad(path[1:], (0, 1), constant_values=-1)
        taken = (steps + 1 < length) & (following >= 0)
        accepted = jnp.where(taken[:, None], hot[jnp.maximum(following, 0)], 0.0)
        return offered, accepted

    made = jax.vmap(one)(tree.parent, tree.rank, choice.path, choice.length)
    room = ((0, 0), (0, max(0, bound - choice.path.shape[1])), (0, 0))
    offered, accepted = (jnp.pad(each, room)[:, :bound] for each in made)
    return offered, accepted
