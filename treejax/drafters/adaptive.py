"""An adaptive mix: depth where a long match can be copied, width of the MTP head elsewhere.

Head and lookup fill one pool and a node's value is the product of the chances along its path: the
head's own probabilities, and for copies what ``trust`` measured. The N largest values are verified,
so that a long trusted match takes the budget as a deep chain and leaves it to the head's width
otherwise. Head passes that a match makes superfluous may be left out.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from treejax.drafters import trust
from treejax.drafters.base import Draft
from treejax.drafters.committed import Committed, extend
from treejax.drafters.head_cache import Passes
from treejax.drafters.lookup import Lookup, Matches, find_best
from treejax.drafters.merge import join, merge
from treejax.drafters.prefixes import Pool, best_first, chain_score, prefix_pool, tree_score, walk
from treejax.drafters.spine import Spine, draft_spine
from treejax.drafters.topologies import Best
from treejax.drafters.trust import Copies, Trust
from treejax.shapes import Array
from treejax.tree import Tree

CONDITIONAL = "conditional"


@dataclasses.dataclass(frozen=True)
class Mix:
    """Settings of the adaptive mix.

    Attributes:
      width: the head's candidates at every depth of its spine.
      few, most: head passes that "conditional" makes in any case, and at most.
      covered: tokens that must have matched in every sequence for "conditional" to make few.
      decay: what a step leaves of the earlier counts of a bucket of ``trust``.
    """

    width: int = 3
    few: int = 3
    most: int = 5
    covered: int = 6
    decay: float = 0.98

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"a mix of width {self.width} has no head, expected 1 or more")
        if not 1 <= self.few <= self.most:
            raise ValueError(
                f"a mix of {self.few} to {self.most} head passes is impossible, "
                "expected 1 <= few <= most"
            )
        if self.covered < 1:
            raise ValueError(f"covered is {self.covered}, expected 1 or more tokens")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay is {self.decay}, expected more than 0 and at most 1")


class MixMemory(struct.PyTreeNode):
    """What the mix knows beside the head's cache and the text.

    Attributes:
      trust: counts by sequence.
      copies: what the last proposal copied below the pending token, [B, ..].
      active: [B] bool, who took part in the last step; the others decide nothing.
      made: [] int32 head passes of the last proposal.
      passes, steps: [] int32 head passes made so far, and steps.
    """

    trust: Trust
    copies: Copies
    active: Array
    made: Array
    passes: Array
    steps: Array


def empty_mix(batch: int, lookup: Lookup, depth: int) -> MixMemory:
    copies = Copies(
        tokens=jnp.full((batch, depth), -1, jnp.int32),
        ratios=jnp.zeros((batch, depth), jnp.float32),
        length=jnp.zeros(batch, jnp.int32),
        several=jnp.zeros((batch, depth), bool),
    )
    return MixMemory(
        trust=trust.no_trust(batch, lookup.longest),
        copies=copies,
        active=jnp.ones(batch, bool),
        made=jnp.zeros((), jnp.int32),  # arrays of their own: the loop donates every one
        passes=jnp.zeros((), jnp.int32),
        steps=jnp.zeros((), jnp.int32),
    )


def propose_mix(
    draft: Draft,
    passes: Passes,
    text: Committed,
    memory: MixMemory,
    pending: Array,
    shape: Best,
    lookup: Lookup,
    mix: Mix,
    least: int,
    most: int,
) -> tuple[Tree, MixMemory]:
    """Trees below ``pending`` [B] with ``least`` to ``most`` head passes."""
    depth = shape.depth
    bias = None if draft.sampling is None else draft.sampling.logit_bias

    def find(tokens: Array, length: Array, extra: Array, count: Array, tree: bool) -> Matches:
        def score(group: Matches) -> Array:
            return tree_score(group, lookup, shape.nodes) if tree else chain_score(group, lookup)

        context = extend(tokens, length, extra)
        return find_best(context, length + count, lookup, depth, score, draft.weights)

    def at_root(tokens: Array, length: Array, pending: Array) -> tuple[Matches, Copies]:
        matches = find(tokens, length, pending[None], jnp.int32(1), tree=True)
        return matches, copy_of(matches, lookup.least_value)

    root, copies = jax.vmap(at_root)(text.tokens, text.length, pending)
    if bias is not None:
        copies = jax.vmap(_up_to_banned)(copies, bias)
    deep = (memory.active & (copies.length < mix.covered)).any()
    spine = draft_spine(draft, passes, pending, mix.width, most, least, deep)

    def below(tokens: Array, length: Array, extra: Array, count: Array) -> Copies:
        return copy_of(find(tokens, length, extra, count, tree=False), lookup.least_value)

    paths, counts = _paths(spine, pending)
    chains = jax.vmap(jax.vmap(below, in_axes=(None, None, 0, 0)), in_axes=(0, 0, 0, None))
    chained = chains(text.tokens, text.length, paths, counts)

    def grow(
        matches: Matches,
        chained: Copies,
        tokens: Array,
        chances: Array,
        counts: Trust,
        pending: Array,
        bias: Array | None,
    ) -> Tree:
        one = Spine(tokens=tokens, chances=chances, passes=spine.passes)
        factor = trust.factors(counts)
        pool = _pool(matches, chained, one, factor, depth, lookup.least_value)
        if bias is not None:  # lookups know nothing of bans
            pool = pool.replace(value=jnp.where(_banned(pool.tokens, bias), -1.0, pool.value))
        return best_first(merge(pool, depth), pending, shape.nodes, depth)

    found = (root, chained, spine.tokens, spine.chances, memory.trust, pending, bias)
    tree = jax.vmap(grow)(*found)
    return tree, memory.replace(copies=copies, made=spine.passes)


def observe_mix(memory: MixMemory, truth: Array, count: Array, decay: float) -> MixMemory:
    """Learn from what a step emitted: the first ``count`` [B] tokens of ``truth`` [B, P]."""
    depth = memory.copies.tokens.shape[1]
    room = jnp.pad(truth, ((0, 0), (0, depth)), constant_values=-1)[:, :depth]
    counts = jax.vmap(lambda t, c, x, n: trust.learn(t, c, x, n, decay))(
        memory.trust, memory.copies, room, count
    )
    active = count > 0
    some = active.any()
    return memory.replace(
        trust=counts,
        active=active,
        passes=memory.passes + jnp.where(some, memory.made, 0),
        steps=memory.steps + some.astype(jnp.int32),
    )


def rest_mix(memory: MixMemory) -> MixMemory:
    """Before a step without a proposal: no copies whose truth it could tell, and no passes."""
    nothing = jnp.full_like(memory.copies.tokens, -1)
    copies = memory.copies.replace(tokens=nothing)
    return memory.replace(copies=copies, made=jnp.zeros_like(memory.made))


def copy_of(matches: Matches, least_value: float) -> Copies:
    """The majority's path through one sequence's matches."""
    tokens, votes = walk(matches, least_value)
    before = jnp.concatenate([matches.count[None], votes[:-1]])
    ratios = votes.astype(jnp.float32) / jnp.maximum(before, 1).astype(jnp.float32)
    return Copies(tokens=tokens, ratios=ratios, length=matches.length, several=before > 1)


def _banned(tokens: Array, bias: Array) -> Array:
    """Which of the tokens, -1 where there is none, the target can never draw: bias [V]."""
    return (tokens >= 0) & (bias[jnp.maximum(tokens, 0)] == -jnp.inf)


def _up_to_banned(copies: Copies, bias: Array) -> Copies:
    """Copies end before the first banned token: what is not proposed teaches nothing."""
    ended = jnp.cumsum(_banned(copies.tokens, bias).astype(jnp.int32)) > 0
    return copies.replace(tokens=jnp.where(ended, -1, copies.tokens))


def _paths(spine: Spine, pending: Array) -> tuple[Array, Array]:
    """Contexts to continue, from the pending token on: [B, 1 + R, D + 1] and their lengths.

    The whole spine, and each of the root's runners-up.
    """
    batch, most, width = spine.tokens.shape
    whole = jnp.concatenate([pending[:, None], spine.tokens[:, :, 0]], axis=1)
    runners = jnp.stack(
        [jnp.broadcast_to(pending[:, None], (batch, width - 1)), spine.tokens[:, 0, 1:]], axis=2
    )
    runners = jnp.pad(runners, ((0, 0), (0, 0), (0, most - 1)), constant_values=-1)
    short = jnp.full(width - 1, 2, jnp.int32)
    counts = jnp.concatenate([1 + spine.passes[None], short])
    return jnp.concatenate([whole[:, None], runners], axis=1), counts


def _pool(
    matches: Matches,
    chained: Copies,
    spine: Spine,
    factor: Array,
    depth: int,
    least_value: float,
) -> Pool:
    """All candidates of one sequence with their chances: spine, copies below it, copies at once."""
    most, width = spine.tokens.shape
    above = jnp.arange(-1, most - 1, dtype=jnp.int32)[:, None] * width
    parent = jnp.broadcast_to(jnp.where(above < 0, -1, above), (most, width))
    head = Pool(spine.tokens.reshape(-1), parent.reshape(-1), spine.chances.reshape(-1))

    steps = jnp.arange(depth, dtype=jnp.int32)
    parts, start = [head], most * width
    for i in range(width):  # below the spine, then below the root's runners-up
        copies = jax.tree.map(lambda x, i=i: x[i], chained)
        value = trust.chances(factor, copies.ratios, copies.length + steps, copies.several)
        end = spine.passes if i == 0 else jnp.int32(1)
        hangs = (end - 1) * width if i == 0 else jnp.int32(i)
        real = (copies.tokens >= 0) & (end + steps < depth)
        linked = jnp.where(steps == 0, hangs, start + steps - 1)
        parts.append(Pool(copies.tokens, linked, jnp.where(real, value, -1.0)))
        start += depth
    parts.append(_copied_tree(matches, factor, least_value, start))
    return join(*parts)


def _copied_tree(matches: Matches, factor: Array, least_value: float, start: int) -> Pool:
    """Every prefix of the root's matches, with its chance given the one above it."""
    pool = prefix_pool(matches, least_value)
    seen = jnp.where(pool.parent < 0, 1.0, pool.value[jnp.maximum(pool.parent, 0)])
    ratios = jnp.where(pool.value >= 0, pool.value / jnp.maximum(seen, 1e-6), 0.0)
    several = jnp.round(seen * matches.count.astype(jnp.float32)) > 1
    step = jnp.arange(pool.tokens.shape[0], dtype=jnp.int32) % matches.tokens.shape[1]
    value = trust.chances(factor, ratios, matches.length + step, several)
    parent = jnp.where(pool.parent < 0, -1, start + pool.parent)
    return Pool(pool.tokens, parent, jnp.where(pool.value >= 0, value, -1.0))
