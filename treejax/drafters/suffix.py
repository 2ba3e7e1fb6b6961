"""The suffix drafter: what followed the last tokens when they occurred before.

Its memory is the text alone, so it serves every model. Without an earlier occurrence it proposes
nothing. Method: prompt lookup, with the counts of SuffixDecoding (arXiv 2411.04975) over the most
recent occurrences.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from treejax.drafters.base import Draft, Shaped, path_tokens, refuse_tree
from treejax.drafters.lookup import (
    Lookup,
    Matches,
    append,
    best_tree,
    empty_history,
    extend,
    look_up,
    walk,
)
from treejax.drafters.topologies import Best, Hydra, StaticTree
from treejax.shapes import Array
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Suffix(Shaped):
    """Prompt lookup with counts.

    ``tree`` is ``bestNxD`` (the N most frequent prefixes of at most D tokens) or ``chainK`` (K
    tokens along the majority's path).
    """

    tree: str | StaticTree | Best = "best16x8"
    lookup: Lookup = Lookup()

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
        return Draft(weights={}, memory=empty_history(batch, max_length), config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return draft.replace(memory=append(draft.memory, tokens, lengths))

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, None, Draft]:
        history, shape = draft.memory, self.shape

        def find(tokens: Array, length: Array, last: Array) -> Matches:
            context = extend(tokens, length, last[None])
            return look_up(context, length + 1, self.lookup, shape.max_depth)

        pending = pending.astype(jnp.int32)
        matches = jax.vmap(find)(history.tokens, history.length, pending)
        if isinstance(shape, Best):
            grow = functools.partial(best_tree, nodes=shape.nodes)
            return jax.vmap(grow)(matches, pending), None, draft
        tokens = jnp.concatenate([pending[:, None], jax.vmap(walk)(matches)], axis=1)
        return shape.supported(tokens), None, draft

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        accepted = path_tokens(tree, choice.path)
        return draft.replace(memory=append(draft.memory, accepted, choice.length))
