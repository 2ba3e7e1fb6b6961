"""The training loop: compile beside the corpus, time the steps, log, checkpoint, stop cleanly.

Invariant: what a step computes depends on the settings, the corpus and the step's number alone
(with a time budget also on the schedule's length, which is fixed once and stored), never on when
the run was interrupted.
"""

import dataclasses
import functools
import json
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.shapes import Array
from treejax.training.batches import Batches
from treejax.training.checkpoints import Checkpoints, Progress, TrainState, abstract_state
from treejax.training.loss import AHEAD, attention_kernel, window_loss
from treejax.training.optimizer import learning_rate, make_optimizer
from treejax.training.settings import DTYPES, TrainSettings

TIMED = (10, 50)
"""With a time budget, the steps between which a step is timed; then the length is set."""

_IN_FLIGHT = 2  # steps dispatched ahead of the last one whose losses were read


class Stopped(Exception):
    """The run was asked to stop, and its state is saved."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the loss curve; losses in nats a token, means over the steps since the last."""

    step: int
    total: int
    seconds: float
    learning_rate: float
    main: float
    mtp: float
    chained: float
    gradient_norm: float
    step_ms: float


def compile_step(settings: TrainSettings) -> Callable[..., tuple[TrainState, Array]]:
    """The compiled step: (state, tokens [batch, window + 3] int32, lr) to (state, metrics [4])."""
    dtype = DTYPES[settings.dtype]
    optimizer = make_optimizer(settings.optimizer)
    first, second = settings.mtp_weights
    loss = functools.partial(
        window_loss,
        settings.model,
        weights=(first, second),
        dtype=dtype,
        kernel=attention_kernel(dtype),
    )

    def step(state: TrainState, tokens: Array, rate: Array) -> tuple[TrainState, Array]:
        (_, losses), grads = jax.value_and_grad(
            lambda masters: loss(masters=masters, tokens=tokens), has_aux=True
        )(state.params)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        return TrainState(params, optimizer_state), jnp.stack([*losses, norm])

    shape = settings.schedule.batch, settings.schedule.window + AHEAD
    return (
        jax.jit(step, donate_argnums=0)
        .lower(
            abstract_state(settings),
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct((), jnp.float32),
        )
        .compile()
    )


class Curve:
    """The loss curve as JSON lines, flushed line by line; a resumed run cuts what it will redo."""

    def __init__(self, path: Path, done: int):
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # a line that a kill cut short
                    continue
                if row["step"] <= done:
                    kept.append(line + "\n")
        path.write_text("".join(kept))
        self._file = path.open("a")

    def write(self, row: Row) -> None:
        rounded = {k: round(v, 6) for k, v in dataclasses.asdict(row).items()}
        self._file.write(json.dumps(rounded) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def run(
    settings: TrainSettings,
    step: Callable[..., tuple[TrainState, Array]],
    state: TrainState,
    progress: Progress,
    batches: Batches,
    checkpoints: Checkpoints,
    curve: Curve,
    *,
    log_every: int,
    should_stop: Callable[[], bool],
    report: Callable[[Row], None],
) -> TrainState:
    """Train from ``progress`` to the end of the schedule, and return the final state.

    Raises:
      Stopped: ``should_stop()`` became true; the state was checkpointed.
      ValueError: the loss is not finite.
    """
    schedule = settings.schedule
    done, total = progress.step, progress.total
    if schedule.steps:
        total = schedule.steps
    before, began = progress.seconds, time.perf_counter()
    last_saved, timed_from = began, None
    waiting: deque[tuple[int, float, Array]] = deque()
    window: list[np.ndarray] = []
    marked = began

    def seconds() -> float:
        return before + time.perf_counter() - began

    def read_oldest() -> None:
        nonlocal marked, window
        number, rate, metrics = waiting.popleft()
        values = np.asarray(metrics)
        if not np.isfinite(values).all():
            raise ValueError(
                f"the loss of step {number} is not finite: lower optimizer.learning_rate"
            )
        window.append(values)
        if number % log_every == 0 or number == total:
            now = time.perf_counter()
            main, mtp, chained, norm = (float(v) for v in np.mean(window, axis=0))
            each = 1e3 * (now - marked) / len(window)
            row = Row(number, total, seconds(), rate, main, mtp, chained, norm, each)
            marked, window = now, []
            curve.write(row)
            report(row)

    while total < 0 or done < total:
        rate = learning_rate(
            settings.optimizer, done, total if total > 0 else None, schedule.warmup
        )
        state, metrics = step(state, batches[done], np.float32(rate))
        done += 1
        waiting.append((done, rate, metrics))
        while len(waiting) > _IN_FLIGHT:
            read_oldest()
        if total < 0:
            if timed_from is None and done >= progress.step + TIMED[0]:
                jax.block_until_ready(metrics)
                timed_from = done, time.perf_counter()
            elif timed_from is not None and done >= timed_from[0] + TIMED[1] - TIMED[0]:
                jax.block_until_ready(metrics)
                each = (time.perf_counter() - timed_from[1]) / (done - timed_from[0])
                total = done + max(1, math.floor((schedule.seconds - seconds()) / each))
        stop = should_stop()
        due = time.perf_counter() - last_saved > settings.checkpoint_seconds
        if stop or due or done == total:
            while waiting:
                read_oldest()
            checkpoints.save(state, Progress(done, total, seconds()))
            last_saved = time.perf_counter()
        if stop and done != total:
            checkpoints.wait()
            raise Stopped
    checkpoints.wait()
    return state


def parameter_count(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
