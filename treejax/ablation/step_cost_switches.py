"""The whole step of an arm, and five ways to make it as it was before an integration change.

LumoTree (arXiv 2609.23900, table 2) made its tree step cheap by five changes. The product has all
of them; an arm ``no_path``, ``no_slots``, ``no_taps``, ``no_select`` or ``no_attention`` undoes
one, composed of the product's own functions:

    path       the host assembles the path from every node's token, between select and publish
    slots      rows stay as the drafter packs them; every consumer of every layer sorts its own
    taps       the convolution's windows are derived anew in every layer
    select     the logits go through memory to an argmax and a top-k, programs of their own
    attention  XLA's attention over the whole cache
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treejax.ablation.step_cost_arms import Arm
from treejax.ablation.step_cost_verify import CHANGES, publish_unsorted, verify_changed
from treejax.config import ModelConfig
from treejax.drafters.base import Draft
from treejax.model import Output
from treejax.sampling import per_sequence
from treejax.shapes import Array
from treejax.steps.publish import publish_path
from treejax.steps.rules.base import Rule
from treejax.steps.rules.match import follow
from treejax.steps.select import Choice, select
from treejax.steps.together import Carry, Emission, step
from treejax.steps.verify import Scratch, verify_trees
from treejax.tree import Tree

TOP_K = 20
"""Of the separate top-k: what the paper's engine samples with."""

Fixed = tuple[Any, ...]
"""Parameters, the drafter's weights, keys and sampling."""


class Whole(Protocol):
    """The whole step of an arm."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its programs, in the order in which they run."""
        ...

    def __call__(self, fixed: Fixed, carry: Carry, limit: Any) -> tuple[Carry, Emission]:
        """One step; ``carry`` is donated."""
        ...

    def lower(self, at: int, fixed: Fixed, carry: Carry, limit: Any) -> Any:
        """The program ``names[at]``, for shapes such as these."""
        ...


def make_whole(arm: Arm, rule: Rule, config: ModelConfig) -> Whole:
    """The step of an arm, as the product has it or with a change undone."""
    if arm.off is None:
        return _Together(config, arm.drafter, rule)
    if arm.off in CHANGES:
        return _Changed(config, arm.drafter, rule, arm.off)
    kinds = {"path": _OnTheHost, "select": _SelectApart}
    return kinds[arm.off](config, arm.drafter)


@dataclasses.dataclass(frozen=True)
class _Together:
    """The product's step."""

    config: ModelConfig
    drafter: Any
    rule: Rule
    names: tuple[str, ...] = ("step",)

    def __call__(self, fixed: Fixed, carry: Carry, limit: Any) -> tuple[Carry, Emission]:
        return step(*self._given(fixed, carry, limit))

    def lower(self, at: int, fixed: Fixed, carry: Carry, limit: Any) -> Any:
        return step.lower(*self._given(fixed, carry, limit))

    def _given(self, fixed: Fixed, carry: Carry, limit: Any) -> tuple[Any, ...]:
        params, weights, keys, sampling = fixed
        how = self.config, self.drafter, self.rule, params, weights, carry, limit
        return *how, keys, sampling, np.bool_(False)


@dataclasses.dataclass(frozen=True)
class _Changed:
    """One program too, with another way to verify."""

    config: ModelConfig
    drafter: Any
    rule: Rule
    off: str
    names: tuple[str, ...] = ("step",)

    def __call__(self, fixed: Fixed, carry: Carry, limit: Any) -> tuple[Carry, Emission]:
        how = self.config, self.drafter, self.rule, self.off
        return _changed_step(*how, fixed, carry, limit)

    def lower(self, at: int, fixed: Fixed, carry: Carry, limit: Any) -> Any:
        how = self.config, self.drafter, self.rule, self.off
        return _changed_step.lower(*how, fixed, carry, limit)


@dataclasses.dataclass(frozen=True)
class _OnTheHost:
    """Two programs; between them the host walks down the tree by the tokens of its nodes."""

    config: ModelConfig
    drafter: Any
    names: tuple[str, ...] = ("front", "back")

    def __call__(self, fixed: Fixed, carry: Carry, limit: Any) -> tuple[Carry, Emission]:
        front, carry, drawn = _front_drawn(self.config, self.drafter, fixed, carry, limit)
        tree, drawn = jax.device_get((front.tree, drawn))
        choice = walk_on_host(tree, drawn)
        return _back(self.config, self.drafter, fixed, carry, front, choice)

    def lower(self, at: int, fixed: Fixed, carry: Carry, limit: Any) -> Any:
        how = self.config, self.drafter
        if at == 0:
            return _front_drawn.lower(*how, fixed, carry, limit)
        given = fixed, carry, limit
        front, after, _ = jax.eval_shape(functools.partial(_front_drawn, *how), *given)
        return _back.lower(*how, fixed, after, front, _abstract_choice(front.tree))


@dataclasses.dataclass(frozen=True)
class _SelectApart:
    """Four programs: up to the logits, an argmax, a top-k, and what follows the choice."""

    config: ModelConfig
    drafter: Any
    names: tuple[str, ...] = ("front", "argmax", "top_k", "back")

    def __call__(self, fixed: Fixed, carry: Carry, limit: Any) -> tuple[Carry, Emission]:
        front, carry = _front(self.config, self.drafter, fixed, carry, limit)
        drawn = _argmax(front.output.logits)
        _top_k(front.output.logits)
        return _back_following(self.config, self.drafter, fixed, carry, front, drawn)

    def lower(self, at: int, fixed: Fixed, carry: Carry, limit: Any) -> Any:
        how = self.config, self.drafter
        if at == 0:
            return _front.lower(*how, fixed, carry, limit)
        given = fixed, carry, limit
        front, after = jax.eval_shape(functools.partial(_front, *how), *given)
        if at < 3:
            return (_argmax, _top_k)[at - 1].lower(front.output.logits)
        return _back_following.lower(*how, fixed, after, front, front.tree.tokens)


class Front(NamedTuple):
    """What comes before a choice. The policy's carry is in the state that goes along."""

    tree: Tree
    memory: Any
    output: Output
    scratch: Scratch


_jit = functools.partial(jax.jit, donate_argnames="carry")


@functools.partial(_jit, static_argnames=("config", "drafter", "rule", "off"))
def _changed_step(
    config: ModelConfig,
    drafter: Any,
    rule: Rule,
    off: str,
    fixed: Fixed,
    carry: Carry,
    limit: Array,
) -> tuple[Carry, Emission]:
    _, _, keys, sampling = fixed
    verify = functools.partial(verify_changed, off)
    front, carry = _make_front(config, drafter, fixed, carry, limit, verify)
    choice = select(
        *(front.tree, front.output.logits),
        sampling=sampling,
        key=keys,
        position=carry.state.length,
        rule=rule,
    )
    publish = publish_unsorted if off == "slots" else publish_path
    return _make_back(config, drafter, fixed, carry, front, choice, publish)


@functools.partial(_jit, static_argnames=("config", "drafter"))
def _front(
    config: ModelConfig, drafter: Any, fixed: Fixed, carry: Carry, limit: Array
) -> tuple[Front, Carry]:
    return _make_front(config, drafter, fixed, carry, limit, verify_trees)


@functools.partial(_jit, static_argnames=("config", "drafter"))
def _front_drawn(
    config: ModelConfig, drafter: Any, fixed: Fixed, carry: Carry, limit: Array
) -> tuple[Front, Carry, Array]:
    """The front without its logits, and the token that the target draws at every node."""
    front, carry = _make_front(config, drafter, fixed, carry, limit, verify_trees)
    drawn = jnp.argmax(front.output.logits, axis=-1).astype(jnp.int32)
    output = front.output.replace(logits=jnp.zeros((0,), jnp.float32))
    return front._replace(output=output), carry, drawn


@functools.partial(_jit, static_argnames=("config", "drafter"))
def _back(
    config: ModelConfig, drafter: Any, fixed: Fixed, carry: Carry, front: Front, choice: Choice
) -> tuple[Carry, Emission]:
    return _make_back(config, drafter, fixed, carry, front, choice, publish_path)


@functools.partial(_jit, static_argnames=("config", "drafter"))
def _back_following(
    config: ModelConfig, drafter: Any, fixed: Fixed, carry: Carry, front: Front, drawn: Array
) -> tuple[Carry, Emission]:
    choice = jax.vmap(follow)(front.tree, drawn)
    return _make_back(config, drafter, fixed, carry, front, choice, publish_path)


@jax.jit
def _argmax(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.jit
def _top_k(logits: Array) -> tuple[Array, Array]:
    values, tokens = lax.top_k(logits, min(TOP_K, logits.shape[-1]))
    return values, tokens


def _make_front(
    config: ModelConfig,
    drafter: Any,
    fixed: Fixed,
    carry: Carry,
    limit: Array,
    verify: Callable[..., tuple[Output, Scratch]],
) -> tuple[Front, Carry]:
    """Propose and verify, as ``together.step`` does."""
    params, weights, keys, sampling = fixed
    state = carry.state
    own, *_ = per_sequence(state.batch, sampling, keys, state.length, config.vocab_size)
    draft = Draft(weights=weights, memory=carry.memory, config=config, sampling=own)
    tree, _, draft = drafter.propose(draft, state, carry.pending, keys)
    tree = tree.trim(limit)
    output, scratch = verify(config, params, state, tree)
    carry = carry.replace(state=state.replace(recurrent=scratch.carry))
    return Front(tree, draft.memory, output, scratch.replace(carry=())), carry


def _make_back(
    config: ModelConfig,
    drafter: Any,
    fixed: Fixed,
    carry: Carry,
    front: Front,
    choice: Choice,
    publish: Callable[..., Any],
) -> tuple[Carry, Emission]:
    """Publish and observe, as ``together.step`` does."""
    tree, memory, output, scratch = front
    state = publish(carry.state, scratch.replace(carry=carry.state.recurrent), choice)
    draft = Draft(weights=fixed[1], memory=memory, config=config)
    draft = drafter.observe(draft, tree, choice, output.hidden)
    tokens, count = choice.emitted(tree)
    logprobs = jnp.zeros(tokens.shape)
    emission = Emission(tokens=tokens, count=count, proposed=tree.size - 1, logprobs=logprobs)
    return Carry(state=state, memory=draft.memory, pending=choice.pending), emission


def walk_on_host(tree: Tree, drawn: np.ndarray) -> Choice:
    """The path of every tree whose nodes carry the tokens that were drawn above them.

    drawn: [B, N] the target's token at every node.
    """
    batch = tree.tokens.shape[0]
    path = np.full((batch, tree.max_depth + 1), -1, np.int32)
    length, pending = np.ones(batch, np.int32), np.zeros(batch, np.int32)
    for b in range(batch):
        size = int(tree.size[b])
        parent, tokens = tree.parent[b, :size].tolist(), tree.tokens[b, :size].tolist()
        nodes = [0]
        while len(nodes) <= tree.max_depth:
            wanted = int(drawn[b, nodes[-1]])
            below = [v for v in range(size) if parent[v] == nodes[-1] and tokens[v] == wanted]
            if not below:
                break
            nodes.append(min(below, key=lambda v: (int(tree.rank[b, v]), v)))
        path[b, : len(nodes)] = nodes
        length[b], pending[b] = len(nodes), drawn[b, nodes[-1]]
    return Choice(path, length, pending)  # type: ignore[arg-type]


def _abstract_choice(tree: Any) -> Choice:
    batch = tree.tokens.shape[0]
    one = jax.ShapeDtypeStruct((batch,), jnp.int32)
    path: Any = jax.ShapeDtypeStruct((batch, tree.max_depth + 1), jnp.int32)
    return Choice(path, one, one)  # type: ignore[arg-type]
