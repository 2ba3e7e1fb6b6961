"""Faults in the law of a rule that tosses coins: chances, residuals, the last draw's weights."""

import jax.numpy as jnp
from jax import lax

from treejax.shapes import Array
from treejax.steps.rules.base import CoinRule, Law
from treejax.steps.rules.kin import kin_of
from treejax.steps.rules.residual import normalise, sibling_tests
from treejax.tree import Tree


def accepts_with_p(rule: CoinRule, tree: Tree, p: Array, q: Array) -> Law:
    """A child of token x passes with p(x), not p(x) / q(x)."""
    above = kin_of(tree).parent
    law = rule.law(tree, p, q)
    own = p[above, jnp.maximum(tree.tokens, 0)]
    return law.replace(chance=jnp.where(law.chance > 0, own, 0.0).at[0].set(1.0))


def accepts_always(rule: CoinRule, tree: Tree, p: Array, q: Array) -> Law:
    """The first child passes whatever p says."""
    law = rule.law(tree, p, q)
    return law.replace(chance=kin_of(tree).active.astype(p.dtype))


def no_residual(rule: CoinRule, tree: Tree, p: Array, q: Array) -> Law:
    """After rejections the last token comes from the whole p."""
    return rule.law(tree, p, q).replace(weights=p)


def rank_order_ignored(rule: CoinRule, tree: Tree, p: Array, q: Array) -> Law:
    """Siblings are tested against the order in which they were drawn."""
    return rule.law(tree.replace(rank=-tree.rank), p, q)


def bonus_from_parent(rule: CoinRule, tree: Tree, p: Array, q: Array) -> Law:
    """The last token is drawn from what is left at the parent of the node where the path ends."""
    law = rule.law(tree, p, q)
    return law.replace(weights=law.weights[kin_of(tree).parent])


def path_of_single_chances(rule: CoinRule, tree: Tree, p: Array, q: Array) -> Law:
    """Leaves are tested first, with the chances that belong to tests from the root."""
    law = rule.law(tree, p, q)
    return Law(chance=law.chance, weights=law.weights, leaves_first=True)


def residual_not_normalised(rule: CoinRule, tree: Tree, p: Array, q: Array) -> Law:
    """The next sibling is tested against (p - q)+ as it is."""
    return sequential_law(tree, p, q, replaced=_replaced(rule), renormalise=False)


def q_not_updated(rule: CoinRule, tree: Tree, p: Array, q: Array) -> Law:
    """A tested token leaves q, which is not normalised again."""
    tests = sibling_tests(tree, p, q, replaced=True, joint=False)
    return Law(chance=tests.entry, weights=tests.weights, leaves_first=False)


def _replaced(rule: CoinRule) -> bool:
    return rule.takes == frozenset({"iid"})


def sequential_law(tree: Tree, p: Array, q: Array, *, replaced: bool, renormalise: bool) -> Law:
    """Multi-step rejection or that without replacement; right if ``renormalise``.

    The last token's weights are normalised either way, as a draw needs a law.
    """
    kin = kin_of(tree)

    def test(carry, row):
        p, q, chance = carry
        above, token = kin.parent[row], jnp.maximum(tree.tokens[row], 0)
        target, proposal = p[above], q[above]
        drawn = kin.active[row] & (tree.tokens[row] >= 0) & (proposal[token] > 0)
        ratio = target[token] / jnp.where(drawn, proposal[token], jnp.ones((), p.dtype))
        chance = chance.at[row].set(jnp.where(drawn, jnp.minimum(ratio, 1), 0))
        rest = jnp.maximum(target - proposal, 0)
        rest = normalise(rest) if renormalise else rest
        p = p.at[above].set(jnp.where(drawn & (rest.sum() > 0), rest, target))
        if not replaced:
            q = q.at[above].set(jnp.where(drawn, normalise(proposal.at[token].set(0)), proposal))
        return (p, q, chance), None

    start = (p, q, jnp.zeros(p.shape[0], p.dtype).at[0].set(1))
    (left, _, chance), _ = lax.scan(test, start, kin.draw_order[1:])
    weights = left / left.sum(axis=1, keepdims=True)
    return Law(chance=chance, weights=weights, leaves_first=False)
