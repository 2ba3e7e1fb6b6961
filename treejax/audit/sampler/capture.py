"""Worlds of real rows: verified trees of a model at several steps of one generation.

The rows of a captured step, the target's and those of the MTP head, become the states of an
automaton over the step's likeliest tokens: in the tree a token leads to its child, and past the
tree to another row of the step. So walks go through real logits and still have an exact law.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.intake import NATIVE, engine_of, take_in
from treejax.audit.sampler.worlds import CLEAR, World, scattered
from treejax.audit.step import Subject, cycle, never
from treejax.drafters.mtp import MTP
from treejax.model import Model
from treejax.sampling import Sampling, sample
from treejax.steps.rules.match import Match

TOKENS = 12
"""Tokens of a captured world; the rest of the vocabulary is left out."""
TREE, LENGTH, STEPS = "3,2", 4, 2
SETTINGS = Sampling(
    temperature=2.5,
    top_k=8,
    top_p=0.97,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
)


def capture(model: Model, prompt: Sequence[int], count: int, seed: int) -> list[World]:
    """``count`` worlds, one from every second step of a generation after ``prompt``.

    The generation samples at temperature 1, so that q is the head's whole softmax; walks draw with
    ``SETTINGS``. Rows are rounded to bfloat16, as heads compute, so that values tie.

    Raises:
      ValueError: the model has no MTP head.
    """
    config, sampling = model.config, Sampling(temperature=1.0)
    drafter = MTP(TREE, draws="without_replacement")
    subject = Subject(NATIVE, drafter, Match())
    room = len(prompt) + 2 * count * (drafter.max_depth + 1) + 1
    start = take_in(model, [list(prompt)], drafter, max_length=room)
    keys = jax.random.split(jax.random.key(seed), 1)
    first = sample(start.logits, sampling=sampling, key=keys, position=start.state.length)
    engine, weights = engine_of(subject, start, first), start.draft.weights
    settings, seen, worlds = sampling.prepared(config.vocab_size), set(map(int, prompt)), []
    for step in range(2 * count):
        rest = engine, keys, settings, never(1), jnp.int32(step)
        engine, made = cycle(config, subject, model.params, weights, *rest)
        if step % 2:
            worlds.append(_world(f"step {step + 1}", drafter, made, seen))
        seen |= {int(token) for token in np.asarray(made.tokens[0]) if token >= 0}
    return worlds


def _world(name: str, drafter: MTP, made: Any, seen: set[int]) -> World:
    """The automaton of one captured step."""
    shape = drafter.static_shape
    logits, q = np.asarray(made.logits[0], np.float32), np.asarray(made.q[0], np.float64)
    tree = np.asarray(made.tree.tokens[0])
    inner = [row for row in range(shape.capacity) if shape.children(row)]
    ids = _likeliest(logits, tree)
    target = _rounded(logits[:, ids])
    rows = np.log(np.maximum(q[inner][:, ids], 1e-30))
    draft = _rounded(rows[[inner.index(v) if v in inner else v % len(inner) for v in
                           range(shape.capacity)]])  # fmt: skip
    after = scattered(*target.shape)
    place = {int(id_): at for at, id_ in enumerate(ids)}
    for row in range(1, shape.capacity):
        after[shape.parents[row], place[int(tree[row])]] = row
    world = World(
        name=name,
        target=target,
        draft=draft,
        after=after,
        sampling=SETTINGS,
        tree=shape,
        length=LENGTH,
        steps=STEPS,
        root=place[int(tree[0])],
        prompt=tuple(sorted(place[id_] for id_ in seen & place.keys())) or (place[int(tree[0])],),
    )
    return _cleared(world)


def _likeliest(logits: np.ndarray, tree: np.ndarray) -> np.ndarray:
    """Ids of TOKENS tokens: those in the tree, and the likeliest of all rows; ascending."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    best = (p / p.sum(axis=1, keepdims=True)).max(axis=0)
    best[tree] += 1.0
    return np.sort(np.argsort(-best, kind="stable")[:TOKENS])


def _rounded(rows: np.ndarray) -> np.ndarray:
    """float32 rows of values that bfloat16 holds, their largest at 2.

    Penalties divide positive logits and multiply others: both kinds should be there.
    """
    moved = rows - rows.max(axis=1, keepdims=True) + 2.0
    return np.asarray(jnp.asarray(np.maximum(moved, -20.0), jnp.bfloat16).astype(jnp.float32))


def _cleared(world: World) -> World:
    """The world with top-p and min-p moved a little, until no value lies at a cut."""
    for nudge in range(20):
        sampling = SETTINGS.replace(
            top_p=SETTINGS.top_p + nudge * 1e-3, min_p=SETTINGS.min_p + nudge * 1e-4
        )
        moved = World(**{**vars(world), "sampling": sampling})
        if moved.joint()[1] > CLEAR:
            return moved
    raise ValueError(
        f"captured {world.name} has values at every cut of the filters, expected them apart: "
        "take another seed"
    )
