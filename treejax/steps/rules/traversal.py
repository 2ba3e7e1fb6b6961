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
      draws: how siblings were drawn, which decides q for the later ones: "iid" keeps it,
        "without_replacement" takes the tested token out. ``rule_for`` sets it from what the
        drafter says; None serves nothing.
    """

    name = "traversal"
    lossless = True
    takes = frozenset(DRAWS)
    needs_q = True

    draws: str | None = None

    def __post_init__(self):
        if self.draws not in (None, *DRAWS):
            raise ValueError(
                f"draws of rule 'traversal' is {self.draws!r}, expected one of: {', '.join(DRAWS)}"
            )

    @property
    def serves(self) -> frozenset[str]:
        return self.takes if self.draws is None else frozenset({self.draws})

    def told(self, proposals: str) -> "Traversal":
        if self.draws is None and proposals in DRAWS:
            return dataclasses.replace(self, draws=proposals)
        return self

    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        assert q is not None
        if self.draws is None:
            raise ValueError(
                "rule 'traversal' must know how siblings were drawn: pass Traversal('iid') or "
                "Traversal('without_replacement'), or take the rule from rules.rule_for"
            )
        tests = sibling_tests(tree, p, q, replaced=self.draws == "iid", joint=True)
        return Law(chance=tests.left, weights=tests.weights, leaves_first=True)
