"""Traversal verification: leaves first, whole paths at once (arXiv 2505.12398)."""

import dataclasses

from treejax.shapes import Array
from treejax.steps.rules.base import CoinRule, Law
from treejax.steps.rules.residual import sibling_tests
from treejax.tree import Tree

DRAWS = ("iid", "without_replacement")


@dataclasses.dataclass(frozen=True)
class Traversal(CoinRule):
    """Rows are tested in post-order; a row's chance is that of its path, not of its last step.

    A row x below a row of chance a starts with min(1, a p(x) / q(x)). Where it fails, with all
    that hangs below it, its parent keeps p <- norm (a p - q)+ and a <- s / (s + 1 - a), with s the
    sum of (a p - q)+, and is itself tested once its children are gone. On a chain this is block
    verification.

    Attributes:
      draws: "without_replacement" takes a tested token out of q, and is right for independent draws
        too: without the repeats, which never pass, these are draws without replacement. "iid"
        leaves q as it is, accepts more of independent draws and is right for no others.
    """

    name = "traversal"
    lossless = True
    takes = frozenset(DRAWS)
    needs_q = True

    draws: str = "without_replacement"

    def __post_init__(self):
        if self.draws not in DRAWS:
            raise ValueError(
                f"draws of rule 'traversal' is {self.draws!r}, expected one of: {', '.join(DRAWS)}"
            )

    @property
    def serves(self) -> frozenset[str]:
        return frozenset({"iid"}) if self.draws == "iid" else self.takes

    def sharpest(self, proposals: str) -> "Traversal":
        return Traversal(draws=proposals) if proposals in DRAWS else self

    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        assert q is not None
        tests = sibling_tests(tree, p, q, replaced=self.draws == "iid", joint=True)
        return Law(chance=tests.left, weights=tests.weights, leaves_first=True)
