"""Block verification of chains (arXiv 2403.10444)."""

import dataclasses

from treejax.shapes import Array
from treejax.steps.rules.base import CoinRule, Law
from treejax.steps.rules.residual import sibling_tests
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Block(CoinRule):
    """The longest prefix whose own test passes is accepted (Algorithm 2 there).

    With P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / q(x_i)) and s_i the sum of (P_i p - q)+ over the
    next token, prefix i passes with h_i = s_i / (s_i + 1 - P_i), the whole chain with its P. The
    token after prefix i < D comes from norm (P_i p - q)+, after the whole chain from p. These are
    the sibling tests of an only child.
    """

    name = "block"
    lossless = True
    takes = frozenset({"iid", "without_replacement"})  # one child a node: the two are the same
    needs_q = True
    chains_only = True

    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        assert q is not None
        tests = sibling_tests(tree, p, q, replaced=True, joint=True)
        return Law(chance=tests.left, weights=tests.weights, leaves_first=True)
