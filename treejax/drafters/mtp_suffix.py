"""The MTP head near the root, prompt lookup beyond it: the shape of LumoTree's drafter.

The head fills a spine of its first choices with its runners-up beside them. What followed the
context (history, pending token and spine) when it occurred before becomes the spine's tail, and
likewise below the root's runners-up. Rows for which the text holds nothing are left out. Only the
spine costs head passes (the tree of arXiv 2609.23900).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax.drafters.base import Draft, Shaped, path_tokens, refuse_tree
from treejax.drafters.committed import Committed, append, extend, no_text
from treejax.drafters.head import (
    HeadMemory,
    draft_tokens,
    empty_head,
    head_weights,
    observe_head,
    prime_head,
)
from treejax.drafters.lookup import Lookup, Matches, find_best
from treejax.drafters.prefixes import chain_score, walk
from treejax.drafters.topologies import Best, Hydra, StaticTree
from treejax.shapes import Array
from treejax.tree import Tree

type _Chain = tuple[tuple[int, ...], tuple[int, ...]]


class HybridMemory(struct.PyTreeNode):
    """The head's cache and the text, about the same committed tokens."""

    head: HeadMemory
    text: Committed


@dataclasses.dataclass(frozen=True)
class MTPSuffix(Shaped):
    """A hydra: spine and runners-up by the MTP head, tail and rescue chains by prompt lookup."""

    tree: str | StaticTree | Best = "hydra8"
    lookup: Lookup = Lookup()

    name: ClassVar[str] = "mtp+suffix"

    def __post_init__(self):
        _ = self._hydra

    @property
    def _hydra(self) -> Hydra:
        shape = self.shape
        if not isinstance(shape, Hydra) or not (shape.tail or shape.rescue):
            raise refuse_tree(self.name, "hydra trees, such as hydra27 or hydra3x2+4/2", shape)
        return shape

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        weights = head_weights(self.name, model)
        head = empty_head(model.config, model.dtype, batch, max_length, self.max_depth)
        memory = HybridMemory(head=head, text=no_text(batch, max_length))
        return Draft(weights=weights, memory=memory, config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        head = prime_head(draft, draft.memory.head, hidden, tokens, lengths)
        text = append(draft.memory.text, tokens, lengths)
        return draft.replace(memory=HybridMemory(head=head, text=text))

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, None, Draft]:
        hydra, memory = self._hydra, draft.memory
        near = Hydra(hydra.spine, hydra.width)
        drafted, head = draft_tokens(draft, memory.head, near, pending)
        tokens = jnp.full((len(pending), hydra.capacity), -1, jnp.int32)
        tokens = tokens.at[:, jnp.array(hydra.near_rows)].set(drafted)
        chains = _chains(hydra)
        found = self._continuations(draft, memory.text, tokens, chains)
        for i, (_, rows) in enumerate(chains):
            tokens = tokens.at[:, jnp.array(rows)].set(found[:, i, : len(rows)])
        return hydra.supported(tokens), None, draft.replace(memory=memory.replace(head=head))

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        head = observe_head(draft.memory.head, tree, choice, hidden)
        accepted = path_tokens(tree, choice.path)
        text = append(draft.memory.text, accepted, choice.length)
        return draft.replace(memory=HybridMemory(head=head, text=text))

    def _continuations(
        self, draft: Draft, history: Committed, tokens: Array, chains: list[_Chain]
    ) -> Array:
        """What the text holds below each chain's path: [B, chains, depth], -1 where nothing."""
        depth = max(len(rows) for _, rows in chains)
        longest = max(len(path) for path, _ in chains)
        padded = np.array([path + path[-1:] * (longest - len(path)) for path, _ in chains])
        counts = np.array([len(path) for path, _ in chains], np.int32)

        def score(group: Matches) -> Array:
            return chain_score(group, self.lookup)

        def one(text: Array, length: Array, extra: Array, count: Array) -> Array:
            context = extend(text, length, extra)
            found = find_best(context, length + count, self.lookup, depth, score, draft.weights)
            return walk(found, self.lookup.least_value)[0]

        chained = jax.vmap(one, in_axes=(None, None, 0, 0))
        batched = jax.vmap(chained, in_axes=(0, 0, 0, None))
        return batched(history.tokens, history.length, tokens[:, padded], jnp.asarray(counts))


def _chains(hydra: Hydra) -> list[_Chain]:
    """The tail and the rescue chains: the path from the root to what each continues, its rows."""
    every = [hydra.tail_rows] + [hydra.rescue_rows(r) for r in range(len(hydra.rescue))]
    return [(hydra.path(hydra.parents[rows[0]]), rows) for rows in every if rows]
