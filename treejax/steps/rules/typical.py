"""Typical acceptance (Medusa, arXiv 2401.10774, section 3.3.2). Lossy: the output is not p's."""

import dataclasses

import jax
import jax.numpy as jnp

from treejax.shapes import Array
from treejax.steps.rules.base import CoinRule, Law
from treejax.steps.rules.kin import kin_of
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Typical(CoinRule):
    """Accept every token x that is typical enough: p(x) > min(epsilon, delta exp(-H(p))).

    The longest path of such tokens is kept, of equally long ones the likeliest under p, and the
    token after it is the likeliest one: greedy, as Medusa picks the token that heads the next tree,
    so that a step which accepts nothing is a step of greedy decoding. Chance plays no part. With
    p one-hot (temperature 0) the output is greedy decoding's: the likeliest token is accepted if
    epsilon or delta is below 1, and nothing at all if neither is. Otherwise the rule changes the
    law of the output.

    Attributes:
      epsilon: in (0, 1]; a probability above it is always enough.
      delta: > 0; scales the bound for rows of high entropy H (in nats).
    """

    name = "typical"
    lossless = False
    takes = frozenset({"fixed", "coupled", "iid", "without_replacement"})
    needs_q = False

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        for name, valid, expected in (
            ("epsilon", 0 < self.epsilon <= 1, "a number in (0, 1]"),
            ("delta", 0 < self.delta < float("inf"), "a finite number > 0"),
        ):
            if not valid:
                raise ValueError(
                    f"{name} of rule 'typical' is {getattr(self, name)}, expected {expected}"
                )

    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        kin = kin_of(tree)
        entropy = jnp.where(p > 0, -p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(axis=1)
        bound = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        own = p[kin.parent, jnp.maximum(tree.tokens, 0)]
        rows = jnp.arange(p.shape[0])
        typical = (own > bound[kin.parent]) & kin.active & (tree.tokens >= 0) | (rows == 0)
        kept = kin.active & (typical[None, :] | ~kin.ancestors).all(axis=1)
        longest = kept & (kin.depth == jnp.where(kept, kin.depth, 0).max())
        steps = jnp.where(kept & (rows > 0), jnp.log(jnp.where(kept, own, 1)), 0)
        likelihood = jnp.where(kin.ancestors, steps[None, :], 0).sum(axis=1)
        end = jnp.argmax(jnp.where(longest, likelihood, -jnp.inf))
        return Law(
            chance=kin.ancestors[end].astype(p.dtype),
            weights=jax.nn.one_hot(jnp.argmax(p, axis=1), p.shape[1], dtype=p.dtype),
            leaves_first=False,
        )
