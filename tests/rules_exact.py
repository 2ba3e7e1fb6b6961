"""Every outcome of one step on one tree, in float64: drafts, coins and last draws, none sampled.

The drafter's draws are enumerated with their exact probabilities, the rule's law and ``decide`` are
the shipped ones with every coin and every last draw passed in, and what a step leaves open is
completed by plain decoding. The result is the joint law of D + 1 tokens.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from random_trees import shuffle

from treejax.steps.rules.base import decide
from treejax.tree import Tree


def topologies(size):
    """Parents of all rooted ordered trees of ``size`` rows, depth first: Catalan(size - 1)."""

    def grow(parents, spine):
        if len(parents) == size:
            yield parents
            return
        for depth in range(len(spine)):  # the next row hangs below any row of the last path
            yield from grow([*parents, spine[depth]], [*spine[: depth + 1], len(parents)])

    return list(grow([-1], [0]))


class Model:
    """p(next | context), and q, for every context of up to ``depth`` tokens; [contexts, V]."""

    def __init__(self, rng, vocabulary, depth, zeros=0.15, same=False, temperature=None):
        self.vocabulary, self.depth = vocabulary, depth
        self.offset = np.cumsum([0, *(vocabulary**n for n in range(depth + 1))])
        self.p = _rows(rng, self.offset[-1], vocabulary, zeros)
        self.q = self.p.copy() if same else _rows(rng, self.offset[-1], vocabulary, zeros)
        if temperature == 0:
            self.p = np.eye(vocabulary)[self.p.argmax(axis=1)]

    @classmethod
    def constant(cls, p, q, depth):
        """The same p and q in every context."""
        model = cls(np.random.default_rng(0), len(p), depth)
        model.p = np.broadcast_to(np.asarray(p, float), model.p.shape)
        model.q = np.broadcast_to(np.asarray(q, float), model.q.shape)
        return model

    def plain(self, depth):
        """[V ** (depth + 1)] joint law of the first tokens of plain decoding."""
        return self.complete([np.zeros(self.vocabulary**n) for n in range(1, depth + 2)], start=1.0)

    def complete(self, mass, start=0.0):
        """Joint law of len(mass) tokens, from the mass that ends after 1, 2, .. of them."""
        joint = np.array([start])
        for length, ended in enumerate(mass):
            rows = self.p[self.offset[length] : self.offset[length + 1]]
            joint = (joint[:, None] * rows).ravel() + ended
        return joint


def _rows(rng, count, vocabulary, zeros):
    rows = rng.dirichlet(np.ones(vocabulary), count) * (rng.random((count, vocabulary)) > zeros)
    empty = rows.sum(axis=1) == 0
    rows[empty] = 1.0
    return rows / rows.sum(axis=1, keepdims=True)


def every_draft(model, parents, draws):
    """(tokens [M, n], context of each row [M, n], probability [M]) of all drafts of a tree.

    ``parents`` lists parents first, siblings as drawn. Without replacement, the tokens of rows for
    which q has nothing left are drawn evenly: no rule may accept them.
    """
    vocabulary, size = model.vocabulary, len(parents)
    tokens = np.array(list(itertools.product(range(vocabulary), repeat=size - 1)), np.int32)
    tokens = np.concatenate([np.zeros((len(tokens), 1), np.int32), tokens], axis=1)
    code, depth = np.zeros(tokens.shape, int), np.zeros(size, int)
    context, weight = np.zeros(tokens.shape, int), np.ones(len(tokens))
    left = {0: model.q[context[:, 0]]}
    for row in range(1, size):
        above, every = parents[row], np.arange(len(tokens))
        depth[row] = depth[above] + 1
        code[:, row] = code[:, above] * vocabulary + tokens[:, row]
        context[:, row] = model.offset[depth[row]] + code[:, row]
        left[row] = model.q[context[:, row]]
        total = left[above].sum(axis=1)
        gone = total < 1e-12
        chance = left[above][every, tokens[:, row]] / np.where(gone, 1.0, total)
        weight *= np.where(gone, 1 / vocabulary, chance)
        if draws == "without_replacement":
            left[above] = left[above].copy()
            left[above][every, tokens[:, row]] = 0.0
    assert abs(weight.sum() - 1) < 1e-12
    return tokens, context, weight


@functools.cache
def compiled(law):
    """``law(tree, p, q)`` and ``decide`` for every draft, pattern of coins and last token.

    The result maps (tree, tokens [M, N], p, q [M, N, V]) to the chance of each outcome
    [M, patterns, V], how many tokens it emits and which, as the digits of a number.
    """

    @jax.jit
    def outcomes(tree, tokens, p, q):
        capacity, vocabulary = p.shape[1:]
        passes = jnp.asarray(list(itertools.product([True, False], repeat=capacity - 1)))
        passes = jnp.pad(passes, ((0, 0), (1, 0)), constant_values=True)
        bump = jnp.where(jnp.eye(vocabulary, dtype=bool), 0.0, -jnp.inf)  # the last draw is token t

        def of_draft(tokens, p, q):
            own = tree.replace(tokens=tokens)
            ruled = law(own, p, q)

            def of_coins(passes):
                chance = ruled.chance
                weight = jnp.where(passes, chance, 1 - chance).at[0].set(1.0).prod()
                coins = jnp.where(passes, chance / 2, (1 + chance) / 2)
                coins = jnp.where(chance >= 1, 0.5, coins)  # a coin is below 1: it cannot fail

                def of_last(gumbel):
                    choice = decide(own, ruled, coins, gumbel)
                    end, code = choice.path[choice.length - 1], jnp.int32(0)
                    for place in range(1, capacity):
                        longer = code * vocabulary + tokens[choice.path[place]]
                        code = jnp.where(place < choice.length, longer, code)
                    return end, choice.length, code * vocabulary + choice.pending

                end, length, code = jax.vmap(of_last)(bump)
                return weight * ruled.weights[end[0]], length, code

            return jax.vmap(of_coins)(passes)

        return jax.vmap(of_draft)(tokens, p, q)

    return outcomes


def joint_law(outcomes, model, parents, draws, rng, capacity):
    """(joint law of D + 1 tokens, mean accepted candidates) of a tree in a shuffled packing."""
    tokens, context, weight = every_draft(model, parents, draws)
    depth = max(depths_of(parents))
    packed, order = shuffle(parents, rng)
    rank = np.array([parents[:row].count(above) for row, above in enumerate(parents)])[order]
    tree = Tree.from_parents(
        np.zeros(len(parents), int), packed, capacity=capacity, unique=False
    ).replace(rank=jnp.asarray(np.pad(rank, (0, capacity - len(rank)))[None], jnp.int32))
    more = model.vocabulary ** (capacity - 1) - len(tokens)  # one program for all trees

    def moved(values, filler):
        spare = ((0, more), (0, capacity - len(parents)))
        return np.pad(values[:, order], spare, constant_values=filler)

    at = moved(context, 0)
    one = jax.tree.map(lambda x: x[0], tree)
    outcome = outcomes(one, moved(tokens, -1), model.p[at], model.q[at])
    chance, length, code = (np.asarray(x) for x in outcome)
    chance = chance * np.pad(weight, (0, more))[:, None, None]
    assert abs(chance.sum() - 1) < 1e-9
    mass = []
    for n in range(1, depth + 2):
        chosen = length == n
        mass.append(np.bincount(code[chosen], chance[chosen], minlength=model.vocabulary**n))
    accepted = float((chance * (length - 1)).sum())
    return model.complete(mass), accepted


def depths_of(parents):
    depths = [0]
    for above in parents[1:]:
        depths.append(depths[above] + 1)
    return depths


def total_variation(a, b):
    return np.abs(a - b).sum() / 2
