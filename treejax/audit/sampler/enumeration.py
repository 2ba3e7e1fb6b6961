"""Every outcome of one step on a small tree, in float64: nothing is sampled.

What a drafter may draw is enumerated with its exact chance; the rule is the shipped code, given
every pattern of coins and every last token; what a step leaves open is completed by plain decoding.
The result is the joint law of depth + 1 tokens, and its total variation from plain decoding's is 0
for a lossless rule, up to the rounding of float64 sums.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from treejax.shapes import Array
from treejax.steps.rules.base import CoinRule, Law, decide
from treejax.steps.rules.match import Match, walk
from treejax.tree import Tree

EXACT = 1e-12
"""Total variation that rounding may leave: float64 sums of up to millions of terms."""

LawOf = Callable[[Tree, Array, Array | None], Law]


def ordered_trees(rows: int) -> list[list[int]]:
    """Parents of every rooted ordered tree of so many rows, parents first: Catalan(rows - 1)."""
    grown = [([-1], [0])]
    for row in range(1, rows):
        grown = [
            ([*parents, spine[depth]], [*spine[: depth + 1], row])
            for parents, spine in grown
            for depth in range(len(spine))  # below any row of the path to the newest one
        ]
    return [parents for parents, _ in grown]


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every row; parents come first."""
    found = [0]
    for above in parents[1:]:
        found.append(found[above] + 1)
    return found


@dataclasses.dataclass(frozen=True)
class Toy:
    """p and q of the next token for every context of at most D tokens: [contexts, V] each.

    Contexts are ordered by length and then as numbers to base V.
    """

    p: np.ndarray
    q: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, vocabulary: int, depth: int, gaps: float = 0.15):
        """Dirichlet rows in which a share ``gaps`` of the probabilities is 0."""

        def rows() -> np.ndarray:
            count = _offsets(vocabulary, depth)[-1]
            made = rng.dirichlet(np.ones(vocabulary), count)
            made = made * (rng.random(made.shape) >= gaps)
            made[made.sum(axis=1) == 0] = 1.0
            return made / made.sum(axis=1, keepdims=True)

        return cls(rows(), rows())

    @classmethod
    def constant(cls, p: np.ndarray, q: np.ndarray, depth: int):
        """The same two rows in every context."""
        shape = (_offsets(len(p), depth)[-1], len(p))
        return cls(np.broadcast_to(p, shape), np.broadcast_to(q, shape))

    @property
    def vocabulary(self) -> int:
        return self.p.shape[1]

    def completed(self, ended: Sequence[np.ndarray], start: float = 0.0) -> np.ndarray:
        """[V ** n] joint law of n tokens; ``ended[i]`` ends after i + 1 of them."""
        offsets, joint = _offsets(self.vocabulary, len(ended) - 1), np.array([start])
        for length, mass in enumerate(ended):
            rows = self.p[offsets[length] : offsets[length + 1]]
            joint = (joint[:, None] * rows).ravel() + mass
        return joint

    def plain(self, tokens: int) -> np.ndarray:
        """[V ** tokens] joint law of plain decoding."""
        return self.completed([np.zeros(self.vocabulary ** (n + 1)) for n in range(tokens)], 1.0)


def _offsets(vocabulary: int, depth: int) -> list[int]:
    """Where the contexts of each length begin, and how many there are."""
    return list(itertools.accumulate((vocabulary**n for n in range(depth + 1)), initial=0))


def every_draft(
    toy: Toy, parents: Sequence[int], proposals: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All drafts of a tree: tokens [M, n], contexts of the rows [M, n], chances [M].

    ``parents`` lists parents first and siblings as drawn. Without replacement, once nothing of q is
    left, tokens come evenly: no rule may accept them. "fixed" gives every draft the same chance.
    """
    size, vocabulary = len(parents), toy.vocabulary
    below = np.array(list(itertools.product(range(vocabulary), repeat=size - 1)), np.int32)
    tokens = np.pad(below.reshape(vocabulary ** (size - 1), size - 1), ((0, 0), (1, 0)))
    offsets, depth = _offsets(vocabulary, max(depths(parents))), depths(parents)
    each, code = np.arange(len(tokens)), np.zeros(tokens.shape, np.int64)
    context, chance, left = np.zeros(tokens.shape, np.int64), np.ones(len(tokens)), {}
    for row in range(size):
        if row:
            above, token = parents[row], tokens[:, row]
            code[:, row] = code[:, above] * vocabulary + token
            context[:, row] = offsets[depth[row]] + code[:, row]
            total = left[above].sum(axis=1)
            some = total > EXACT
            share = left[above][each, token] / np.where(some, total, 1.0)
            chance *= np.where(some, share, 1 / vocabulary)
            if proposals == "without_replacement":
                left[above][each, token] = 0.0
        left[row] = toy.q[context[:, row]].copy()
    if proposals not in ("iid", "without_replacement"):
        chance = np.full(len(tokens), 1 / len(tokens))
    return tokens, context, chance


@functools.cache
def _tossed(law: LawOf) -> Callable[..., tuple[Array, Array, Array]]:
    """(tree, tokens [M, N], p, q [M, N, V]) -> chance, length and code of every outcome.

    Outcomes are [M, patterns of coins, last token]; the code writes what is emitted to base V.
    """

    @jax.jit
    def outcomes(tree: Tree, tokens: Array, p: Array, q: Array):
        rows, vocabulary = p.shape[1:]
        patterns = np.array(list(itertools.product([True, False], repeat=rows - 1)), bool)
        patterns = jnp.asarray(np.pad(patterns, ((0, 0), (1, 0)), constant_values=True))
        forced = jnp.where(jnp.eye(vocabulary, dtype=bool), 0.0, -jnp.inf)

        def of_draft(tokens: Array, p: Array, q: Array):
            own = tree.replace(tokens=tokens)
            ruled = law(own, p, q)

            def of_pattern(passes: Array):
                weight = jnp.where(passes, ruled.chance, 1 - ruled.chance).at[0].set(1.0).prod()
                coin = jnp.where(passes, ruled.chance / 2, (1 + ruled.chance) / 2)
                coin = jnp.where(ruled.chance >= 1, 0.5, coin)  # no coin is 1: this one passes
                choice = jax.vmap(lambda gumbel: decide(own, ruled, coin, gumbel))(forced)
                last = ruled.weights[choice.path[0, choice.length[0] - 1]]
                code = jax.vmap(
                    lambda path, length, last: _code(own, path, length, last, vocabulary)
                )(choice.path, choice.length, choice.pending)
                return weight * last, choice.length, code

            return jax.vmap(of_pattern)(patterns)

        return jax.vmap(of_draft)(tokens, p, q)

    return outcomes


@functools.partial(jax.jit, static_argnames="vocabulary")
def _followed(tree: Tree, tokens: Array, draws: Array, vocabulary: int) -> tuple[Array, Array]:
    """Length and code of what ``match`` emits, [M, K]: drafts [M, N], draws of all rows [K, N]."""

    def one(tokens: Array, y: Array):
        own = tree.replace(tokens=tokens)
        choice = walk(own, lambda node, _depth, _context: y[node])
        return choice.length, _code(own, choice.path, choice.length, choice.pending, vocabulary)

    return jax.vmap(lambda t: jax.vmap(lambda y: one(t, y))(draws))(tokens)


def _code(tree: Tree, path: Array, length: Array, pending: Array, vocabulary: int) -> Array:
    code = jnp.int32(0)
    for place in range(1, path.shape[0]):
        longer = code * vocabulary + tree.tokens[path[place]]
        code = jnp.where(place < length, longer, code)
    return code * vocabulary + pending


def packed(
    parents: Sequence[int], capacity: int, rng: np.random.Generator
) -> tuple[Tree, np.ndarray]:
    """One tree of those parents in a random packing, without a batch axis, and its order of rows.

    ``order[i]`` is the row of ``parents`` that went to row i. Ranks stay those of ``parents``.
    """
    order = np.concatenate([[0], 1 + rng.permutation(len(parents) - 1)]).astype(int)
    place = np.argsort(order)
    moved = [-1 if parents[old] < 0 else int(place[parents[old]]) for old in order]
    ranks = np.array([list(parents[:row]).count(parents[row]) for row in range(len(parents))])
    tree = Tree.from_parents(np.zeros(len(moved), int), moved, capacity=capacity, unique=False)
    ranks = np.pad(ranks[order], (0, capacity - len(moved)))[None]
    tree = tree.replace(rank=jnp.asarray(ranks, jnp.int32))
    return jax.tree.map(lambda x: x[0], tree), order


def coin_distance(
    law: LawOf,
    proposals: str,
    toy: Toy,
    parents: Sequence[int],
    rng: np.random.Generator,
    capacity: int | None = None,
) -> float:
    """Total variation of one step of a rule with coins from plain decoding.

    Args:
      law: ``CoinRule.law`` of the rule, or a faulty one.
      proposals: how the drafter draws: "iid", "without_replacement", or "fixed" for every draft
        with the same chance.
      toy: of at least the tree's depth, with as many tokens as are wanted.
      capacity: rows of the tree, so that several trees share one program.
    """
    capacity = len(parents) if capacity is None else capacity
    tokens, context, chance = every_draft(toy, parents, proposals)
    tree, order = packed(parents, capacity, rng)
    room = toy.vocabulary ** (capacity - 1) - len(tokens)

    def moved(values: np.ndarray, filler: int) -> np.ndarray:
        spare = ((0, room), (0, capacity - len(parents)))
        return np.pad(values[:, order], spare, constant_values=filler)

    at = moved(context, 0)
    with jax.enable_x64(True):
        outcome = _tossed(law)(tree, jnp.asarray(moved(tokens, -1)), toy.p[at], toy.q[at])
        weight, length, code = (np.asarray(x) for x in outcome)
    weight = weight * np.pad(chance, (0, room))[:, None, None]
    return _distance(toy, parents, weight, length, code)


def match_distance(
    toy: Toy,
    parents: Sequence[int],
    rng: np.random.Generator,
    capacity: int | None = None,
    drafts: int = 4,
) -> float:
    """The same for ``match``: the largest of several random drafts, all draws of each enumerated.

    Right for every fixed draft is right for every drafter.
    """
    capacity, vocabulary = len(parents) if capacity is None else capacity, toy.vocabulary
    every, context, _ = every_draft(toy, parents, "fixed")
    some = rng.integers(0, len(every), drafts)
    tree, order = packed(parents, capacity, rng)
    draws = np.array(list(itertools.product(range(vocabulary), repeat=capacity)), np.int32)
    spare = ((0, 0), (0, capacity - len(parents)))
    tokens = np.pad(every[some][:, order], spare, constant_values=-1)
    outcome = _followed(tree, jnp.asarray(tokens), jnp.asarray(draws), vocabulary)
    lengths, codes = (np.asarray(x) for x in outcome)
    used = (draws[:, len(parents) :] == 0).all(axis=1)  # spare rows draw nothing
    worst = 0.0
    for draft, length, code in zip(some, lengths, codes, strict=True):
        rows = toy.p[context[draft][order]]
        chances = rows[np.arange(len(order)), draws[:, : len(order)]].prod(axis=1)
        worst = max(worst, _distance(toy, parents, chances * used, length, code))
    return worst


def _distance(
    toy: Toy, parents: Sequence[int], weight: np.ndarray, length: np.ndarray, code: np.ndarray
) -> float:
    """Total variation from plain of emissions: their chance, how many tokens, and which."""
    ended = []
    for emitted in range(1, max(depths(parents)) + 2):
        chosen = length == emitted
        size = toy.vocabulary**emitted
        ended.append(np.bincount(code[chosen], weight[chosen], minlength=size))
    difference = toy.completed(ended) - toy.plain(len(ended))
    return float(np.abs(difference).sum() / 2)


def enumerable(rule: object) -> bool:
    """Whether this module can enumerate a rule: one with a law, or ``match`` itself."""
    return isinstance(rule, CoinRule) or type(rule) is Match
