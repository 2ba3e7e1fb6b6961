"""What all faults share: texts, plain decoding's record, the trees to come and their rows' logits.

Nothing here sees a fault or runs the engine under audit. The trees are what the drafter proposes
from plain's own record, and the paths plain's own tokens in them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.faults import Course
from treejax.audit.intake import Start, take_in
from treejax.audit.memories import memory_at, propose
from treejax.audit.reference import Plain, decode_from
from treejax.audit.rows import RowLogits, places_of
from treejax.audit.surfaces import right_path
from treejax.drafters import Drafter
from treejax.drafters.scripted import Script, Scripted
from treejax.loop import state_rows
from treejax.model import Model
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.tree import Tree, describe


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """B sequences and T steps.

    Attributes:
      drafter: what the engine drafts with; weights: of its ``Draft``.
      start, plain: after the prompts, and plain decoding from there.
      course: what a right engine goes through; offsets: [T, B] where each step begins.
      expected: plain, and what it says at the rows of these trees alone.
      sampling: how both draw, with one noise; keys: [B] of the sequences.
      margins: [B] by how much each text's closest decision was decided.
    """

    model: Model
    drafter: Drafter
    weights: Any
    start: Start
    plain: Plain
    course: Course
    offsets: np.ndarray
    expected: RowLogits
    sampling: Sampling
    keys: Array
    margins: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.offsets)

    @property
    def batch(self) -> int:
        return self.plain.batch


def script(tree: str, schedule: tuple[tuple[int, int], ...]) -> Scripted:
    """A scripted drafter whose truth is data: the weights of its ``Draft``, as ``prepare`` makes
    them, so that one program serves all texts."""
    return Scripted(tree=tree, truth=((0,),), schedule=schedule)


def prepare(
    model: Model,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    steps: int,
    temperature: float = 1.0,
) -> Bench:
    """Everything that a run of ``steps`` steps after the prompts is held against.

    A greedy text of a small model soon repeats itself, and its state with it: a commit that is left
    out then changes nothing. With temperature texts do not.
    """
    sampling = Sampling(temperature=temperature)
    batch, deepest = len(prompts), drafter.max_depth + 1
    count = (steps + 1) * deepest
    if isinstance(drafter, Scripted) and drafter.schedule:  # records are large: no more than needed
        plan = drafter.schedule
        count = deepest + sum(plan[t % len(plan)][1] + 1 for t in range(steps))
    rows = state_rows(model, max(map(len, prompts)) + count)
    keys = jax.random.split(jax.random.key(0), batch)
    start = take_in(model, prompts, drafter, max_length=rows, sampling=sampling)
    plain = decode_from(model, start, count, sampling=sampling, keys=keys, by=drafter)
    weights = start.draft.weights
    if isinstance(drafter, Scripted):
        truth = tuple(tuple(map(int, row)) for row in plain.tokens)
        weights = dataclasses.replace(drafter, truth=truth).init(model, batch, rows).weights

    offset, everyone = np.zeros(batch, np.int64), np.arange(batch)
    offsets, paths, trees = [], [], []
    how, settings = (model.config, drafter, weights), sampling.prepared(model.config.vocab_size)
    for t in range(steps):
        memory = memory_at(plain, offset, everyone)
        if isinstance(memory, Script):
            memory = memory.replace(step=jnp.full(batch, t, jnp.int32))
        length = jnp.asarray(plain.start + offset, jnp.int32)
        pending = jnp.asarray(plain.tokens[everyone, offset])
        tree, _ = propose(*how, memory, length, pending, keys, settings)
        path = right_path(tree, plain, offset, everyone)
        offsets.append(offset)
        paths.append(path)
        trees.append(tree)
        offset = offset + (path >= 0).sum(axis=1)

    def stacked(leaf: Any) -> np.ndarray:
        return np.stack([np.asarray(leaf(tree)) for tree in trees])

    tokens, parents = stacked(lambda tree: tree.tokens), stacked(lambda tree: tree.parent)
    paths, offsets = np.stack(paths), np.stack(offsets)
    course = Course(
        parents=parents,
        depths=stacked(_depths),
        sizes=stacked(lambda tree: tree.size),
        tokens=tokens,
        tails=_tails(prompts, plain, offsets, model.config.linear_conv_kernel_dim - 1),
        paths=paths,
        lengths=(paths >= 0).sum(axis=2),
    )
    expected = RowLogits(model, plain)
    steps_taken = zip(trees, offsets, strict=True)
    expected.learn(p for tree, at in steps_taken for *_, p in places_of(tree, at, everyone))
    expected.close()
    drawn = np.arange(plain.count + 1)[:, None] <= offset[None, :]
    margins = np.where(drawn, plain.margin, np.inf).min(axis=0)
    made = course, offsets, expected, sampling, keys, margins
    return Bench(model, drafter, weights, start, plain, *made)


def _tails(
    prompts: Sequence[Sequence[int]], plain: Plain, offsets: np.ndarray, width: int
) -> np.ndarray:
    """[T, B, width] the last tokens of each text where each step begins."""
    tails = np.zeros((*offsets.shape, width), np.int64)
    for b, prompt in enumerate(prompts):
        text = np.concatenate([np.zeros(width, np.int64), prompt, plain.tokens[b]])
        for t, offset in enumerate(offsets[:, b]):
            tails[t, b] = text[len(prompt) + offset :][:width]
    return tails


@jax.jit
def _depths(tree: Tree) -> Array:
    return describe(tree).depth
