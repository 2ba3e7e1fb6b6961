"""Where faults strike, and whether a strike did anything at all."""

import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.detection.bench import Bench
from treejax.audit.detection.run import one_step
from treejax.audit.faults import Fault, Strike
from treejax.audit.intake import engine_of
from treejax.audit.memories import relative
from treejax.audit.step import Cycle, Engine, Subject
from treejax.policies import Policy

RESOLUTION = 2**-20
"""A relative distance of eight units in the last place of float32: plain decoding done otherwise
lies as far from itself, and nothing that is nearer is wrong."""


def draw_strikes(
    fault: Fault, policy: Policy, bench: Bench, seed: tuple[int, ...], among: np.ndarray
) -> Strike:
    """A random place in each of the sequences ``among`` [B], in a step in which the fault shows.

    Sequences in which it never would are passed over.
    """
    shows = fault.shows(policy, bench.course) & among
    random = np.random.default_rng([*seed, zlib.crc32(fault.name.encode())])
    chance = np.where(shows, random.random(shows.shape), -1.0)
    cycle = np.where(shows.any(axis=0), chance.argmax(axis=0), -1)
    places = random.integers(1 << 16, size=(3, bench.batch))
    return Strike(*(jnp.asarray(x, jnp.int32) for x in (cycle, *places)))


def had_effect(bench: Bench, subject: Subject, strike: Strike, asked: np.ndarray) -> np.ndarray:
    """[B] whether the engine ever left anything else than the same program without a strike, by
    more than ``RESOLUTION``.

    A head that forgets nearly everything at each token, say, holds the same whatever was committed
    before the last one: then there is nothing wrong to catch. Sequences that are not ``asked`` [B]
    for count as struck to an effect.
    """
    if not asked.any():
        return np.ones_like(asked)
    calm = strike.replace(cycle=jnp.full_like(strike.cycle, -1))
    engine = right = engine_of(subject, bench.start, bench.plain.tokens[:, 0])
    moved = ~asked
    for t in range(bench.steps):
        engine, shown = one_step(bench, subject, engine, strike, t)
        right, expected = one_step(bench, subject, right, calm, t)
        both = zip(_left(engine, shown), _left(right, expected), strict=True)
        for mine, theirs in both:
            moved |= _apart(mine, theirs)
    return moved


def _left(engine: Engine, shown: Cycle) -> Iterator[np.ndarray]:
    """All that a step left, batch first and what belongs together last: a head's matrix, a layer's
    history, a row."""
    state = engine.state
    R = np.asarray(state.policy.read(state.recurrent))
    yield np.moveaxis(R, 1, 0).reshape(*R.shape[1::-1], R.shape[2], -1)
    for array in (state.conv, state.keys, state.values):
        yield np.moveaxis(np.asarray(array), 1, 0)
    for leaf in (state.length, engine.pending, shown.logits, shown.tokens, engine.memory):
        yield from map(np.asarray, jax.tree.leaves(leaf))


def _apart(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """[B] whether any vector [B, ..., n], or number [B], lies further off than ``RESOLUTION``."""
    if mine.ndim == 1:
        mine, theirs = mine[:, None], theirs[:, None]
    far = ~(relative(mine, theirs, axes=(-1,)) <= RESOLUTION)
    return far.reshape(len(far), -1).any(axis=1)
