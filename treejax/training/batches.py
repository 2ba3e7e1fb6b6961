"""Which windows of the token array make up step s: a pure function of the seed and s.

An epoch cuts the array into windows of T tokens from a random offset and permutes them. Invariant:
any step can be computed alone, so a resumed run reads exactly what the uninterrupted one would.
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches [batch, window + ahead] of a token array [tokens].

    Attributes:
      ahead: tokens after a window's last row that serve as targets alone.
    """

    tokens: np.ndarray
    batch: int
    window: int
    ahead: int
    seed: int

    def __post_init__(self):
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"the corpus has {len(self.tokens):,} tokens, too few for one batch of "
                f"{self.batch} windows of {self.window}: add text or lower batch or window"
            )

    @property
    def steps_per_epoch(self) -> int:
        usable = len(self.tokens) - (self.window - 1) - self.ahead  # after the largest offset
        return usable // self.window // self.batch

    def starts(self, step: int) -> np.ndarray:
        """First token of each window of ``step``: [batch]."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[place * self.batch : (place + 1) * self.batch]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - two epochs of a run's one object
    def _epoch(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng([self.seed, epoch])
        offset = random.integers(self.window)
        count = self.steps_per_epoch * self.batch
        available = (len(self.tokens) - self.ahead - offset) // self.window
        return offset + self.window * random.permutation(available)[:count]

    def __getitem__(self, step: int) -> np.ndarray:
        """Tokens [batch, window + ahead] int32 of ``step``."""
        columns = np.arange(self.window + self.ahead)
        return self.tokens[self.starts(step)[:, None] + columns].astype(np.int32)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
