"""Rejection for siblings drawn without replacement (RSD, Sequoia)."""

import dataclasses

from treejax.shapes import Array
from treejax.steps.rules.base import CoinRule, Law
from treejax.steps.rules.residual import sibling_tests
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class WithoutReplacement(CoinRule):
    """As ``multi_step``, but a tested token leaves q, which is normalised again.

    Ranks must be the order of the draws. A token that q has lost never passes and changes nothing,
    so that independent draws are served too: without repeats they are draws without replacement.
    ``multi_step`` accepts more of them. Recursive rejection sampling of RSD (arXiv 2402.14160,
    Algorithm 2), also Sequoia's (arXiv 2402.12374).
    """

    name = "without_replacement"
    lossless = True
    takes = frozenset({"iid", "without_replacement"})
    needs_q = True

    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        assert q is not None
        tests = sibling_tests(tree, p, q, replaced=False, joint=False)
        return Law(chance=tests.entry, weights=tests.weights, leaves_first=False)
