"""Logits of every row of a tree, held against plain decoding along that row's own path.

A row off the accepted path leaves no trace but its logits, and through them the decision. Plain
decoding goes down every leaf's path from the state of plain's own record, one token after the
other; the verify under audit has no part in it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.decoding import STRIDE, Going, decode_stride
from treejax.audit.intake import NATIVE
from treejax.audit.memories import relative
from treejax.audit.reference import Plain
from treejax.model import Model
from treejax.sampling import Sampling
from treejax.state import State
from treejax.tree import Tree

Place = tuple[int, int, tuple[int, ...]]
"""A row: the sequence of plain, the tokens it held after its prompt, the tokens down to the row."""


class RowLogits:
    """What plain decoding says at rows of trees; every path is followed once.

    Most trees come again: in the next schedule, under the next policy.
    """

    def __init__(self, model: Model, plain: Plain):
        self.model, self.plain = model, plain
        self._known: dict[Place, np.ndarray] = {}
        self._closed = False
        self._keys = jax.random.split(jax.random.key(0), plain.batch)  # nothing is drawn

    def close(self) -> None:
        """From now on nothing is followed: rows that are not known yet count as equal."""
        self._closed = True

    def distances(
        self,
        tree: Tree,
        logits: Any,
        offset: np.ndarray,
        rows: np.ndarray,
        limit: np.ndarray | None = None,
    ) -> np.ndarray:
        """[B, N] relative L2 distances of the rows' logits [B, N, V] from plain's.

        0 in rows that are not there, or deeper than ``limit`` [B].

        Args:
          offset: [B] tokens that each sequence holds after its prompt, the root not among them.
          rows: [B] which sequence of plain each one follows.
        """
        made = np.asarray(logits)
        places = list(places_of(tree, offset, rows, limit))
        if not self._closed:
            self.learn(place for *_, place in places)
        known = [each for each in places if each[2] in self._known]
        far = np.zeros(made.shape[:2])
        if known:
            b, row, there = zip(*known, strict=True)
            expected = np.stack([self._known[place] for place in there])
            far[b, row] = relative(made[b, row], expected, axes=(1,))
        return far

    def learn(self, places: Iterable[Place]) -> None:
        """Follow the paths to all of these rows that are not known."""
        wanted = {place for place in places if place not in self._known}
        inner = {(*place[:2], place[2][:-1]) for place in wanted}
        leaves = sorted(wanted - inner)
        lanes = self.plain.batch
        for first in range(0, len(leaves), lanes):
            self._follow(leaves[first : first + lanes])

    def __getitem__(self, place: Place) -> np.ndarray:
        """[V]"""
        return self._known[place]

    def _follow(self, leaves: list[Place]) -> None:
        """As many leaves as plain has sequences, by the program that decoded them."""
        lanes, config = self.plain.batch, self.model.config
        at = np.array([place[:2] for place in leaves] + [leaves[0][:2]] * (lanes - len(leaves)))
        nothing = jnp.zeros(lanes, jnp.int32)
        state = _state_at(self.model, self.plain, at[:, 0], at[:, 1])
        going = Going(state, nothing, jnp.zeros((lanes, config.vocab_size)), None)
        lengths = np.zeros(lanes, np.int32)
        lengths[: len(leaves)] = [len(path) for *_, path in leaves]
        greedy = Sampling().prepared(config.vocab_size)
        for first in range(0, lengths.max(), STRIDE):
            text = np.full((STRIDE, lanes), -1, np.int32)
            for lane, (*_, path) in enumerate(leaves):
                part = path[first : first + STRIDE]
                text[: len(part), lane] = part
            counts = jnp.asarray(np.clip(lengths - first, 0, STRIDE))
            going, left = decode_stride(
                *(config, self.model.params, going, self._keys, greedy, counts),
                jnp.asarray(text),
            )
            logits = np.asarray(left.logits)
            for lane, (b, offset, path) in enumerate(leaves):
                for depth in range(first, min(len(path), first + STRIDE)):
                    self._known[b, offset, path[: depth + 1]] = logits[depth - first, lane]


def places_of(
    tree: Tree, offset: np.ndarray, rows: np.ndarray, limit: np.ndarray | None = None
) -> Iterator[tuple[int, int, Place]]:
    """(batch entry, row, place) of all rows that are in use, down to ``limit`` [B]."""
    tokens, parents, sizes = (np.asarray(x) for x in (tree.tokens, tree.parent, tree.size))
    for b, sequence in enumerate(rows):
        most = tree.max_depth if limit is None else int(limit[b])
        for row in range(int(sizes[b])):
            path, above = [int(tokens[b, row])], int(parents[b, row])
            while above >= 0:
                path.insert(0, int(tokens[b, above]))
                above = int(parents[b, above])
            if len(path) <= most + 1:
                yield b, row, (int(sequence), int(offset[b]), tuple(path))


def _state_at(model: Model, plain: Plain, rows: np.ndarray, offset: np.ndarray) -> State:
    """The states that plain left of sequences ``rows`` after ``offset`` tokens; keys are causal."""
    spare = ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))
    return State(
        recurrent=jnp.asarray(np.swapaxes(plain.R[offset, :, rows], 0, 1)),
        conv=jnp.asarray(np.swapaxes(plain.conv[offset, :, rows], 0, 1)),
        keys=jnp.asarray(np.pad(plain.keys[:, rows], spare)),
        values=jnp.asarray(np.pad(plain.values[:, rows], spare)),
        length=jnp.asarray(plain.start[rows] + offset, jnp.int32),
        config=model.config,
        policy=NATIVE,
    )
