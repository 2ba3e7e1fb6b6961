"""Multi-step rejection for siblings drawn with replacement (SpecInfer, arXiv 2305.09781)."""

import dataclasses

from treejax.shapes import Array
from treejax.steps.rules.base import CoinRule, Law
from treejax.steps.rules.residual import sibling_tests
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class MultiStep(CoinRule):
    """A child of token x passes with min(1, p(x) / q(x)); a failure leaves p <- norm (p - q)+.

    q stays, as every sibling was drawn from it. A token that comes again fails surely after its
    first failure. With one child a node this is speculative sampling (arXiv 2211.17192).
    """

    name = "multi_step"
    lossless = True
    takes = frozenset({"iid"})
    needs_q = True

    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        assert q is not None
        tests = sibling_tests(tree, p, q, replaced=True, joint=False)
        return Law(chance=tests.entry, weights=tests.weights, leaves_first=False)
