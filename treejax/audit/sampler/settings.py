"""Settings of the sampler audit, and what its two commands share."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treejax.audit.sampler.faults.base import Sampler
from treejax.audit.sampler.worlds import DESIGNED
from treejax.progress import Advance

AUDIT = "sampler"
_WORKERS = 2  # one program compiles while another walks


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is done.

    Attributes:
      seed: of everything; seeds: independent repetitions of every set of walks.
      walks: a repetition; worlds: names of ``worlds.DESIGNED`` that are walked through.
      steps: captured from the model, if one is given.
      trees: (tokens, rows): every tree of up to so many rows is enumerated over so many tokens.
      sequences, tokens: of the streams that must equal plain's.
      alpha: chance of one false alarm among all G-tests of a run, shared out evenly (Bonferroni).
      fault_seeds, fault_walks: repetitions of every planted fault, and walks of each; clean
        samplers are repeated as often.
    """

    seed: int = 0
    seeds: int = 3
    walks: int = 200_000
    worlds: tuple[str, ...] = tuple(DESIGNED)
    steps: int = 6
    trees: tuple[tuple[int, int], ...] = ((3, 6), (4, 5), (5, 4))
    sequences: int = 64
    tokens: int = 40
    alpha: float = 1e-3
    fault_seeds: int = 100
    fault_walks: int = 5_000

    def __post_init__(self):
        for name in ("seeds", "walks", "sequences", "tokens", "fault_seeds", "fault_walks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.steps < 0 or not 0 < self.alpha < 1:
            raise ValueError(
                f"steps is {self.steps} and alpha {self.alpha}, expected 0 or more and a chance"
            )
        unknown = set(self.worlds) - set(DESIGNED)
        if unknown:
            raise ValueError(f"worlds {sorted(unknown)} are unknown, known: {', '.join(DESIGNED)}")

    @classmethod
    def quick(cls) -> "Settings":
        """Seconds a rule: one designed world, small trees, no captured step."""
        return cls(
            walks=10_000,
            worlds=("designed",),
            steps=0,
            trees=((3, 4),),
            sequences=16,
            tokens=24,
            fault_seeds=3,
        )

    @property
    def shrunk(self) -> bool:
        """Whether one way to draft stands for all that a rule serves: where little is done."""
        return len(self.worlds) <= 1


FULL = Settings()


def name_of(sampler: Sampler) -> str:
    """As reports call it: the rule, its settings and the kind of candidates."""
    own = dataclasses.asdict(sampler.rule) if dataclasses.is_dataclass(sampler.rule) else {}
    inside = ", ".join(f"{name}={value}" for name, value in own.items())
    return f"{sampler.rule.name}{f'({inside})' if inside else ''}/{sampler.proposals}"


def carry_out(jobs: Sequence[tuple[str, Callable[[], Any]]], advance: Advance) -> list[Any]:
    """Results in the order of the jobs."""
    done = []
    with ThreadPoolExecutor(_WORKERS) as pool:
        waiting = [(name, pool.submit(job)) for name, job in jobs]
        try:
            for name, job in waiting:
                advance(name, len(done), len(jobs))
                done.append(job.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    advance("sampler", len(jobs), len(jobs))
    return done
