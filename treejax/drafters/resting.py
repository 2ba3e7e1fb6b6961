"""No drafting for a while: nothing is proposed, and what a drafter knows stays up to date."""

import dataclasses
from typing import Any, ClassVar

from treejax.drafters.base import Draft, Shaped
from treejax.drafters.topologies import StaticTree
from treejax.shapes import Array
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Resting(Shaped):
    """Plain decoding with the memory of ``inner``, which can draft again at any step."""

    tree: StaticTree = StaticTree("root", (-1,))
    inner: Any = None

    name: ClassVar[str] = "resting"

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        return self.inner.init(model, batch, max_length)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return self.inner.prime(draft, hidden, tokens, lengths)

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, None, Draft]:
        return Tree.root_only(pending), None, self.inner.rest(draft, pending)

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        return self.inner.observe(draft, tree, choice, hidden)
