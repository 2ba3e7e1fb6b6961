"""Toy targets and drafters for walks: automata whose states hold rows of logits.

After a token the automaton moves to another state, so that every context has a target row and a
drafter's row, and a walk of any length has an exact law. The designed worlds make faults visible
that hide at random rows; captured ones hold real rows of a model (see ``capture``).
"""

import dataclasses

import numpy as np

from treejax.audit.sampler.law import laws
from treejax.drafters.topologies import StaticTree
from treejax.sampling import Sampling

P = np.array([6, 4, 5, 8, 11]) / 34
Q = np.array([12, 8, 1, 144, 1]) / 166
"""A row at which every fault of one node moves the law by 0.1 or more with three siblings, found by
search: at random rows several faults are nearly invisible."""

BUSHY = StaticTree("bushy", (-1, 0, 0, 0, 1, 1, 1))
DEEP = StaticTree("deep", (-1, 0, 0, 1, 1, 2, 3))
CHAIN = StaticTree("chain3", (-1, 0, 1, 2))
CLEAR = 3e-6
"""How near a cut of the filters no value may lie, so that float32 falls on the same side of it."""
SPARE = 2
"""Inactive rows of every tree; their logits are poison, which no rule may read."""


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """A target and a drafter over V tokens.

    Attributes:
      target, draft: [S, V] float32 raw logits of every state.
      after: [S, V] int32 the state that a token leads to.
      start: state of the root, whose token is ``root``; ``prompt`` comes before it.
      sampling: what is drawn with; one number a setting, not prepared.
      tree: what is drafted, unless a rule serves chains only.
      length: tokens of a walk; steps: how many tree steps it takes before plain ones finish it.
    """

    name: str
    target: np.ndarray
    draft: np.ndarray
    after: np.ndarray
    sampling: Sampling
    tree: StaticTree
    length: int
    steps: int = 3
    start: int = 0
    root: int = 0
    prompt: tuple[int, ...] = (0,)

    @property
    def vocabulary(self) -> int:
        return self.target.shape[1]

    def shape(self, chain: bool) -> StaticTree:
        return CHAIN if chain else self.tree

    def joint(self) -> tuple[np.ndarray, float]:
        """[V ** length] law of what plain decoding puts out after the root, and its margin."""
        size = self.vocabulary
        prompt = np.isin(np.arange(size), self.prompt)
        state, counts = np.array([self.start]), np.eye(size, dtype=int)[[self.root]]
        joint, margin = np.ones(1), 1.0
        for _ in range(self.length):
            p, near = laws(self.target[state], counts, prompt, self.sampling)
            margin = min(margin, near)
            joint = (joint[:, None] * p).ravel()
            state = self.after[state].ravel()
            counts = (counts[:, None, :] + np.eye(size, dtype=int)[None]).reshape(-1, size)
        return joint, margin


def scattered(states: int, vocabulary: int) -> np.ndarray:
    """[S, V] transitions that depend on state and token."""
    steps = [[(state * 5 + token * 3 + 1) % states for token in range(vocabulary)]
             for state in range(states)]  # fmt: skip
    return np.array(steps, np.int32)


def _grid(rng: np.random.Generator, states: int, vocabulary: int, spread: float) -> np.ndarray:
    """Logits in steps of a half, so that many are equal."""
    rows = np.round(rng.standard_normal((states, vocabulary)) * spread * 2) / 2
    return rows.astype(np.float32)


def designed_row() -> World:
    """P and Q of one node, turned by the last token, so that neighbours' rows differ too."""
    turned = [np.roll(np.stack([P, Q]), state, axis=1) for state in range(5)]
    rows = np.log(np.array(turned)).astype(np.float32)
    after = np.broadcast_to(np.arange(5, dtype=np.int32), (5, 5))
    return World("designed", rows[:, 0], rows[:, 1], after, Sampling(temperature=1.0), BUSHY, 6)


def single() -> World:
    """The designed rows with one child a node, whose rejection says much about its coin."""
    return dataclasses.replace(designed_row(), name="single", tree=CHAIN)


def filters(seed: int = 5) -> World:
    """Temperature, min-p, top-k and top-p on rows with many ties, at the k-th value too."""
    rng = np.random.default_rng(seed)
    target = _grid(rng, 11, 5, 1.2)
    draft = np.round((target + rng.standard_normal(target.shape)) * 2) / 2
    sampling = Sampling(temperature=0.6, top_k=3, top_p=0.93, min_p=0.04)
    return World("filters", target, draft.astype(np.float32), scattered(11, 5), sampling, DEEP, 6)


def penalties() -> World:
    """Every penalty, a bias, a banned token and end tokens that may not come too early."""
    rng = np.random.default_rng(9)
    target = (rng.standard_normal((11, 6)) * 0.8).astype(np.float32)
    draft = (target + 0.7 * rng.standard_normal(target.shape)).astype(np.float32)
    sampling = Sampling(
        temperature=0.8,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=0.5,
        logit_bias={1: 0.5, 3: -0.25},
        banned_tokens=(4,),
        min_tokens=4,
        end_tokens=(5,),
    )
    return World("penalties", target, draft, scattered(11, 6), sampling, DEEP, 5, prompt=(0, 2))


def cold() -> World:
    """A temperature alone, on rows whose shape it changes much."""
    rng = np.random.default_rng(13)
    target = (rng.standard_normal((11, 5)) * 0.9).astype(np.float32)
    draft = (target + 0.6 * rng.standard_normal(target.shape)).astype(np.float32)
    return World("cold", target, draft, scattered(11, 5), Sampling(temperature=0.5), DEEP, 6)


def made_up(count: int) -> list[World]:
    """So many worlds like ``filters``, of other rows: steps to try where no model is given."""
    found, seed = [], 100
    while len(found) < count:
        world = dataclasses.replace(filters(seed), name=f"step {len(found) + 1}")
        seed += 1
        if world.joint()[1] > CLEAR:
            found.append(world)
    return found


DESIGNED = {
    "designed": designed_row,
    "single": single,
    "filters": filters,
    "penalties": penalties,
    "cold": cold,
}
