"""The training configuration: one frozen dataclass, read strictly from a TOML file."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from treejax.config import ModelConfig, from_mapping, read_toml
from treejax.delta_rule import CHUNK
from treejax.training.corpus import CorpusSettings
from treejax.training.optimizer import OptimizerSettings

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class ScheduleSettings:
    """How long to train: ``steps``, or ``seconds`` from which steps follow once one was timed.

    Attributes:
      batch, window: windows a step, and tokens a window (a multiple of 64).
      warmup: steps of linear warm-up; a cosine to 1 % follows and ends at the last step.
    """

    batch: int
    window: int
    warmup: int
    steps: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything that decides what a training run computes.

    Attributes:
      mtp_weights: loss weights of the head's pass on true hidden rows, and of the pass on its own.
      dtype: of activations and products; masters and gates are float32.
      checkpoint_seconds: how often to checkpoint.
    """

    model: ModelConfig
    corpus: CorpusSettings
    schedule: ScheduleSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    mtp_weights: tuple[float, ...] = (0.3, 0.15)
    dtype: str = "bfloat16"
    seed: int = 0
    checkpoint_seconds: float = 120.0

    def __post_init__(self):
        schedule = self.schedule
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of: {', '.join(DTYPES)}")
        if (schedule.steps > 0) == (schedule.seconds > 0):
            raise ValueError(
                f"schedule.steps is {schedule.steps} and schedule.seconds {schedule.seconds}, "
                "expected exactly one of them above 0"
            )
        if schedule.window < CHUNK or schedule.window % CHUNK:
            raise ValueError(
                f"schedule.window is {schedule.window}, expected a multiple of {CHUNK}"
            )
        if schedule.batch < 1 or schedule.warmup < 1:
            raise ValueError(
                f"schedule.batch is {schedule.batch} and schedule.warmup {schedule.warmup}, "
                "expected at least 1"
            )
        if schedule.window > self.model.max_position_embeddings:
            raise ValueError(
                f"schedule.window is {schedule.window}, above model.max_position_embeddings "
                f"({self.model.max_position_embeddings})"
            )
        if not self.model.mtp_num_hidden_layers:
            raise ValueError(
                "model.mtp_num_hidden_layers is 0, expected 1: the head is trained too"
            )
        if len(self.mtp_weights) != 2:
            raise ValueError(f"mtp_weights has {len(self.mtp_weights)} numbers, expected 2")
        if not 257 <= self.model.vocab_size <= 65536:
            raise ValueError(
                f"model.vocab_size is {self.model.vocab_size}, expected 257 to 65536: the bytes, "
                "the file token, and what fits uint16"
            )


def read_settings(path: str | Path) -> TrainSettings:
    """Read a training configuration; every mistake is a ``ValueError`` of one line."""
    return from_mapping(TrainSettings, read_toml(path), str(path))
