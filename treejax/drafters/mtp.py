"""The MTP drafter: a fixed tree filled level by level by the model's own prediction head.

``chainK`` is the greedy chain of depth K; wider trees take the head's top candidates at each node.
"""

import dataclasses
from typing import Any, ClassVar

from treejax.drafters.base import Draft, Shaped
from treejax.drafters.head import (
    draft_tokens,
    empty_head,
    head_weights,
    observe_head,
    prime_head,
)
from treejax.drafters.topologies import Best, StaticTree
from treejax.shapes import Array
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class MTP(Shaped):
    """Drafts with the MTP head alone. ``tree``: any tree of fixed shape."""

    tree: str | StaticTree | Best = "chain5"

    name: ClassVar[str] = "mtp"

    def __post_init__(self):
        _ = self.static_shape  # refuse a tree of no fixed shape now, not while generating

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        weights = head_weights(self.name, model)
        memory = empty_head(model.config, model.dtype, batch, max_length, self.max_depth)
        return Draft(weights=weights, memory=memory, config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return draft.replace(memory=prime_head(draft, draft.memory, hidden, tokens, lengths))

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, None, Draft]:
        tree = self.static_shape
        tokens, memory = draft_tokens(draft, draft.memory, tree, pending)
        return tree.full(tokens), None, draft.replace(memory=memory)

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        return draft.replace(memory=observe_head(draft.memory, tree, choice, hidden))
