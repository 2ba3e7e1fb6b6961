"""Arms of ``step_cost``: a state policy, a tree, and perhaps what drafts or what is switched off.

plain                          the root alone, under the experiment's policy for it
wy hydra27                     filled by a script, which fixes what is accepted
wy:precision=tf32 chain5       a policy with settings of its own
wy rows16                      the best 15 candidates of a head's profile, and the root
wy hydra27 mtp                 filled by the MTP head; "mtp32768" drafts from so many tokens
wy hydra27 no_path             one of the changes of ``step_cost_switches`` undone
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from treejax.ablation.lab_arms import check_arms, make_arm
from treejax.ablation.lab_trees import make_shape
from treejax.ablation.step_cost_model import REFRAIN
from treejax.config import ModelConfig
from treejax.drafters import MTP, Scripted
from treejax.drafters.plain import Plain
from treejax.drafters.topologies import Best, StaticTree, parse
from treejax.policies import Policy

PLAIN = "plain"
SWITCHES = ("path", "slots", "taps", "select", "attention")
"""LumoTree's five integration changes, arXiv 2609.23900, table 2, in its order."""

MOST_DEPTH = 11  # of trees of ``rowsN``; that of hydra27
OPERANDS = "float32"  # of the recurrence, whatever the model is
RUN = 32
"""Steps in a row that a script accepts equally many tokens in: more than a sample has calls."""

_HEAD = re.compile(r"mtp([1-9]\d*)?")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One thing to time.

    Attributes:
      lengths: tokens that a step emits, of those asked for that its tree can reach; what is
        accepted is one less. (1,) where nothing is drafted, () where a head drafts.
      off: the change that is undone, or None.
    """

    name: str
    policy: Policy
    drafter: Any
    lengths: tuple[int, ...]
    off: str | None = None

    @property
    def tree(self) -> StaticTree:
        shape = self.drafter.shape
        assert isinstance(shape, StaticTree)
        return shape

    @property
    def base(self) -> str:
        """The name of the arm that has nothing undone."""
        return " ".join(self.name.split()[:2])


def check_names(names: Sequence[str], plain: str, where: str) -> None:
    """Refuse what no arm can be, before anything runs.

    Raises:
      ValueError: one line.
    """
    check_arms((plain,), where)
    for name in names:
        if name == PLAIN:
            continue
        words = name.split()
        if not 2 <= len(words) <= 3:
            raise ValueError(
                f"{where}: arm {name!r} has {len(words)} words, expected 'plain' or a policy, a "
                "tree, and perhaps mtp, mtpN or no_SWITCH"
            )
        check_arms((words[0],), where)
        try:
            make_tree(words[1])
        except ValueError as error:
            raise ValueError(f"{where}: arm {name!r}: {error}") from None
        last = words[2] if len(words) == 3 else "mtp"
        if not _HEAD.fullmatch(last) and last.removeprefix("no_") not in SWITCHES:
            known = ", ".join(f"no_{switch}" for switch in SWITCHES)
            raise ValueError(
                f"{where}: arm {name!r} ends in {last!r}, expected mtp, mtpN or one of: {known}"
            )


def check_reached(lengths: Sequence[int], names: Sequence[str], where: str) -> None:
    """Refuse lengths that no script of the checked arms ``names`` can emit: they were dropped.

    Raises:
      ValueError: one line.
    """
    words = [name.split() for name in names if name != PLAIN]
    scripted = [w for w in words if not (len(w) == 3 and _HEAD.fullmatch(w[2]))]
    deepest = max((make_tree(w[1]).max_depth + 1 for w in scripted), default=1)
    wrong = [length for length in lengths if length > deepest]
    if wrong:
        raise ValueError(
            f"{where}: lengths hold {wrong[0]}, and no tree of their arms emits more than {deepest}"
            " tokens a step: leave it out, or name a deeper tree"
        )


def make_tree(text: str) -> StaticTree:
    """A tree of fixed shape, by any name that drafters know, or ``rowsN`` with N rows in all.

    Raises:
      ValueError: an unknown tree, or one whose shape is not fixed.
    """
    if match := re.fullmatch(r"rows([1-9]\d*)", text):
        shape = make_shape("best", int(match[1]), MOST_DEPTH)
        return StaticTree(text, shape.parents)
    shape = parse(text)
    if isinstance(shape, Best):
        raise ValueError(f"tree {text!r} has no fixed shape, expected one that has, or rowsN")
    return shape


def make_step_arm(
    name: str, plain: str, lengths: Sequence[int], implementation: str, config: ModelConfig
) -> Arm:
    """The arm of a checked name, on a resolved implementation."""
    if name == PLAIN:
        return Arm(name, make_arm(plain, implementation, OPERANDS), Plain(), (1,))
    policy, text, *last = name.split()
    made, tree = make_arm(policy, implementation, OPERANDS), make_tree(text)
    if last and (match := _HEAD.fullmatch(last[0])):
        count = int(match[1] or config.vocab_size)
        return Arm(name, made, MTP(tree, vocabulary=_spread(count, config)), ())
    deepest = tree.max_depth + 1
    reached = tuple(length for length in lengths if length <= deepest) or (deepest,)
    schedule = [(tree.max_depth, length - 1) for length in reached for _ in range(RUN)]
    drafter = Scripted(tree, truth=((REFRAIN,),), schedule=tuple(schedule))
    return Arm(name, made, drafter, reached, last[0].removeprefix("no_") if last else None)


def _spread(count: int, config: ModelConfig) -> tuple[int, ...] | None:
    """So many token ids, evenly spread over all; None for all of them."""
    if count >= config.vocab_size:
        return None
    return tuple(np.linspace(0, config.vocab_size - 1, count).astype(int).tolist())
