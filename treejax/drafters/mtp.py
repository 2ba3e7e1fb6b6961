"""The MTP drafter: a fixed tree filled level by level by the model's own prediction head.

``chainK`` is the greedy chain of depth K; wider trees take several candidates at each node: the
head's best, its best under the target's own noise, or draws from its distribution.
"""

import dataclasses
from typing import Any, ClassVar

from treejax.drafters.base import Draft, Shaped
from treejax.drafters.candidates import DRAWS
from treejax.drafters.head import fill_tree
from treejax.drafters.head_cache import empty_head, observe_head, prime_head, rest_head
from treejax.drafters.topologies import Best, StaticTree
from treejax.drafters.vocabulary import check_vocabulary, head_weights
from treejax.shapes import Array
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class MTP(Shaped):
    """Drafts with the MTP head alone.

    Attributes:
      tree: any tree of fixed shape.
      draws: how the children of a node are chosen. "top": the likeliest. "coupled": the best of
        log q + the noise that the target will draw with, one noise for all nodes of a depth. "iid":
        drawn from q with replacement. "without_replacement": drawn from q one after the other.
      vocabulary: token ids that are drafted (``frequent_tokens`` counts them), None for all.
    """

    tree: str | StaticTree | Best = "chain5"
    draws: str = "top"
    # Left out of the hash, which jit takes at every call: tens of thousands of ids.
    vocabulary: tuple[int, ...] | None = dataclasses.field(default=None, hash=False, repr=False)

    name: ClassVar[str] = "mtp"

    def __post_init__(self):
        _ = self.static_shape  # refuse a tree of no fixed shape now, not while generating
        if self.draws not in DRAWS:
            raise ValueError(
                f"draws {self.draws!r} are unknown, expected one of: {', '.join(DRAWS)}"
            )
        check_vocabulary(self.name, self.vocabulary)

    @property
    def proposals(self) -> str:
        return "fixed" if self.draws == "top" else self.draws

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        widest = 1 if self.draws == "iid" else 1 + max(self.static_shape.ranks)
        weights = head_weights(self.name, model, self.vocabulary, widest)
        memory = empty_head(model.config, model.dtype, batch, max_length, self.max_depth)
        return Draft(weights=weights, memory=memory, config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return draft.replace(memory=prime_head(draft, draft.memory, hidden, tokens, lengths))

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array | None
    ) -> tuple[Tree, Array | None, Draft]:
        tree = self.static_shape
        step = None if key is None else (key, state.length)
        tokens, q, memory = fill_tree(draft, draft.memory, tree, pending, self.draws, step)
        return tree.full(tokens), q, draft.replace(memory=memory)

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        return draft.replace(memory=observe_head(draft.memory, tree, choice, hidden))

    def rest(self, draft: Draft, pending: Array) -> Draft:
        return draft.replace(memory=rest_head(draft, draft.memory, pending))
