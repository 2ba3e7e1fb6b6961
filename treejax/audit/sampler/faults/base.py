"""Planted faults of samplers: an otherwise right step that goes wrong in one thing.

A step of a walk drafts, shows the rule what it ``Given``s, and puts out what the rule chose. A
fault has a hook for each; those that it leaves out are the shipped functions.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from flax import struct

from treejax.history import History
from treejax.requests import Request
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.steps.choice import Choice
from treejax.steps.rules.base import CoinRule, Law, Rule
from treejax.steps.select import select
from treejax.tree import Tree


class Given(struct.PyTreeNode):
    """What a rule is given for a batch of sequences.

    Attributes:
      tree: the drafted trees; q: [B, N, V] what they were drawn from, or None.
      logits: [B, N, V] of the target.
      sampling: prepared, one value a sequence; keys [B]; position [B], ``state.length``.
      history: what each sequence holds before its pending token, if a setting reads it.
    """

    tree: Tree
    q: Array | None
    logits: Array
    sampling: Sampling
    keys: Array
    position: Array
    history: History | None


def shipped(rule: Rule, given: Given) -> Choice:
    """What the shipped ``select`` makes of it."""
    return select(
        given.tree,
        given.logits,
        sampling=given.sampling,
        key=given.keys,
        position=given.position,
        history=given.history,
        rule=rule,
        q=given.q if rule.needs_q else None,
    )


LawHook = Callable[[CoinRule, Tree, Array, Array], Law]


@dataclasses.dataclass(frozen=True)
class Bent(CoinRule):
    """A rule whose law a fault has bent."""

    inner: CoinRule
    bend: LawHook

    name = "bent"
    lossless = False
    takes = frozenset({"fixed", "coupled", "iid", "without_replacement"})
    needs_q = True

    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        assert q is not None
        return self.bend(self.inner, tree, p, q)


@dataclasses.dataclass(frozen=True)
class SamplerFault:
    """One fault, and where it is looked for. Static under jit: hooks are functions of modules.

    Attributes:
      rule, proposals: the sampler that is otherwise right.
      world: name of the designed world that shows it (``worlds.DESIGNED``).
      law: (rule, tree, p, q) -> the law of one sequence, for rules with coins.
      given: what the rule is shown in place of what is true, for a whole batch.
      choose: (rule, given) -> the choice, for a whole batch.
      limit: how deep a candidate may lie for a request, in place of its ``depth_limit``.
      deliver: (request, tokens of a step) -> takes them, in place of ``Request.take``.
    """

    rule: Rule
    proposals: str
    world: str
    law: LawHook | None = None
    given: Callable[[Given], Given] | None = None
    choose: Callable[[Rule, Given], Choice] | None = None
    limit: Callable[[Request], int] | None = None
    deliver: Callable[[Request, Sequence[int]], None] | None = None

    @property
    def says(self) -> str:
        """What goes wrong: the first sentence that its hook says of itself."""
        hook = self.law or self.given or self.choose or self.deliver
        return (hook.__doc__ or "").strip().split("\n")[0].rstrip(".")

    @property
    def streams_only(self) -> bool:
        """Whether it shows only in what a request is handed: equality with plain, not a law."""
        return self.limit is not None or self.deliver is not None


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What walks: a rule with a way to draft, and perhaps a fault. Static under jit."""

    rule: Rule
    proposals: str
    fault: SamplerFault | None = None

    @classmethod
    def with_fault(cls, fault: SamplerFault) -> "Sampler":
        return cls(fault.rule, fault.proposals, fault)

    @property
    def inside(self) -> "Sampler":
        """What of it programs see: faults outside of them share that of the right sampler."""
        fault = self.fault
        if fault is not None and fault.law is fault.given is fault.choose is None:
            return Sampler(self.rule, self.proposals)
        return self

    def choose(self, given: Given) -> Choice:
        """The choice of every sequence; usable inside jit."""
        rule, fault = self.rule, self.fault
        if fault is None:
            return shipped(rule, given)
        if fault.given is not None:
            given = fault.given(given)
        if fault.law is not None:
            assert isinstance(rule, CoinRule)
            rule = Bent(rule, fault.law)
        return shipped(rule, given) if fault.choose is None else fault.choose(rule, given)

    def tree(self, given: Given) -> Tree:
        """The trees that the choice speaks of."""
        fault = self.fault
        return given.tree if fault is None or fault.given is None else fault.given(given).tree


def one_by_one(function: Callable[[Given], Choice], given: Given) -> Choice:
    """Map a function of one sequence over the batch."""
    return jax.vmap(function)(given)
