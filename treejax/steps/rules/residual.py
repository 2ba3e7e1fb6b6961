"""The arithmetic that the rejection rules share: what a failed test leaves at the parent."""

import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.shapes import Array
from treejax.steps.rules.kin import kin_of
from treejax.tree import Tree


class Tested(struct.PyTreeNode):
    """What the tests of one tree come to.

    Attributes:
      entry: [N] chance of a row when it is first reached: its parent stands and its earlier
        siblings failed; 1 for the root, 0 in inactive rows.
      left: [N] chance of a row once all its children have failed; ``entry`` at a leaf.
      weights: [N, V] what is left of p at a row once all its children have failed, normalised.
    """

    entry: Array
    left: Array
    weights: Array


def sibling_tests(tree: Tree, p: Array, q: Array, *, replaced: bool, joint: bool) -> Tested:
    """Test every row against its parent's p and q, in the order in which siblings were drawn.

    With a the chance of the parent, and s the sum of (a p - q)+, a row of token x has chance
    min(1, a p(x) / q(x)), and its failure leaves p <- (a p - q)+ / s and a <- s / (s + 1 - a) at
    the parent. Where s is 0, p stays; where 1 - a is 0 too, the failure cannot happen and a stays.

    A row whose token q cannot have drawn never passes and changes nothing; neither do those that
    follow after draws without replacement have used up q.

    Args:
      tree: one sequence's.
      p, q: [N, V], row v for the children of v.
      replaced: draws were made with replacement. Otherwise q loses each tested token and is
        normalised again.
      joint: the chance of a row is that of its whole path (block and traversal verification).
        Otherwise a = 1 everywhere: its parent is accepted before it is tested.
    """
    kin = kin_of(tree)
    one = jnp.ones((), p.dtype)

    def test(carry, row):
        p, q, a, entry = carry
        above, token = kin.parent[row], jnp.maximum(tree.tokens[row], 0)
        target, proposal, before = p[above], q[above], a[above]
        drawn = kin.active[row] & (tree.tokens[row] >= 0) & (proposal[token] > 0)
        ratio = before * target[token] / jnp.where(drawn, proposal[token], one)
        chance = jnp.where(drawn, jnp.minimum(ratio, one), 0 * one)
        entry = entry.at[row].set(chance)

        rest = jnp.maximum(before * target - proposal, 0)
        mass = rest.sum()
        p = p.at[above].set(jnp.where(drawn & (mass > 0), normalise(rest), target))
        if joint:
            fails = drawn & (mass + 1 - before > 0)
            after = mass / jnp.where(fails, mass + 1 - before, one)
            a = a.at[above].set(jnp.where(fails, after, before)).at[row].set(chance)
        if not replaced:
            others = normalise(proposal.at[token].set(0))
            q = q.at[above].set(jnp.where(drawn, others, proposal))
        return (p, q, a, entry), None

    ones = jnp.ones(p.shape[0], p.dtype)
    start = (p, q, ones, jnp.where(kin.active, ones, 0))
    (weights, _, left, entry), _ = lax.scan(test, start, kin.draw_order[1:])
    return Tested(entry=entry, left=left, weights=weights)


def normalise(values: Array) -> Array:
    """Divide by the sum; all zeros stay."""
    total = values.sum()
    return values / jnp.where(total > 0, total, jnp.ones((), values.dtype))
