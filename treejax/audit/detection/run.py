"""One engine, right or faulty, run over a bench and judged step by step against plain.

The judge sees the engine's outputs and plain's record. Its bounds come from controls alone; a count
(of wrong tokens, say) must be 0.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from treejax.audit.detection.bench import Bench
from treejax.audit.faults import Strike
from treejax.audit.intake import engine_of
from treejax.audit.step import Cycle, Engine, Subject, cycle, never
from treejax.audit.surfaces import Measured, measure


@dataclasses.dataclass(frozen=True)
class Judge:
    """Bounds by surface, a number a layer or one."""

    bounds: Mapping[str, tuple[float, ...]]

    def decided(self, bench: Bench) -> np.ndarray:
        """[B] sequences in whose text rounding cannot have decided anything."""
        return bench.margins > self.bounds["margin"][0]

    def findings(self, measured: Measured) -> dict[str, np.ndarray]:
        """By surface [B]: how many times its bound was reached; infinite where a count is not 0."""
        made = {}
        for name, distance in measured.distances.items():
            if name not in self.bounds:  # changes of single logits make the margin of a tie
                continue
            bound = np.asarray(self.bounds[name])
            shape = [1, -1, *[1] * (distance.ndim - 2)] if len(bound) > 1 else [1] * distance.ndim
            ratio = np.where(np.isfinite(distance), distance, np.inf) / bound.reshape(shape)
            made[name] = ratio.reshape(len(ratio), -1).max(axis=1)
        for name, count in measured.counts.items():
            made[name] = np.where(count > 0, np.inf, 0.0)
        return made


@dataclasses.dataclass(frozen=True)
class Caught:
    """What became of B sequences.

    Attributes:
      struck: [B] sequences that a fault struck; without one, all in which anything could be said.
      cycle: [B] the first step with a finding, -1 without one.
      seen: the surfaces that were beyond their bounds then, a set a sequence.
      ratio: [B] how many times its bound the clearest of them reached; 0 without one.
    """

    struck: np.ndarray
    cycle: np.ndarray
    seen: tuple[frozenset[str], ...]
    ratio: np.ndarray

    @property
    def caught(self) -> np.ndarray:
        return self.cycle >= 0

    def among(self, sequences: np.ndarray) -> "Caught":
        """The same of these sequences [B] alone."""
        return dataclasses.replace(self, struck=self.struck & sequences)


def joined(parts: Sequence[Caught]) -> Caught:
    """Several lots as one."""
    return Caught(
        struck=np.concatenate([part.struck for part in parts]),
        cycle=np.concatenate([part.cycle for part in parts]),
        seen=tuple(seen for part in parts for seen in part.seen),
        ratio=np.concatenate([part.ratio for part in parts]),
    )


def run_bench(bench: Bench, subject: Subject, judge: Judge, strike: Strike | None = None) -> Caught:
    """All steps, or as many as it takes until every struck sequence is caught."""
    at = never(bench.batch) if strike is None else strike
    struck = judge.decided(bench) if strike is None else np.asarray(at.cycle) >= 0
    engine = engine_of(subject, bench.start, bench.plain.tokens[:, 0])
    first, best = np.full(bench.batch, -1), np.zeros(bench.batch)
    seen = [frozenset[str]() for _ in first]
    for t in range(bench.steps):
        before, offset = engine, bench.offsets[t]
        engine, shown = one_step(bench, subject, before, at, t)
        measured = measure(
            *(bench.model, subject, bench.weights, before, engine, shown, bench.expected, offset),
            keys=bench.keys,
            sampling=bench.sampling,
        )
        ratios = judge.findings(measured)
        table = np.stack(list(ratios.values()))  # [surfaces, B]
        found = (table > 1).any(axis=0) & (first < 0) & judge.decided(bench)
        for b in np.flatnonzero(found):
            seen[b] = frozenset(name for name, ratio in ratios.items() if ratio[b] > 1)
        first[found], best[found] = t, table.max(axis=0)[found]
        if strike is not None and (first >= 0)[struck].all():
            break
    return Caught(struck, first, tuple(seen), best)


def one_step(
    bench: Bench, subject: Subject, engine: Engine, strike: Strike, t: int
) -> tuple[Engine, Cycle]:
    """Step ``t`` of the engine over the bench."""
    settings = bench.sampling.prepared(bench.model.config.vocab_size)
    return cycle(
        *(bench.model.config, subject, bench.model.params, bench.weights, engine, bench.keys),
        *(settings, strike, jnp.int32(t)),
    )
