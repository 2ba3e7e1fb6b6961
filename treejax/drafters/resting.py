"""No drafting for a while: nothing is proposed, and what a drafter knows stays up to date."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from treejax.drafters.base import DRAWN, Draft, Shaped
from treejax.drafters.topologies import StaticTree
from treejax.shapes import Array
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Resting(Shaped):
    """Plain decoding with the memory of ``inner``, which can draft again at any step."""

    tree: StaticTree = StaticTree("root", (-1,))
    inner: Any = None

    name: ClassVar[str] = "resting"

    @property
    def proposals(self) -> str:
        return self.inner.proposals

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        return self.inner.init(model, batch, max_length)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return self.inner.prime(draft, hidden, tokens, lengths)

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, Array | None, Draft]:
        q = None
        if self.inner.proposals in DRAWN:  # a rule that reads q finds no candidate to test
            q = jnp.zeros((len(pending), 1, draft.config.vocab_size))
        return Tree.root_only(pending), q, self.inner.rest(draft, pending)

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        return self.inner.observe(draft, tree, choice, hidden)

    def rest(self, draft: Draft, pending: Array) -> Draft:
        return self.inner.rest(draft, pending)

    def learn(self, tokens: Sequence[int]) -> None:
        self.inner.learn(tokens)
