"""Block verification of chains (arXiv 2403.10444)."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from treejax.shapes import Array
from treejax.steps.rules.base import CoinRule, Law
from treejax.steps.rules.kin import kin_of
from treejax.steps.rules.residual import normalise
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Block(CoinRule):
    """The longest prefix whose own test passes is accepted (Algorithm 2 there).

    With P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / q(x_i)) and s_i the sum of (P_i p - q)+ over the
    next token, prefix i passes with h_i = s_i / (s_i + 1 - P_i), the whole chain with its P. The
    token after prefix i < D comes from norm (P_i p - q)+, after the whole chain from p.
    """

    name = "block"
    lossless = True
    takes = frozenset({"iid", "without_replacement"})  # one child a node: the two are the same
    needs_q = True
    chains_only = True

    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        assert q is not None
        kin = kin_of(tree)
        order = kin.draw_order  # of a chain: root, child, grandchild, then inactive rows

        def prefix(carry, row):
            joint, chance, weights = carry
            above, token = kin.parent[row], jnp.maximum(tree.tokens[row], 0)
            # What fails at this row is decided by the prefix above it.
            rest = jnp.maximum(joint * p[above] - q[above], 0)
            mass = rest.sum()
            fails = mass + 1 - joint
            shorter = jnp.where(fails > 0, mass / jnp.where(fails > 0, fails, 1), joint)
            drawn = q[above, token] > 0
            ratio = joint * p[above, token] / jnp.where(drawn, q[above, token], 1)
            longer = jnp.where(drawn, jnp.minimum(ratio, 1), 0)
            next_chance = chance.at[above].set(shorter).at[row].set(longer)
            next_weights = weights.at[above].set(jnp.where(mass > 0, normalise(rest), p[above]))
            live = kin.active[row]
            return (
                jnp.where(live, longer, joint),
                jnp.where(live, next_chance, chance),
                jnp.where(live, next_weights, weights),
            ), None

        start = (jnp.ones((), p.dtype), jnp.zeros(p.shape[0], p.dtype), p)
        (_, chance, weights), _ = lax.scan(prefix, start, order[1:])
        return Law(chance=chance, weights=weights, leaves_first=True)
