"""How much the continuation audit does."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treejax.audit.continuation.lengths import plan_of
from treejax.audit.prefixes import Split, prefixes
from treejax.loop import state_rows
from treejax.model import Model
from treejax.sampling import Sampling
from treejax.shapes import Array

SCHEDULES = ("cold", "primed", "lengths", "resumed")
"""How a prefix came to be in the state: at once; half of it, then token by token by the subject,
then the rest; at once, and then paths of every length are published, on purpose; at once, and half
of the cycles later saved, and restored into a fresh state."""


class LongRun(NamedTuple):
    """Sizes of a long run: texts, tokens of each one's prompt, tokens that ``each`` goes on for,
    and rows of a state for that."""

    texts: int
    prompt: int
    each: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the continuation audit.

    Attributes:
      prefixes: held-out sequences, all in one batch; as many calibrate.
      length: tokens of the longest; each is ``shorter`` tokens shorter than the one before it.
      cycles: steps a schedule; the last one verifies the root alone. ``lengths`` has as many as its
        lengths take.
      schedules: of ``SCHEDULES``.
      factor: bounds are the floor plus this many times the controls' largest distance.
      long_tokens: tokens of the long run, 0 for none; its steps are measured every ``long_every``.
      fresh_process: whether the resumed schedule also goes on in a process of its own.
      tightness: whether the smallest perturbations that are caught are searched for.
      sampling: how both draw; greedy by default. Under temperature the noise is shared.
      seed: of prefixes, keys and packed trees.
    """

    prefixes: int = 6
    length: int = 230
    shorter: int = 9
    cycles: int = 7
    schedules: tuple[str, ...] = SCHEDULES
    factor: float = 4.0
    long_tokens: int = 10_000
    long_every: int = 64
    fresh_process: bool = True
    tightness: bool = True
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seed: int = 0

    def __post_init__(self):
        unknown = [name for name in self.schedules if name not in SCHEDULES]
        if unknown or not self.schedules:
            raise ValueError(
                f"schedules are {list(self.schedules)}, expected one or more of: "
                f"{', '.join(SCHEDULES)}"
            )
        least = self.length - self.shorter * (self.prefixes - 1)
        if self.prefixes < 1 or self.cycles < 2 or least < 8 or self.shorter < 0:
            raise ValueError(
                f"{self.prefixes} prefixes down to {least} tokens and {self.cycles} cycles, "
                "expected 1, 8 and 2 or more"
            )
        if self.fresh_process and "resumed" not in self.schedules:
            raise ValueError(
                "a fresh process goes on from the resumed schedule: add 'resumed' to schedules, or "
                "set fresh_process=False"
            )
        if self.factor < 1.0 or self.long_tokens < 0 or self.long_every < 1:
            raise ValueError(
                f"factor {self.factor}, long_tokens {self.long_tokens} and long_every "
                f"{self.long_every}, expected 1, 0 and 1 or more"
            )

    @classmethod
    def quick(cls) -> "Settings":
        """Seconds on the model that ships: every schedule, few and short."""
        return cls(prefixes=3, length=60, shorter=5, cycles=4, long_tokens=0, fresh_process=False)

    def texts(self, model: Model, split: Split) -> list[list[int]]:
        """The prefixes of a split."""
        made = prefixes(model, split, self.prefixes, self.length, self.seed)
        return [text[: self.length - self.shorter * i] for i, text in enumerate(made)]

    def keys(self) -> Array:
        """[prefixes] keys."""
        return jax.vmap(jax.random.key)(self.seed + jnp.arange(self.prefixes))

    def tokens(self, depth: int) -> int:
        """Tokens that plain must know for all cycles of trees of a depth."""
        lengths = 1 + plan_of(self.prefixes, depth)
        return max(self.cycles * (depth + 1), int(lengths.sum(axis=0).max())) + depth + 1

    def rows(self, model: Model, depth: int) -> int:
        """Rows of a state for that.

        Raises:
          ValueError: more than the model's context.
        """
        needed = self.length + self.tokens(depth)
        if needed > model.config.max_position_embeddings:
            raise ValueError(
                f"{self.length} tokens and {self.cycles} cycles of trees of depth {depth} need "
                f"{needed} rows, expected at most the context of "
                f"{model.config.max_position_embeddings}: ask for fewer"
            )
        return state_rows(model, needed)

    def long_run(self, model: Model, depth: int) -> LongRun:
        """How ``long_tokens`` are spread over texts that the model's context has room for, with
        trees of a depth."""
        slack, context = 2 * (depth + 1), model.config.max_position_embeddings
        prompt = min(self.length, context // 4)
        texts = -(-self.long_tokens // min(context - prompt - slack, self.long_tokens))
        each = -(-self.long_tokens // texts)
        return LongRun(texts, prompt, each, state_rows(model, prompt + each + slack))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        made = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        given = {k: v for k, v in vars(self.sampling).items() if v is not None}
        return made | {
            "schedules": list(self.schedules),
            "sampling": {name: str(value) for name, value in given.items()},
        }


FULL = Settings()
