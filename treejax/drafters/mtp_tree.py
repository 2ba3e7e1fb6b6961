"""The best tree under a node budget, grown by the MTP head: the shape follows from the text.

A node's value is the log-probability of its path. Level by level the ``beam`` best nodes are
expanded by ``branch`` children each, and of all children the N best are verified (EAGLE-2, arXiv
2406.16858). Values fall along a path, so the best are closed under taking parents. One head pass
and one ``lm_head`` product a level, of static width, under a tree mask that is data.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from treejax import layers
from treejax.drafters.base import Draft, Shaped, refuse_tree
from treejax.drafters.best_first import Grown, best_tree
from treejax.drafters.candidates import Step, head_sampling, log_weights, target_noise, top
from treejax.drafters.head_cache import (
    HeadMemory,
    Passes,
    empty_head,
    observe_head,
    prime_head,
    rest_head,
)
from treejax.drafters.topologies import Best, StaticTree
from treejax.drafters.vocabulary import check_vocabulary, head_weights, to_tokens
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.tree import Tree

FORMS = ("conditional", "marginal")
_OUTSIDE = 4.0  # nats off for a token that the head's filters drop


@dataclasses.dataclass(frozen=True)
class MTPTree(Shaped):
    """Best-first trees of the MTP head.

    At temperature 0 the value of a child is its log-probability before any temperature, since a
    one-hot row ranks nothing; above it, that of the row that the target would draw from, with what
    the filters drop made ``1 / e**4`` as likely instead of impossible: the target's filters may
    keep it. With ``coupled`` it is log softmax(logits + temperature * noise), the noise being that
    which the target will draw with; as the temperature falls this becomes the greedy value.

    Attributes:
      tree: ``bestNxD``: at most N candidates, at most D deep; D head passes a step.
      beam: nodes expanded a level, the width of a head pass.
      branch: children looked at below each.
      form: "conditional": every node's children follow from its own path. "marginal": one row a
        depth, that of the greedy path, serves all nodes of the depth (Medusa, arXiv 2401.10774;
        DDTree, arXiv 2604.12989), and head passes are one node wide.
      coupled: rank with the target's own noise.
      vocabulary: token ids that are drafted (``frequent_tokens`` counts them), None for all.
    """

    tree: str | StaticTree | Best = "best27x10"
    beam: int = 8
    branch: int = 8
    form: str = "conditional"
    coupled: bool = False
    # Left out of the hash, which jit takes at every call: tens of thousands of ids.
    vocabulary: tuple[int, ...] | None = dataclasses.field(default=None, hash=False, repr=False)

    name: ClassVar[str] = "mtp_tree"

    def __post_init__(self):
        if self.form not in FORMS:
            raise ValueError(f"form {self.form!r} is unknown, expected one of: {', '.join(FORMS)}")
        if self.beam < 1 or self.branch < 1:
            raise ValueError(
                f"a beam of {self.beam} and a branch of {self.branch} grow nothing, "
                "expected 1 or more each"
            )
        seen = sum(width * self.branch for width in self._widths)
        if seen < self._best.nodes:
            raise ValueError(
                f"a beam of {self.beam} and a branch of {self.branch} see {seen} candidates, "
                f"too few for {self._best.name}: widen them, or ask for fewer nodes"
            )
        check_vocabulary(self.name, self.vocabulary)

    @property
    def _best(self) -> Best:
        if not isinstance(self.shape, Best):
            raise refuse_tree(self.name, "trees of the form bestNxD", self.shape)
        return self.shape

    @property
    def _widths(self) -> list[int]:
        """Nodes expanded at each depth."""
        widths = [1]
        while len(widths) < self.max_depth:
            widths.append(min(self.beam, widths[-1] * self.branch))
        return widths

    @property
    def proposals(self) -> str:
        return "coupled" if self.coupled else "fixed"

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        weights = head_weights(self.name, model, self.vocabulary, self.branch)
        memory = empty_head(model.config, model.dtype, batch, max_length, self.max_depth)
        return Draft(weights=weights, memory=memory, config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return draft.replace(memory=prime_head(draft, draft.memory, hidden, tokens, lengths))

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array | None
    ) -> tuple[Tree, None, Draft]:
        pending = pending.astype(jnp.int32)
        step = (key, state.length) if self.coupled and key is not None else None
        grown, memory = self.grow(draft, pending, step)
        pack = jax.vmap(lambda grown, pending: best_tree(grown, pending, self._best))
        return pack(grown, pending), None, draft.replace(memory=memory)

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        return draft.replace(memory=observe_head(draft.memory, tree, choice, hidden))

    def rest(self, draft: Draft, pending: Array) -> Draft:
        return draft.replace(memory=rest_head(draft, draft.memory, pending))

    def grow(self, draft: Draft, pending: Array, step: Step | None) -> tuple[Grown, HeadMemory]:
        """All candidates that the beam sees, ranked with the noise of ``step`` if there is one.

        A level's nodes are known by their place among the candidates of the level before.
        """
        passes, weights = Passes(draft, draft.memory, pending), draft.weights
        sampling, batch = head_sampling(weights, draft.sampling), len(pending)
        marginal = self.form == "marginal"
        nodes, tokens, values = jnp.full((batch, 1), -1), pending[:, None], jnp.zeros((batch, 1))
        hidden, path = passes.newest[:, None], jnp.ones((batch, 1, 1), bool)
        levels, offset = [], 0
        for depth, width in enumerate(self._widths):
            expanded = 1 if marginal else width
            outputs = passes.level(hidden, tokens[:, :expanded], depth, path)
            g = target_noise(weights, sampling, step, depth, draft.config.vocab_size)
            scores, columns = top_log(layers.logits(weights, outputs), sampling, g, self.branch)
            below = (batch, width, self.branch)
            found = jnp.broadcast_to(to_tokens(weights, columns), below)
            reached = values[:, :, None] + scores
            above = jnp.broadcast_to(nodes[:, :, None], below)
            level = Grown(*(a.reshape(batch, -1) for a in (found, reached, above)))
            levels.append(level)
            if depth + 1 == self.max_depth:
                break
            following = min(self.beam, width * self.branch)
            values, place = lax.optimization_barrier(lax.top_k(level.values, following))
            nodes, tokens = offset + place, jnp.take_along_axis(level.tokens, place, axis=1)
            offset += width * self.branch
            if marginal:
                # The best child of the best node: the next node of the greedy path, in place 0.
                hidden, path = outputs, jnp.ones((batch, 1, depth + 2), bool)
            else:
                parent = (place // self.branch)[:, :, None]
                hidden = jnp.take_along_axis(outputs, parent, axis=1)
                own = jnp.broadcast_to(jnp.eye(following, dtype=bool), (batch, *[following] * 2))
                path = jnp.concatenate([jnp.take_along_axis(path, parent, axis=1), own], axis=2)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *levels), passes.memory


def top_log(logits: Array, sampling: Sampling, g: Array | None, count: int) -> tuple[Array, Array]:
    """The ``count`` likeliest columns of each row [B, m, V]: log-probabilities, columns."""
    z, kept = log_weights(logits, sampling)
    if g is not None:
        assert sampling.temperature is not None
        greedy = sampling.temperature == 0
        z = (z + g) * jnp.where(greedy, 1.0, sampling.temperature)[:, None, None]
    if kept is not None:
        z = jnp.where(kept, z, z - _OUTSIDE)
    best, columns = top(z, count)
    return jnp.minimum(best - jax.nn.logsumexp(z, axis=-1, keepdims=True), 0.0), columns
