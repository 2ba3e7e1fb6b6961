"""Several faults in one program, of which each sequence meets at most one."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from treejax.audit.faults.base import Course, Fault, Hit, Strike
from treejax.config import ModelConfig
from treejax.drafters.base import Draft
from treejax.model import Output
from treejax.policies import Policy
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class AnyOf(Fault):
    """Faults one after the other: ``Strike.which`` says which of them strikes a sequence.

    As each leaves the sequences that it does not strike as they are, what is compiled once serves
    them all. Faults inside a policy nest, the first innermost; ``PackedParent`` must be that.
    """

    faults: tuple[Fault, ...] = ()

    def check(self, config: ModelConfig, policy: Policy, drafter: Any) -> None:
        for fault in self.faults:
            fault.check(config, policy, drafter)

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        raise ValueError("several faults show in different steps, expected one of them: ask it")

    def tree(self, tree: Tree, hit: Hit) -> Tree:
        for fault, its in self._each(hit):
            tree = fault.tree(tree, its)
        return tree

    def policy(self, policy: Policy, hit: Hit) -> Policy:
        for fault, its in self._each(hit):
            policy = fault.policy(policy, its)
        return policy

    def verified(self, tree: Tree, out: Output, scratch: Scratch, hit: Hit) -> Output:
        for fault, its in self._each(hit):
            out = fault.verified(tree, out, scratch, its)
        return out

    def chosen(self, tree: Tree, choice: Choice, hit: Hit) -> Choice:
        for fault, its in self._each(hit):
            choice = fault.chosen(tree, choice, its)
        return choice

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        for fault, its in self._each(hit):
            after = fault.published(state, scratch, choice, after, its)
        return after

    def shown(self, params: Any, hidden: Array, choice: Choice, hit: Hit) -> Array:
        for fault, its in self._each(hit):
            hidden = fault.shown(params, hidden, choice, its)
        return hidden

    def observed(self, before: Draft, after: Draft, hit: Hit) -> Draft:
        for fault, its in self._each(hit):
            after = fault.observed(before, after, its)
        return after

    def strike(self, fault: Fault, strike: Strike) -> Strike:
        """``strike`` as one of ``fault``."""
        which = jnp.full(strike.cycle.shape, self.faults.index(fault), jnp.int32)
        return strike.replace(which=which)

    def _each(self, hit: Hit) -> Iterator[tuple[Fault, Hit]]:
        assert hit.which is not None, "a strike among several faults says which"
        for number, fault in enumerate(self.faults):
            yield fault, hit.replace(now=hit.now & (hit.which == number))
