"""Where faults strike, and whether a strike did anything at all."""

import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.detection_bench import Bench
from treejax.audit.detection_run import one_step
from treejax.audit.faults import Fault, Strike
from treejax.audit.reference import engine_of
from treejax.audit.step import Cycle, Engine, Subject
from treejax.policies import Policy


def draw_strikes(
    fault: Fault, policy: Policy, bench: Bench, seed: int, among: np.ndarray
) -> Strike:
    """A random place in each of the sequences ``among`` [B], in a step in which the fault shows.

    Sequences in which it never would are passed over.
    """
    shows = fault.shows(policy, bench.course) & among
    random = np.random.default_rng([seed, zlib.crc32(fault.name.encode())])
    chance = np.where(shows, random.random(shows.shape), -1.0)
    cycle = np.where(shows.any(axis=0), chance.argmax(axis=0), -1)
    places = random.integers(1 << 16, size=(3, bench.batch))
    return Strike(*(jnp.asarray(x, jnp.int32) for x in (cycle, *places)))


def had_effect(bench: Bench, subject: Subject, strike: Strike, asked: np.ndarray) -> np.ndarray:
    """[B] whether the engine ever left another byte than the same program without a strike.

    A head that forgets everything at each token, say, holds the same whatever was committed before
    the last one: then nothing went wrong and there is nothing to catch. Sequences that are not
    ``asked`` [B] for count as struck to an effect.
    """
    if not asked.any():
        return np.ones_like(asked)
    calm = strike.replace(cycle=jnp.full_like(strike.cycle, -1))
    engine = right = engine_of(subject, bench.start, bench.plain.tokens[:, 0])
    differs = ~asked
    for t in range(bench.steps):
        engine, shown = one_step(bench, subject, engine, strike, t)
        right, expected = one_step(bench, subject, right, calm, t)
        for (axis, mine), (_, theirs) in zip(
            _left(engine, shown), _left(right, expected), strict=True
        ):
            differs |= _differs(mine, theirs, axis)
    return differs


def _left(engine: Engine, shown: Cycle) -> Iterator[tuple[int, Any]]:
    """All that a step left, after its batch axis."""
    state = engine.state
    yield 1, (state.recurrent, state.conv, state.keys, state.values)
    yield 0, (state.length, engine.pending, engine.memory, shown.logits, shown.tokens)


def _differs(mine: Any, theirs: Any, axis: int) -> np.ndarray:
    """[B] whether any number differs; one that is none counts as different."""
    found = []
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        unequal = np.moveaxis(np.asarray(a) != np.asarray(b), axis, 0)
        found.append(unequal.reshape(len(unequal), -1).any(axis=1))
    return np.any(found, axis=0)
