"""One step of an engine under audit: propose, verify, select, publish, with the hooks of a fault.

The four are the shipped ones. ``steps.together.step`` is the same line without hooks; a test holds
the two together.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treejax import layers
from treejax.audit.faults.around import bare
from treejax.audit.faults.base import Fault, Hit, Strike
from treejax.config import ModelConfig
from treejax.drafters import Drafter
from treejax.drafters.base import Draft, path_tokens
from treejax.drafters.spec import spec_of
from treejax.history import History, extend
from treejax.policies import Policy, policy_title
from treejax.sampling import Sampling, per_sequence
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import publish_path
from treejax.steps.rules.base import Rule
from treejax.steps.select import Choice, select
from treejax.steps.verify import verify_trees
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is audited. Static under jit."""

    policy: Policy
    drafter: Drafter
    rule: Rule
    fault: Fault = Fault()

    @property
    def name(self) -> str:
        drafter = f"{spec_of(self.drafter)}:{self.drafter.shape.name}"
        rule = "" if self.rule.name == "match" else f" by {self.rule.name}"
        fault = "" if self.fault.name == "none" else f" with {self.fault.name}"
        return f"{policy_title(self.policy)}/{drafter}{rule}{fault}"


class Engine(struct.PyTreeNode):
    """What goes from step to step.

    Attributes:
      state, memory: the model's state and the drafter's memory.
      pending: [B] tokens that are emitted and not yet in the state.
      history: what penalties read, or None.
      before: the path that was published last, with the root that it began with as its
        ``pending``: what an engine that mixes up its steps would still have at hand.
    """

    state: State
    memory: Any
    pending: Array
    history: History | None
    before: Choice


class Cycle(struct.PyTreeNode):
    """What one step shows its auditor.

    Attributes:
      tree: the proposed trees; q: [B, N, V] what they were drawn from, or None.
      logits: [B, N, V] of every row, as they were selected from.
      choice: the path that was published.
      tokens: [B, P] what was emitted, -1 padded; count: [B] how many.
    """

    tree: Tree
    q: Array | None
    logits: Array
    choice: Choice
    tokens: Array
    count: Array


@functools.partial(jax.jit, static_argnames=("config", "subject"))
def cycle(
    config: ModelConfig,
    subject: Subject,
    params: layers.Params,
    weights: Any,
    engine: Engine,
    keys: Array,
    sampling: Sampling,
    strike: Strike,
    index: Array,
) -> tuple[Engine, Cycle]:
    """Step number ``index`` of every sequence; ``weights`` are those of the drafter's ``Draft``."""
    state, history, fault = engine.state, engine.history, subject.fault
    place = strike.layer, strike.head, strike.row
    hit = Hit(strike.cycle == index, *place, before=engine.before, which=strike.which)
    own, *_ = per_sequence(state.batch, sampling, keys, state.length, config.vocab_size)
    draft = Draft(weights=weights, memory=engine.memory, config=config, sampling=own)

    tree, q, draft = subject.drafter.propose(draft, state, engine.pending, keys)
    serving = state.replace(policy=fault.policy(state.policy, hit))
    out, scratch = verify_trees(config, params, serving, fault.tree(tree, hit))
    out = fault.verified(tree, out, scratch, hit)
    choice = select(
        *(tree, out.logits),
        sampling=sampling,
        key=keys,
        position=state.length,
        history=history,
        rule=subject.rule,
        q=q if subject.rule.needs_q else None,
    )
    choice = fault.chosen(tree, choice, hit)
    after = publish_path(serving, scratch, choice).replace(policy=state.policy)
    scratch = scratch.replace(recurrent=tuple(map(bare, scratch.recurrent)))
    after = fault.published(state, scratch, choice, after, hit)
    shown = fault.shown(params, out.hidden, choice, hit)
    draft = fault.observed(draft, subject.drafter.observe(draft, tree, choice, shown), hit)
    if history is not None:
        history = extend(history, path_tokens(tree, choice.path), choice.length)
    tokens, count = choice.emitted(tree)
    engine = Engine(
        state=after,
        memory=draft.memory,
        pending=choice.pending,
        history=history,
        before=choice.replace(pending=engine.pending),
    )
    return engine, Cycle(tree, q, out.logits, choice, tokens, count)


def never(batch: int) -> Strike:
    """Strikes that do not happen."""
    nowhere = jnp.zeros(batch, jnp.int32)
    return Strike(nowhere - 1, nowhere, nowhere, nowhere)
