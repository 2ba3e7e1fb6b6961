"""The scripted drafter: proposes a known continuation with a known number of right tokens.

For tests and controlled ablations, where acceptance is an input and not an outcome. Either a
``schedule`` of (levels proposed, right tokens) is cycled through, or each depth is right with a
given probability, drawn from the key. A step may propose nothing. Right tokens lie on a path that
changes from step to step, so accepted nodes are scattered over the rows of a wide tree.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax.drafters.base import Draft, Shaped
from treejax.drafters.topologies import Best, StaticTree
from treejax.sampling import SCRIPT, Sampling, noise, per_sequence
from treejax.shapes import Array
from treejax.tree import Tree


class Script(struct.PyTreeNode):
    """emitted [B]: committed tokens since the prompt; step [B]: proposals observed."""

    emitted: Array
    step: Array


@dataclasses.dataclass(frozen=True)
class Scripted(Shaped):
    """Proposes from the answer.

    Attributes:
      tree: any tree of fixed shape.
      truth: per sequence the tokens that follow its prompt, the first pending token first. A
        sequence without one proposes nothing, and nothing is proposed past the end of one.
      schedule: cycled (levels proposed, right tokens) a step: the tree cut at that depth, with
        exactly that many right tokens on one path from the root and no others.
      probability: instead of a schedule, the chance that a depth is right given those above it;
        depths beyond the last are never right. The whole tree is proposed.
    """

    tree: str | StaticTree | Best = "chain4"
    truth: tuple[tuple[int, ...], ...] = ()
    schedule: tuple[tuple[int, int], ...] | None = None
    probability: tuple[float, ...] | None = None

    name: ClassVar[str] = "scripted"

    def __post_init__(self):
        shape = self.static_shape
        if not self.truth:
            raise ValueError(
                "drafter 'scripted' needs the true continuation of each prompt: "
                "pass an object, Scripted(truth=..., schedule=...)"
            )
        if bool(self.schedule) == bool(self.probability):
            raise ValueError("drafter 'scripted' needs either a schedule or a probability")
        for proposed, right in self.schedule or ():
            if not 0 <= right <= proposed <= shape.max_depth:
                raise ValueError(
                    f"schedule entry {(proposed, right)} is impossible in {shape.name!r}, "
                    f"expected 0 <= right <= proposed <= {shape.max_depth}"
                )
        if not all(0.0 <= chance <= 1.0 for chance in self.probability or ()):
            raise ValueError(f"probability {self.probability} must lie between 0 and 1")

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        vocabulary, widest = model.config.vocab_size, 1 + max(self.static_shape.ranks)
        largest = max((token for row in self.truth for token in row), default=0)
        if len(self.truth) > batch:
            raise ValueError(
                f"drafter 'scripted' has {len(self.truth)} continuations for {batch} sequences"
            )
        if largest >= vocabulary or widest >= vocabulary:
            raise ValueError(
                f"drafter 'scripted' has token {largest} and {widest} siblings, expected both "
                f"below the vocabulary of {vocabulary}"
            )
        truth = np.full((batch, max(map(len, self.truth)) + self.max_depth + 1), -1, np.int32)
        for row, tokens in zip(truth, self.truth, strict=False):
            row[: len(tokens)] = tokens
        memory = Script(emitted=jnp.zeros(batch, jnp.int32), step=jnp.zeros(batch, jnp.int32))
        return Draft(weights=jnp.asarray(truth), memory=memory, config=model.config)

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return draft

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, None, Draft]:
        shape, script = self.static_shape, draft.memory
        proposed, right = self._plan(script.step, state.length, key)
        routes, counts = map(jnp.asarray, self._routes)
        route = routes[right, script.step % counts[right]]

        depth, rank = jnp.array(shape.depths), jnp.array(shape.ranks)
        place = script.emitted[:, None] + depth[None, :]
        answer = jnp.take_along_axis(draft.weights, place, axis=1, mode="clip")
        wrong = (answer + 1 + rank[None, :]) % draft.config.vocab_size
        tokens = jnp.where(route, answer, wrong)
        offered = (answer >= 0) & (depth[None, :] <= proposed[:, None])
        tokens = jnp.where(offered, tokens, -1).at[:, 0].set(pending.astype(jnp.int32))
        return shape.supported(tokens), None, draft

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        script = draft.memory
        script = script.replace(
            emitted=script.emitted + choice.length,
            step=script.step + (choice.length > 0).astype(jnp.int32),
        )
        return draft.replace(memory=script)

    def _plan(self, step: Array, length: Array, key: Array) -> tuple[Array, Array]:
        """How many levels to propose and how many right tokens: each [B]."""
        if self.schedule is not None:
            entry = jnp.array(self.schedule, jnp.int32)[step % len(self.schedule)]
            return entry[:, 0], entry[:, 1]
        chance = np.zeros(self.max_depth, np.float32)
        given = (self.probability or ())[: self.max_depth]
        chance[: len(given)] = given
        _, keys, position = per_sequence(len(step), Sampling(temperature=1.0), key, length)

        def draw(key: Any, position: Any) -> Array:
            return noise(key, position, self.max_depth, purpose=SCRIPT)

        uniform = jnp.exp(-jnp.exp(-jax.vmap(draw)(keys, position)))  # noise is Gumbel's
        lucky = (uniform <= chance[None, :]) & (chance > 0)[None, :]
        right = jnp.cumprod(lucky.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        return jnp.full_like(right, self.max_depth), right

    @functools.cached_property
    def _routes(self) -> tuple[np.ndarray, np.ndarray]:
        """Paths to every node of a depth, as row masks [D + 1, most, N], and how many they are."""
        shape = self.static_shape
        ends = [
            [row for row in range(shape.capacity) if shape.depths[row] == depth]
            for depth in range(shape.max_depth + 1)
        ]
        routes = np.zeros((len(ends), max(map(len, ends)), shape.capacity), bool)
        for depth, rows in enumerate(ends):
            for i, row in enumerate(rows):
                routes[depth, i, list(shape.path(row))] = True
        return routes, np.array([len(rows) for rows in ends], np.int32)
