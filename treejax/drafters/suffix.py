"""The suffix drafter: what followed the last tokens when they occurred before.

Its memory is the text alone, so it serves every model. Without an earlier occurrence it proposes
nothing. Method: prompt lookup, with the counts of SuffixDecoding (arXiv 2411.04975) over the most
recent occurrences in the request's own text and, if a store is given, in earlier responses.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from treejax.drafters.base import Draft, Shaped, path_tokens, refuse_tree
from treejax.drafters.committed import append, extend, no_text
from treejax.drafters.lookup import Lookup, Matches, find_best
from treejax.drafters.prefixes import best_first, chain_score, prefix_pool, tree_score, walk
from treejax.drafters.store import ResponseStore, store_weights
from treejax.drafters.topologies import Best, Hydra, StaticTree
from treejax.shapes import Array
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Suffix(Shaped):
    """Prompt lookup with counts.

    ``tree`` is ``bestNxD`` (the N most frequent prefixes of at most D tokens) or ``chainK`` (K
    tokens along the majority's path). ``store`` holds earlier responses, as they were when a
    generation begins; between it and the request's own text the better score decides.
    """

    tree: str | StaticTree | Best = "best16x8"
    lookup: Lookup = Lookup()
    store: ResponseStore | None = None

    name: ClassVar[str] = "suffix"

    def __post_init__(self):
        shape, most = self.shape, self.lookup.matches
        if isinstance(shape, Best):
            if shape.nodes > most * shape.depth:
                raise ValueError(
                    f"tree {shape.name!r} has more nodes than {most} matches of {shape.depth} "
                    "tokens can fill; raise matches or choose a smaller tree"
                )
        elif not (isinstance(shape, Hydra) and shape.capacity == 1 + shape.spine):
            raise refuse_tree(self.name, "bestNxD or chainK", shape)

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        weights = store_weights(self.store)
        return Draft(weights=weights, memory=no_text(batch, max_length), config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return draft.replace(memory=append(draft.memory, tokens, lengths))

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, None, Draft]:
        pending, least = pending.astype(jnp.int32), self.lookup.least_value
        if isinstance(shape := self.shape, Best):
            matches = self._find(
                draft, pending, lambda found: tree_score(found, self.lookup, shape.nodes)
            )

            def grow(found: Matches, pending: Array) -> Tree:
                return best_first(prefix_pool(found, least), pending, shape.nodes, shape.depth)

            return jax.vmap(grow)(matches, pending), None, draft
        matches = self._find(draft, pending, lambda found: chain_score(found, self.lookup))
        tokens, _ = jax.vmap(lambda found: walk(found, least))(matches)
        return shape.supported(jnp.concatenate([pending[:, None], tokens], axis=1)), None, draft

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        accepted = path_tokens(tree, choice.path)
        return draft.replace(memory=append(draft.memory, accepted, choice.length))

    def learn(self, tokens: Sequence[int]) -> None:
        if self.store is not None:
            self.store.learn(tokens)

    def _find(self, draft: Draft, pending: Array, score: Callable[[Matches], Array]) -> Matches:
        """The matches of every sequence that decide its tree, with a leading axis B."""

        def find(text: Array, length: Array, last: Array) -> Matches:
            context, length = extend(text, length, last[None]), length + 1
            return find_best(context, length, self.lookup, self.max_depth, score, draft.weights)

        return jax.vmap(find)(draft.memory.tokens, draft.memory.length, pending)
