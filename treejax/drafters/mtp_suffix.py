"""The MTP head together with prompt lookup, in fixed roles or by what each is worth.

``hydra`` trees have fixed roles, as LumoTree's drafter has (arXiv 2609.23900): the head fills a
spine of its first choices with its runners-up beside them; what followed the context (text, pending
token and spine) when it occurred before becomes the spine's tail, and likewise below the root's
runners-up. ``bestNxD`` trees are adaptive: see ``adaptive``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct

from treejax.drafters.adaptive import (
    CONDITIONAL,
    Mix,
    MixMemory,
    empty_mix,
    observe_mix,
    propose_mix,
    rest_mix,
)
from treejax.drafters.base import Draft, Shaped, path_tokens, refuse_tree
from treejax.drafters.committed import Committed, append, no_text
from treejax.drafters.head import draft_tokens
from treejax.drafters.head_cache import (
    HeadMemory,
    Passes,
    empty_head,
    observe_head,
    prime_head,
    rest_head,
)
from treejax.drafters.lookup import Lookup
from treejax.drafters.store import ResponseStore, store_weights
from treejax.drafters.tails import fill_tails
from treejax.drafters.topologies import Best, Hydra, StaticTree
from treejax.drafters.vocabulary import check_vocabulary, head_weights
from treejax.shapes import Array
from treejax.tree import Tree

MOST_PASSES = 5


class HybridMemory(struct.PyTreeNode):
    """The head's cache and the text, about the same committed tokens; ``mix`` if adaptive."""

    head: HeadMemory
    text: Committed
    mix: MixMemory | None


@dataclasses.dataclass(frozen=True)
class MTPSuffix(Shaped):
    """Head and lookup in one tree.

    Attributes:
      tree: a hydra with a tail or rescue chains, or ``bestNxD``: at most N candidates in any shape.
      lookup, store: what is copied, from the text itself and from earlier responses, as they were
        when a generation begins.
      passes: head passes a step of a ``bestNxD`` tree: a number, or "conditional" for ``mix.most``
        only where a match covers less than ``mix.covered`` tokens, and ``mix.few`` otherwise. None
        is 5, or D if that is less; a hydra's spine says it by itself.
      mix: how a ``bestNxD`` tree weighs its sources; None for the defaults.
      vocabulary: token ids that the head drafts (``frequent_tokens`` counts them), None for all.
    """

    tree: str | StaticTree | Best = "hydra8"
    lookup: Lookup = Lookup()
    store: ResponseStore | None = None
    passes: int | str | None = None
    mix: Mix | None = None
    # Left out of the hash, which jit takes at every call: tens of thousands of ids.
    vocabulary: tuple[int, ...] | None = dataclasses.field(default=None, hash=False, repr=False)

    name: ClassVar[str] = "mtp+suffix"

    def __post_init__(self):
        shape = self.shape
        if isinstance(shape, Best):
            places = self._places(shape)
            if shape.nodes > places:
                raise ValueError(
                    f"tree {shape.name!r} has more nodes than the {places} that {self._passes[1]} "
                    f"head passes of width {self._mix.width} and {self.lookup.matches} matches can "
                    "fill; raise matches or the mix's width, or choose a smaller tree"
                )
        elif not isinstance(shape, Hydra) or not (shape.tail or shape.rescue):
            takes = "bestNxD or hydra trees, such as hydra27 or hydra3x2+4/2"
            raise refuse_tree(self.name, takes, shape)
        elif self.passes is not None or self.mix is not None:
            raise ValueError(
                f"tree {shape.name!r} has fixed roles and as many head passes as its spine is "
                "long: passes and mix have no effect, leave them out or take a bestNxD tree"
            )
        check_vocabulary(self.name, self.vocabulary)

    @property
    def _mix(self) -> Mix:
        return Mix() if self.mix is None else self.mix

    @property
    def _passes(self) -> tuple[int, int]:
        """Head passes of an adaptive tree, at least and at most."""
        mix, depth = self._mix, self.max_depth
        if self.passes == CONDITIONAL:
            if mix.most > depth:
                raise ValueError(
                    f"{mix.most} head passes are too many for {self.shape.name!r}, "
                    f"expected at most {depth}; lower mix.most or take a deeper tree"
                )
            if mix.covered > self.lookup.longest:
                raise ValueError(
                    f"matches of {mix.covered} tokens never occur in lookups of at most "
                    f"{self.lookup.longest}; lower mix.covered or raise lookup.longest"
                )
            return mix.few, mix.most
        count = min(MOST_PASSES, depth) if self.passes is None else self.passes
        if not isinstance(count, int) or not 1 <= count <= depth:
            raise ValueError(
                f"passes is {count!r}, expected {CONDITIONAL!r} or a number from 1 to {depth} "
                f"for {self.shape.name!r}"
            )
        return count, count

    def _places(self, shape: Best) -> int:
        """Candidates at most: the head's, copies below its spine and runners-up, and copies."""
        width, most, depth = self._mix.width, self._passes[1], shape.depth
        below = depth - most + (width - 1) * (depth - 1)
        return width * most + below + self.lookup.matches * depth

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        adaptive = isinstance(self.shape, Best)
        widest = self._mix.width if adaptive else 1 + max(self.static_shape.ranks)
        weights = head_weights(self.name, model, self.vocabulary, widest)
        head = empty_head(model.config, model.dtype, batch, max_length, self.max_depth)
        mix = empty_mix(batch, self.lookup, self.max_depth) if adaptive else None
        memory = HybridMemory(head=head, text=no_text(batch, max_length), mix=mix)
        weights |= store_weights(self.store)
        return Draft(weights=weights, memory=memory, config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        memory = draft.memory
        head = prime_head(draft, memory.head, hidden, tokens, lengths)
        text, mix = append(memory.text, tokens, lengths), memory.mix
        if mix is not None:
            mix = mix.replace(active=mix.active | (lengths > 0))
        return draft.replace(memory=HybridMemory(head=head, text=text, mix=mix))

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array | None
    ) -> tuple[Tree, None, Draft]:
        memory, pending = draft.memory, pending.astype(jnp.int32)
        if isinstance(shape := self.shape, Best):
            passes = Passes(draft, memory.head, pending)
            known = (memory.text, memory.mix, pending)
            settings = (shape, self.lookup, self._mix, *self._passes)
            tree, mix = propose_mix(draft, passes, *known, *settings)
            return tree, None, draft.replace(memory=memory.replace(head=passes.memory, mix=mix))
        assert isinstance(shape, Hydra)
        near = Hydra(shape.spine, shape.width)
        drafted, head = draft_tokens(draft, memory.head, near, pending)
        tokens = jnp.full((len(pending), shape.capacity), -1, jnp.int32)
        tokens = tokens.at[:, jnp.array(shape.near_rows)].set(drafted)
        tokens = fill_tails(draft, memory.text, tokens, shape, self.lookup)
        return shape.supported(tokens), None, draft.replace(memory=memory.replace(head=head))

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        memory = draft.memory
        head = observe_head(memory.head, tree, choice, hidden)
        accepted = path_tokens(tree, choice.path)
        text, mix = append(memory.text, accepted, choice.length), memory.mix
        if mix is not None:
            emitted, _ = choice.emitted(tree)
            mix = observe_mix(mix, emitted, choice.length, self._mix.decay)
        return draft.replace(memory=HybridMemory(head=head, text=text, mix=mix))

    def rest(self, draft: Draft, pending: Array) -> Draft:
        head = rest_head(draft, draft.memory.head, pending)
        mix = draft.memory.mix if draft.memory.mix is None else rest_mix(draft.memory.mix)
        return draft.replace(memory=draft.memory.replace(head=head, mix=mix))

    def learn(self, tokens: Sequence[int]) -> None:
        if self.store is not None:
            self.store.learn(tokens)
