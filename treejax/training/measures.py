"""What a trained model is judged by: bits per byte, and how many drafts of its own head it accepts.

Everything runs through the training forward over whole windows, teacher-forced or greedy, with no
cache: an account of the model that is independent of the decoding code. Invariant: every token of
a file is scored once (the file token in front of it is not), with at least ``stride`` tokens of
context where the file has them, and every byte of the file is charged.
"""

import functools
import lzma
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax import layers
from treejax.config import ModelConfig
from treejax.shapes import Array
from treejax.training.loss import (
    AttentionKernel,
    negative_log_likelihood,
    window_hidden,
    window_mtp,
)

CHAIN = 3  # drafts of a chain
GENERATED = 32  # own greedy tokens before the second measurement
PREFIX = 512  # true tokens before the first
_LENGTH = 576  # PREFIX + GENERATED + CHAIN + 1, up to a multiple of 64


class WindowPlan(NamedTuple):
    """Windows [n, window + 1] of tokens, the file of each, and the rows [low, high) to count."""

    tokens: np.ndarray
    file: np.ndarray
    low: np.ndarray
    high: np.ndarray


def plan_windows(files: list[np.ndarray], window: int, stride: int) -> WindowPlan:
    """Cut files (each begins with the file token) so that each later token is counted once.

    A window starts every ``stride`` tokens; all but a file's first count their last ``stride``
    rows alone. Row t of a window predicts its token t + 1.
    """
    tokens, file, low, high = [], [], [], []
    for number, ids in enumerate(files):
        scored = len(ids) - 1
        start = 0
        while scored > 0:
            piece = ids[start : start + window + 1]
            tokens.append(np.pad(piece, (0, window + 1 - len(piece))))
            file.append(number)
            low.append(0 if start == 0 else window - stride)
            high.append(min(window, scored - start))
            if start + window >= scored:
                break
            start += stride
    return WindowPlan(np.stack(tokens), np.array(file), np.array(low), np.array(high))


@functools.partial(jax.jit, static_argnames=("config", "kernel"))
def _window_nll(
    config: ModelConfig, params: layers.Params, tokens: Array, kernel: AttentionKernel
) -> Array:
    hidden = window_hidden(config, params, tokens[:, :-1], kernel)
    return negative_log_likelihood(params, hidden, tokens[:, 1:])


def bits_by_file(
    config: ModelConfig,
    params: layers.Params,
    files: list[np.ndarray],
    *,
    window: int,
    stride: int,
    batch: int,
    kernel: AttentionKernel,
    tick: Callable[[float], None] = lambda fraction: None,
) -> np.ndarray:
    """Bits of each file's tokens, the file token in front not counted: [files] float64."""
    plan = plan_windows(files, window, stride)
    bits = np.zeros(len(files))
    rows = np.arange(window)
    total = len(plan.tokens)
    waiting: list[tuple[int, Array]] = []

    def collect() -> None:
        start, nll = waiting.pop(0)
        stop = min(start + batch, total)
        counted = (rows >= plan.low[start:stop, None]) & (rows < plan.high[start:stop, None])
        nats = np.where(counted, np.asarray(nll, np.float64)[: stop - start], 0.0).sum(axis=1)
        np.add.at(bits, plan.file[start:stop], nats / np.log(2))
        tick(stop / total)

    for start in range(0, total, batch):
        block = plan.tokens[start : start + batch]
        block = np.pad(block, ((0, batch - len(block)), (0, 0)))  # one shape, one compilation
        waiting.append((start, _window_nll(config, params, block.astype(np.int32), kernel)))
        if len(waiting) > 2:
            collect()
    while waiting:
        collect()
    return bits


def true_prefixes(files: list[np.ndarray], count: int, seed: int) -> np.ndarray:
    """Random stretches of ``PREFIX`` tokens, a file drawn first and then a place: [count, 512]."""
    long = [ids for ids in files if len(ids) > PREFIX + CHAIN + 1]
    if not long:
        raise ValueError(
            f"no file has more than {PREFIX + CHAIN + 1} tokens: raise --limit-mb, or --prefixes 0"
        )
    random = np.random.default_rng(seed)
    stretches = []
    for _ in range(count):
        ids = long[random.integers(len(long))]
        start = random.integers(len(ids) - PREFIX)
        stretches.append(ids[start : start + PREFIX])
    return np.stack(stretches)


@functools.partial(jax.jit, static_argnames=("config", "kernel"))
def _extend(
    config: ModelConfig,
    params: layers.Params,
    tokens: Array,
    start: Array,
    count: Array,
    kernel: AttentionKernel,
) -> Array:
    """Write ``count`` greedy tokens into tokens [B, L] from column ``start`` on."""

    def body(column: Array, tokens: Array) -> Array:
        hidden = window_hidden(config, params, tokens, kernel)
        last = jax.lax.dynamic_index_in_dim(hidden, column - 1, 1, keepdims=False)
        chosen = jnp.argmax(layers.logits(params, last), axis=-1).astype(tokens.dtype)
        return jax.lax.dynamic_update_index_in_dim(tokens, chosen, column, 1)

    return jax.lax.fori_loop(start, start + count, body, tokens)


@functools.partial(jax.jit, static_argnames=("config", "kernel"))
def _chain_hits(
    config: ModelConfig, params: layers.Params, tokens: Array, start: Array, kernel: AttentionKernel
) -> Array:
    """Whether each draft equals the model's own greedy token: bool [B, CHAIN].

    tokens[:, start : start + CHAIN + 1] are greedy; tokens[:, start] is the pending token. Draft j
    comes from the pair (h, token) at row start - 1 + j: the true hidden row and the pending token
    for j = 0, the head's own row and its own draft after that.
    """
    hidden = window_hidden(config, params, tokens, kernel)
    following = jnp.roll(tokens, -1, axis=1)
    hits = []
    for j in range(CHAIN):
        row = start - 1 + j
        made = window_mtp(config, params, hidden, following, kernel)
        made = jax.lax.dynamic_index_in_dim(made, row, 1, keepdims=False)
        draft = jnp.argmax(layers.logits(params, made), axis=-1).astype(tokens.dtype)
        target = jax.lax.dynamic_index_in_dim(tokens, start + 1 + j, 1, keepdims=False)
        hits.append(draft == target)
        hidden = jax.lax.dynamic_update_index_in_dim(hidden, made, row + 1, 1)
        following = jax.lax.dynamic_update_index_in_dim(following, draft, row + 1, 1)
    return jnp.stack(hits, axis=1)


class Acceptance(NamedTuple):
    """Mean accepted drafts of a chain, its standard error, and P(draft j | earlier ones right)."""

    mean: float
    error: float
    by_position: tuple[float, ...]


def _summarise(hits: np.ndarray) -> Acceptance:
    right = np.cumprod(hits, axis=1)
    reached = np.concatenate([np.ones((len(right), 1)), right[:, :-1]], axis=1).sum(axis=0)
    accepted = right.sum(axis=1)
    by_position = right.sum(axis=0) / np.maximum(reached, 1)
    error = accepted.std() / len(accepted) ** 0.5
    return Acceptance(float(accepted.mean()), float(error), tuple(map(float, by_position)))


def chain_acceptance(
    config: ModelConfig,
    params: layers.Params,
    prefixes: np.ndarray,
    *,
    batch: int,
    kernel: AttentionKernel,
) -> tuple[Acceptance, Acceptance]:
    """Greedy chains of 3 drafts: right after true prefixes [n, 512], and 32 own tokens later."""
    after_true, generating = [], []
    for start in range(0, len(prefixes), batch):
        real = prefixes[start : start + batch]
        tokens = np.zeros((batch, _LENGTH), np.int32)
        tokens[: len(real), :PREFIX] = real
        ahead = np.int32(PREFIX), np.int32(CHAIN + 1)
        tokens = _extend(config, params, tokens, *ahead, kernel)
        hits = _chain_hits(config, params, tokens, np.int32(PREFIX), kernel)
        after_true.append(np.asarray(hits)[: len(real)])
        ahead = np.int32(PREFIX + CHAIN + 1), np.int32(GENERATED)
        tokens = _extend(config, params, tokens, *ahead, kernel)
        hits = _chain_hits(config, params, tokens, np.int32(PREFIX + GENERATED), kernel)
        generating.append(np.asarray(hits)[: len(real)])
    return _summarise(np.concatenate(after_true)), _summarise(np.concatenate(generating))


def xz_bits(texts: Iterable[str]) -> int:
    """Bits that ``xz -9e`` needs for the concatenation."""
    data = "".join(texts).encode("utf-8")
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
