"""Acceptance rules by name, and whether one can be right for a drafter and a tree.

``match`` needs nothing of the drafter. The rules that toss coins need the probabilities q that the
candidates were really drawn with, and each is right for certain ways of drawing only: ``rule_for``
refuses the others before anything is generated.
"""

from treejax.drafters.base import PROPOSALS
from treejax.drafters.topologies import Best, StaticTree
from treejax.steps.rules.base import Rule
from treejax.steps.rules.block import Block
from treejax.steps.rules.match import Match
from treejax.steps.rules.multi_step import MultiStep
from treejax.steps.rules.traversal import Traversal
from treejax.steps.rules.typical import Typical
from treejax.steps.rules.without_replacement import WithoutReplacement

REGISTRY: dict[str, Rule] = {
    "match": Match(),
    "multi_step": MultiStep(),
    "without_replacement": WithoutReplacement(),
    "block": Block(),
    "traversal": Traversal(),
    "typical": Typical(),
}

_DRAWN_BY = {"iid": "multi_step", "without_replacement": "without_replacement"}


def named(rule: str | Rule) -> Rule:
    """The rule of that name; a rule object is itself.

    Raises:
      ValueError: an unknown name.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str) or rule not in REGISTRY:
        raise ValueError(f"rule {rule!r} is unknown, expected one of: {', '.join(REGISTRY)}")
    return REGISTRY[rule]


def rule_for(rule: str | Rule, proposals: str, shape: StaticTree | Best) -> Rule:
    """The rule to select with, for a drafter's kind of proposals and the trees it fills.

    A name stands for the form of the rule that accepts most of such proposals; a rule object stays
    as it is. On a chain there are no siblings, so that draws with and without replacement are the
    same.

    Raises:
      ValueError: the rule cannot be right with such proposals or such a tree.
    """
    by_name = isinstance(rule, str)
    rule = named(rule)
    if proposals not in PROPOSALS:
        raise ValueError(
            f"proposals {proposals!r} are unknown, expected one of: {', '.join(PROPOSALS)}"
        )
    chain = not _branches(shape)
    if rule.chains_only and not chain:
        raise ValueError(
            f"rule {rule.name!r} serves chains only, the tree {shape.name!r} branches: "
            "use rule 'traversal' or a chain"
        )
    if by_name:
        rule = rule.sharpest(proposals)
    serves = rule.serves
    if chain and serves & _DRAWN_BY.keys():
        serves = serves | _DRAWN_BY.keys()
    if proposals not in serves:
        raise ValueError(
            f"rule {rule.name!r} needs candidates of kind {' or '.join(sorted(serves))}, the "
            f"drafter's are {proposals}: use rule {_DRAWN_BY.get(proposals, 'match')!r}, "
            "or a drafter that draws so"
        )
    return rule


def _branches(shape: StaticTree | Best) -> bool:
    if isinstance(shape, Best):
        return shape.nodes > 1  # the data decide, and may well branch
    return len(set(shape.parents)) < len(shape.parents)
