"""Controls: plain decoding done otherwise, from which an envelope learns what rounding does.

All follow plain's own tokens, under policy ``replay`` in plain JAX: nothing is selected, and
nothing of a subject takes part. ``repeat`` is the same again; ``capacity`` has room for other
numbers of rows in state and tree; ``pieces`` has a prefix that came in piece by piece; ``packed``
verifies several of plain's tokens at once, among wrong ones, in rows of random order.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax import layers
from treejax.audit.intake import NATIVE, Start, engine_of, take_in
from treejax.audit.memories import propose, relative
from treejax.audit.reference import Plain, decode
from treejax.audit.rows import RowLogits
from treejax.audit.step import Cycle, Engine, Subject
from treejax.audit.surfaces import EXACT, Measured, distances_of, measure, narrow_vectors
from treejax.config import ModelConfig
from treejax.drafters import MTP, Drafter
from treejax.drafters import Plain as NoDrafter
from treejax.drafters.base import Draft
from treejax.model import Model
from treejax.sampling import Sampling, per_sequence
from treejax.shapes import Array
from treejax.steps.publish import publish_path
from treejax.steps.rules import REGISTRY
from treejax.steps.select import Choice
from treejax.steps.verify import verify_trees
from treejax.tree import Tree

CONTROLS = ("repeat", "capacity", "pieces", "packed")

DEPTH = 3
"""Plain's tokens in a packed tree, the root's not counted."""

CAPACITY = 2 * DEPTH + 1

MORE_ROWS = 64
"""Rows that the capacity control's state has beyond plain's."""

PIECE = 4
"""Tokens of a prefix that are decoded one by one, between two pieces that come in at once."""


def head_drafter(model: Model) -> Drafter:
    """Whose memory the controls keep: the MTP head's cache where the model has one."""
    return MTP(f"chain{DEPTH}") if "mtp" in model.params else NoDrafter()


def run_controls(
    model: Model,
    prompts: Sequence[Sequence[int]],
    expected: RowLogits,
    *,
    cycles: int,
    keys: Array,
    sampling: Sampling,
    max_length: int,
    seed: int,
) -> dict[str, list[Measured]]:
    """Every control against plain decoding (with ``head_drafter``), step by step.

    Raises:
      ValueError: a control that differs from plain in what must be equal: the machinery that is
        calibrated with is wrong itself.
    """
    drafter, plain = head_drafter(model), expected.plain
    how = {"keys": keys, "sampling": sampling}
    again = decode(model, prompts, plain.count, max_length=max_length, drafter=drafter, **how)
    made = {"repeat": _repeated(plain, again)}
    room = max_length + MORE_ROWS
    cold = take_in(model, prompts, drafter, max_length=room, sampling=sampling)
    pieces = in_pieces(model, prompts, drafter, max_length=room, sampling=sampling, keys=keys)
    for name, start in (("capacity", cold), ("pieces", pieces), ("packed", cold)):
        chained = name == "packed"
        made[name] = follow_plain(model, expected, start, drafter, cycles, chained, seed, **how)
    for name, steps in made.items():
        refuse_wrong(name, steps)
    return made


def refuse_wrong(name: str, steps: Sequence[Measured]) -> None:
    """Refuse, in one line, a control that differs from plain in what must be equal."""
    for step in steps:
        wrong = [what for what in EXACT if what != "proposal" and step.counts[what].any()]
        if wrong:
            raise ValueError(f"control {name!r} differs from plain decoding in {wrong[0]}")


def _repeated(plain: Plain, again: Plain) -> list[Measured]:
    """Plain decoding twice: the distances at its end."""
    end = np.full(plain.batch, plain.count)
    distances = distances_of(again.state, plain, end, since=end - 1)
    distances["divergence"] = np.zeros(plain.batch)
    distances["logits"] = np.abs(again.logits - plain.logits).max(axis=(0, 2))
    distances["row logits"] = relative(again.logits, plain.logits, axes=(2,)).T
    distances["drafter"] = np.zeros(plain.batch)
    counts = {
        "tokens": (again.tokens != plain.tokens).sum(axis=1),
        "length": np.abs(np.asarray(again.state.length) - plain.start - end),
        "old rows": np.zeros(plain.batch, int),
        "narrow vectors": np.asarray(narrow_vectors(again.state.recurrent)),
    }
    return [Measured(end, distances, counts)]


def in_pieces(
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    *,
    max_length: int,
    sampling: Sampling,
    keys: Array,
) -> Start:
    """Prompts of which half comes in at once, ``PIECE`` tokens one by one, and then the rest."""
    halves, ones, rests = cut(prompts)
    start = take_in(model, halves, drafter, max_length=max_length)
    engine = engine_of(Subject(NATIVE, drafter, REGISTRY["match"]), start, ones[:, 0])
    shape = len(prompts), DEPTH + 1
    root = Choice(
        path=jnp.full(shape, -1, jnp.int32).at[:, 0].set(0),
        length=jnp.ones(shape[0], jnp.int32),
        pending=jnp.zeros(shape[0], jnp.int32),
    )
    for token in ones.T:
        tree = Tree.root_only(jnp.asarray(token, jnp.int32), CAPACITY, DEPTH)
        engine = engine.replace(pending=tree.tokens[:, 0])
        engine, _ = follow(
            *(model.config, drafter, model.params, start.draft.weights),
            *(engine, tree, root, keys, sampling.prepared(model.config.vocab_size)),
        )
    draft = start.draft.replace(memory=engine.memory)
    onto = Start(engine.state, draft, start.logits, None)
    return take_in(model, rests, drafter, max_length=max_length, onto=onto)


def cut(prompts: Sequence[Sequence[int]]) -> tuple[list[Any], np.ndarray, list[Any]]:
    """First halves, the ``PIECE`` tokens [B, PIECE] after each, and the rests.

    Raises:
      ValueError: a prompt is too short to be cut.
    """
    if min(map(len, prompts)) < 2 * PIECE:
        raise ValueError(f"a prefix has fewer than {2 * PIECE} tokens, expected as many or more")
    middle = [(len(prompt) - PIECE) // 2 for prompt in prompts]
    pairs = list(zip(prompts, middle, strict=True))
    ones = np.array([list(p[m : m + PIECE]) for p, m in pairs])
    return [list(p[:m]) for p, m in pairs], ones, [list(p[m + PIECE :]) for p, m in pairs]


def follow_plain(
    model: Model,
    expected: RowLogits,
    start: Start,
    drafter: Drafter,
    cycles: int,
    chained: bool,
    seed: int,
    *,
    keys: Array,
    sampling: Sampling,
) -> list[Measured]:
    """Steps along plain's tokens: one a step, or several in a scrambled tree if ``chained``."""
    subject, plain = Subject(NATIVE, drafter, REGISTRY["match"]), expected.plain
    engine, weights = engine_of(subject, start, plain.tokens[:, 0]), start.draft.weights
    random, made = np.random.default_rng(seed), []
    offset = np.zeros(plain.batch, np.int64)
    settings = sampling.prepared(model.config.vocab_size)
    for _ in range(cycles):
        tree, choice = _tree(model, plain, offset, chained, random)
        after, shown = follow(
            *(model.config, drafter, model.params, weights, engine, tree, choice, keys, settings)
        )
        made.append(
            measure(
                *(model, subject, weights, engine, after, shown, expected, offset),
                keys=keys,
                sampling=sampling,
            )
        )
        engine, offset = after, made[-1].offset
    return made


def _tree(
    model: Model, plain: Plain, offset: np.ndarray, chained: bool, random: np.random.Generator
) -> tuple[Tree, Choice]:
    """Trees below plain's pending tokens with plain's next ones in them, and their paths."""
    batch, depth = plain.batch, DEPTH if chained else 0
    tokens, parents = (np.zeros((batch, 2 * depth + 1), np.int64) for _ in range(2))
    path = np.full((batch, DEPTH + 1), -1, np.int32)
    for b in range(batch):
        right = plain.tokens[b, offset[b] : offset[b] + depth + 1]
        wrong = (right[1:] + 1 + random.integers(3)) % model.config.vocab_size
        place = np.append(0, 1 + random.permutation(2 * depth))
        chain, others = place[: depth + 1], place[depth + 1 :]
        path[b, : depth + 1] = chain
        tokens[b, chain], tokens[b, others] = right, wrong
        parents[b, chain] = np.append(-1, chain[:-1])
        parents[b, others] = chain[:-1]
    tree = Tree.from_parents(tokens, parents, capacity=CAPACITY, max_depth=DEPTH)
    end = offset + depth + 1
    return tree, Choice(
        path=jnp.asarray(path),
        length=jnp.full(batch, depth + 1, jnp.int32),
        pending=jnp.asarray(plain.tokens[np.arange(batch), end], jnp.int32),
    )


def follow(
    config: ModelConfig,
    drafter: Any,
    params: layers.Params,
    weights: Any,
    engine: Engine,
    tree: Tree,
    choice: Choice,
    keys: Array,
    sampling: Sampling,
) -> tuple[Engine, Cycle]:
    """Verify a given tree and publish a given path of it; the drafter proposes to no effect."""
    length, pending = engine.state.length, engine.pending
    _, memory = propose(config, drafter, weights, engine.memory, length, pending, keys, sampling)
    engine = engine.replace(memory=memory)
    return _publish(config, drafter, params, weights, engine, tree, choice, keys, sampling)


@functools.partial(jax.jit, static_argnames=("config", "drafter"))
def _publish(
    config: ModelConfig,
    drafter: Any,
    params: layers.Params,
    weights: Any,
    engine: Engine,
    tree: Tree,
    choice: Choice,
    keys: Array,
    sampling: Sampling,
) -> tuple[Engine, Cycle]:
    """``follow`` after the proposal."""
    state = engine.state
    own, *_ = per_sequence(state.batch, sampling, keys, state.length, config.vocab_size)
    draft = Draft(weights=weights, memory=engine.memory, config=config, sampling=own)
    out, scratch = verify_trees(config, params, state, tree)
    draft = drafter.observe(draft, tree, choice, out.hidden)
    after = engine.replace(
        state=publish_path(state, scratch, choice),
        memory=draft.memory,
        pending=choice.pending,
        before=choice,
    )
    return after, Cycle(tree, None, out.logits, choice, *choice.emitted(tree))
