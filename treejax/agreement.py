"""Whether a drafted generation is what plain decoding gives: tokens, and state surfaces.

In float32 the streams must be equal; a position whose two candidates lie closer than rounding is
reported as a near tie and not counted as a failure. In bfloat16 the first difference is reported
with its margin, and must lie within a stated tolerance. Where the streams are equal, the published
R, C and K must agree too.
"""

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax.history import begin, extend
from treejax.loop import run, settle, state_rows
from treejax.model import Model, prefill
from treejax.policies import make_policy
from treejax.requests import Request
from treejax.sampling import Sampling, adjust, noise, per_sequence, process
from treejax.state import State, init_state
from treejax.stats import Stats
from treejax.steps.publish import publish
from treejax.steps.select import Choice
from treejax.steps.verify import verify
from treejax.text import TextStream
from treejax.tree import Tree

NEAR_TIE = {"float32": 1e-5, "bfloat16": 0.25}
"""Nats between two tokens below which rounding may exchange them: 1e-5 is some ten units in the
last place of a logit of 10; bfloat16 keeps 8 bits of every activation on the way there."""

STATE_TOLERANCE = {"float32": 3e-5, "bfloat16": 0.05}
"""Relative RMS distance allowed between published surfaces: operands computed in blocks of
different sizes are rounded differently, and R sums that up. After 1,024 tokens of the shipped model
on an H200, R was 1.0e-5 off at most where a policy rebuilds it and 1.4e-6 where it replays. The
audits hold generations to bounds that are calibrated for their length."""


class Recording(NamedTuple):
    """A generation that is over: its tokens, figures, and row ``row`` of the last state."""

    tokens: tuple[int, ...]
    stats: Stats
    state: State | None
    row: int = 0


def record(
    model: Model,
    prompts: Sequence[Sequence[int]],
    budget: int,
    *,
    policy: Any,
    drafter: Any = None,
    tree: Any = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    implementation: str = "auto",
) -> list[Recording]:
    """Generate exactly ``budget`` tokens after each prompt, in one batch; nothing ends earlier."""
    requests = [Request(list(prompt), budget, set(), TextStream(None)) for prompt in prompts]
    how = (policy, drafter, tree, sampling, seed)
    state = drain(run(model, requests, *how, implementation=implementation))
    return [Recording(tuple(r.tokens), r.stats, state, row) for row, r in enumerate(requests)]


def drain[T](steps: Generator[Any, None, T]) -> T:
    """Run a loop to its end: its return value."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The outcome of one comparison.

    Attributes:
      compared: tokens compared.
      equal: tokens before the first difference.
      pair: (plain's token, drafted token) at the first difference, or None.
      margin: nats by which plain preferred its own token there.
      allowed: the margin up to which a difference is rounding.
      surfaces: relative RMS distance of "R", "C" and "K" (the largest over layers), 0.0 if bitwise
        equal; empty where states were not compared.
      tolerance: the distance allowed.
    """

    compared: int
    equal: int
    pair: tuple[int, int] | None
    margin: float
    allowed: float
    surfaces: dict[str, float]
    tolerance: float

    @property
    def near_tie(self) -> bool:
        return self.pair is not None and self.margin < self.allowed

    @property
    def ok(self) -> bool:
        """Streams equal up to a near tie, and states within tolerance."""
        if self.pair is not None:
            return self.near_tie
        return all(distance <= self.tolerance for distance in self.surfaces.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "equal": self.equal,
            "compared": self.compared,
            "margin": self.margin if self.pair and math.isfinite(self.margin) else None,
            "surfaces": self.surfaces,
        }

    def __str__(self) -> str:
        if self.pair is None:
            return f"equal {self.equal}/{self.compared}   {self._surfaces()}"
        what = "near tie" if self.near_tie else "DIFFERS"
        relation = "<" if self.near_tie else ">="
        return (
            f"{what} at token {self.equal} of {self.compared}: plain {self.pair[0]}, drafted "
            f"{self.pair[1]}, margin {self.margin:.2g} {relation} {self.allowed:g} nats"
        )

    def _surfaces(self) -> str:
        if not self.surfaces:
            return "no state to compare"
        if not any(self.surfaces.values()):
            return f"{', '.join(self.surfaces)} bitwise equal"
        parts = [f"{name} {distance:.1g}" for name, distance in self.surfaces.items()]
        verdict = "within" if self.ok else "NOT within"
        return f"{', '.join(parts)} relative RMS, {verdict} {self.tolerance:g}"


def compare(
    model: Model,
    prompt: Sequence[int],
    drafted: Recording,
    plain: Recording,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Agreement:
    """Compare a drafted generation with a plain one of the same prompt, settings and seed.

    ``plain`` may be longer: a drafted state may hold tokens past a stop that were not delivered.

    Raises:
      ValueError: too few plain tokens, or states that hold different numbers of tokens.
    """
    if len(plain.tokens) < len(drafted.tokens):
        raise ValueError(
            f"{len(plain.tokens)} plain tokens for {len(drafted.tokens)}, expected as many"
        )
    dtype = jnp.dtype(model.dtype).name
    pairs = list(zip(plain.tokens, drafted.tokens, strict=False))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    pair = pairs[equal] if equal < len(pairs) else None
    margin, surfaces = 0.0, {}
    if pair is not None:
        if plain.state is not None:
            policy = plain.state.policy  # the object itself: it may be a user's own
        else:
            policy = make_policy(plain.stats.policy, plain.stats.implementation)
        scores = plain_scores(model, prompt, plain.tokens[:equal], policy, sampling, seed)
        margin = abs(float(scores[pair[0]] - scores[pair[1]]))
    elif drafted.state is not None and plain.state is not None:
        surfaces = compare_states(drafted.state, plain.state, drafted.row, plain.row)
    return Agreement(
        compared=len(drafted.tokens),
        equal=equal,
        pair=pair,
        margin=margin,
        allowed=NEAR_TIE[dtype],
        surfaces=surfaces,
        tolerance=STATE_TOLERANCE[dtype],
    )


def compare_states(
    state: State, plain: State, row: int = 0, plain_row: int = 0
) -> dict[str, float]:
    """Relative RMS distance between a row of each state, by surface: the largest over layers.

    Raises:
      ValueError: the rows hold different numbers of tokens.
    """
    length, expected = int(state.length[row]), int(plain.length[plain_row])
    if length != expected:
        raise ValueError(f"the states hold {length} and {expected} tokens, expected equal numbers")
    distances = {"R": 0.0, "C": 0.0, "K": 0.0}

    def widen(name: str, mine: Any, theirs: Any) -> None:
        mine, theirs = np.asarray(mine[row]), np.asarray(theirs[plain_row])
        if name == "K":  # cut on the host: on a device every length would be a program
            mine, theirs = mine[:length], theirs[:length]
        distances[name] = max(distances[name], _distance(mine, theirs))

    for layer in state.config.linear_layers:
        widen("R", state.recurrent_of(layer), plain.recurrent_of(layer))
        widen("C", state.conv_of(layer), plain.conv_of(layer))
    for layer in state.config.full_layers:
        for mine, theirs in zip(state.kv_of(layer), plain.kv_of(layer), strict=True):
            widen("K", mine, theirs)
    return distances


def _distance(mine: Any, theirs: Any) -> float:
    a, b = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
    if np.array_equal(a, b):
        return 0.0
    difference = float(np.linalg.norm(a - b))
    return difference / float(np.linalg.norm(b)) if b.any() else float("inf")


def plain_scores(
    model: Model,
    prompt: Sequence[int],
    tokens: Sequence[int],
    policy: Any,
    sampling: Sampling | None,
    seed: int,
) -> np.ndarray:
    """What plain decoding takes the argmax of after ``tokens``: logits, or z + g when sampling."""
    sampling = settle(model, (), sampling)
    position = len(prompt) + len(tokens)
    rows = state_rows(model, position)
    state = init_state(model.config, 1, rows, model.dtype, policy)
    out, state = prefill(model, state, np.asarray([prompt]), [len(prompt)])
    logits = out.logits[0]
    root = Choice(*(jnp.array(x, jnp.int32) for x in ([[0]], [1], [0])))
    for token in tokens:
        tree = Tree.root_only(jnp.array([token], jnp.int32))
        out, scratch = verify(model, state, tree)
        state = publish(model, state, tree, scratch, root)
        logits = out.logits[0, 0]
    return _scores(logits, sampling, prompt, tokens, seed)


def _scores(
    logits: jax.Array,
    sampling: Sampling,
    prompt: Sequence[int],
    tokens: Sequence[int],
    seed: int,
) -> np.ndarray:
    """What is compared when the token after ``tokens`` is drawn from ``logits`` [V]."""
    vocabulary, history = logits.shape[-1], None
    if sampling.needs_history:
        history = begin(jnp.asarray([prompt]), jnp.array([len(prompt)]), vocabulary)
        if len(tokens):
            history = extend(history, jnp.asarray([tokens]), jnp.array([len(tokens)]))
    at = len(prompt) + len(tokens)
    settings, keys, position = per_sequence(1, sampling, jax.random.key(seed)[None], at, vocabulary)
    if keys is None or position is None:
        return np.asarray(jax.vmap(adjust)(logits[None], settings, history)[0])
    weights = jax.vmap(process)(logits[None], settings, history)[0]
    return np.asarray(weights + noise(keys[0], position[0], vocabulary))
