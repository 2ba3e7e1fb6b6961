"""No drafting: every tree is its root alone. Plain decoding runs the same step as any other."""

import dataclasses
from typing import Any, ClassVar

from treejax.drafters.base import Draft, Shaped
from treejax.drafters.topologies import StaticTree
from treejax.shapes import Array
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Plain(Shaped):
    """The drafter that proposes nothing."""

    tree: StaticTree = StaticTree("root", (-1,))
    name: ClassVar[str] = "plain"

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        return Draft(weights=(), memory=(), config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return draft

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, None, Draft]:
        return Tree.root_only(pending), None, draft

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        return draft
