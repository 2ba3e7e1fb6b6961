"""Faults in what a rule with coins makes of chance, and in p where rows are told apart."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from treejax.audit.sampler.faults.base import Given, one_by_one
from treejax.history import along_paths
from treejax.sampling import FINAL, Sampling, noise, process
from treejax.shapes import Array
from treejax.steps.choice import Choice
from treejax.steps.rules.base import CoinRule, Law, Rule, coins, decide
from treejax.steps.rules.kin import Kin, kin_of


@dataclasses.dataclass(frozen=True)
class Chance:
    """One sequence's law and draws, as ``CoinRule.choose`` makes them."""

    given: Given
    kin: Kin
    law: Law
    coins: Array
    gumbel: Array


def probabilities(given: Given, sampling: Sampling) -> Array:
    """[N, V] p of one sequence's rows."""
    history = given.history
    if history is not None:
        history = along_paths(history, given.tree.tokens, kin_of(given.tree).ancestors)
    return jax.nn.softmax(process(given.logits, sampling, history), axis=-1)


def with_chance(rule: Rule, given: Given, change: Callable[[Chance], Choice]) -> Choice:
    """What ``change`` decides from the shipped law and draws of every sequence."""
    assert isinstance(rule, CoinRule)

    def one(given: Given) -> Choice:
        p = probabilities(given, given.sampling)
        return change(
            Chance(
                given=given,
                kin=kin_of(given.tree),
                law=rule.law(given.tree, p, given.q),
                coins=coins(given.keys, given.position, p.shape[0]),
                gumbel=noise(given.keys, given.position, p.shape[1], FINAL),
            )
        )

    return one_by_one(one, given)


def unchanged(chance: Chance) -> Choice:
    """No fault: what the rule itself decides."""
    return decide(chance.given.tree, chance.law, chance.coins, chance.gumbel)


def same_coin_for_siblings(rule: Rule, given: Given) -> Choice:
    """All children of a node are tested with one coin."""

    def change(c: Chance) -> Choice:
        return decide(c.given.tree, c.law, c.coins[c.kin.parent], c.gumbel)

    return with_chance(rule, given, change)


def rejecting_coin_reused(rule: Rule, given: Given) -> Choice:
    """The last token is drawn with the coin of the last rejected child, by inverse CDF."""

    def change(c: Chance) -> Choice:
        choice = unchanged(c)
        end = choice.path[choice.length - 1]
        below = c.kin.active & (c.kin.parent == end) & (jnp.arange(c.coins.shape[0]) > 0)
        last = jnp.argmax(jnp.where(below, c.given.tree.rank, -1))
        cumulative = jnp.cumsum(c.law.weights[end])
        token = jnp.searchsorted(cumulative, c.coins[last] * cumulative[-1], side="right")
        token = jnp.minimum(token, cumulative.shape[0] - 1).astype(jnp.int32)
        return choice.replace(pending=jnp.where(below.any(), token, choice.pending))

    return with_chance(rule, given, change)


def last_draw_fixed(rule: Rule, given: Given) -> Choice:
    """The last token is drawn with the same noise in every step."""

    def change(c: Chance) -> Choice:
        return decide(c.given.tree, c.law, c.coins, jnp.zeros_like(c.gumbel))

    return with_chance(rule, given, change)


def product_of_uniforms(rule: Rule, given: Given) -> Choice:
    """A prefix passes if the product of its coins is below the product of its ratios."""

    def change(c: Chance) -> Choice:
        tree, q = c.given.tree, c.given.q
        assert q is not None
        p, above = probabilities(c.given, c.given.sampling), c.kin.parent
        token = jnp.maximum(tree.tokens, 0)
        ratio = p[above, token] / jnp.maximum(q[above, token], 1e-30)
        path = c.kin.ancestors & (jnp.arange(p.shape[0]) > 0)[None, :]
        ratios = jnp.where(path, ratio[None, :], 1.0).prod(axis=1)
        tossed = jnp.where(path, c.coins[None, :], 1.0).prod(axis=1)
        passes = jnp.where(tossed < jnp.minimum(ratios, 1.0), 1.0, 0.0)
        law = Law(chance=passes, weights=c.law.weights, leaves_first=True)
        return decide(tree, law, jnp.full_like(c.coins, 0.5), c.gumbel)

    return with_chance(rule, given, change)


def _at_leaves(c: Chance, weights: Array) -> Law:
    """The law with other ``weights`` where a row has no children: the token after a whole path."""
    rows = jnp.arange(c.coins.shape[0])
    parent = ((c.kin.parent[:, None] == rows[None, :]) & (rows > 0)[:, None]) & (
        c.kin.active[:, None]
    )
    inner = parent.any(axis=0)
    return c.law.replace(weights=jnp.where(inner[:, None], c.law.weights, weights))


def bonus_at_temperature_1(rule: Rule, given: Given) -> Choice:
    """The token after a path that is accepted whole is drawn at temperature 1, unfiltered."""

    def change(c: Chance) -> Choice:
        law = _at_leaves(c, jax.nn.softmax(c.given.logits, axis=-1))
        return decide(c.given.tree, law, c.coins, c.gumbel)

    return with_chance(rule, given, change)


def min_p_only_on_bonus(rule: Rule, given: Given) -> Choice:
    """Candidates are tested without min-p; the token after a whole path obeys it."""

    def change(c: Chance) -> Choice:
        law = _at_leaves(c, probabilities(c.given, given_sampling(c)))
        return decide(c.given.tree, law, c.coins, c.gumbel)

    def given_sampling(c: Chance) -> Sampling:
        return c.given.sampling.replace(min_p=given.sampling.min_p[0])

    bare = given.replace(sampling=given.sampling.replace(min_p=None))
    return with_chance(rule, bare, change)
