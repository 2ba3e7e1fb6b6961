"""Thousands of tokens by one subject, side by side with plain decoding: what the errors grow to.

Every token is compared. Every so many cycles plain decoding, which has come exactly as far, is
recorded for one more step, and all surfaces of the subject's next step are measured.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.continuation.lengths import free, runnable
from treejax.audit.continuation.limits import FREE, OUT, limited
from treejax.audit.continuation.native import Native, ahead, begin
from treejax.audit.continuation.schedules import End
from treejax.audit.continuation.settings import Settings
from treejax.audit.continuation.verdict import LONG, WORDS, Tally
from treejax.audit.intake import engine_of, take_in
from treejax.audit.memories import fragile
from treejax.audit.prefixes import prefixes
from treejax.audit.reference import decode_from
from treejax.audit.rows import RowLogits
from treejax.audit.step import Subject, cycle
from treejax.audit.surfaces import measure
from treejax.model import Model


def run(
    model: Model,
    subject: Subject,
    settings: Settings,
    tally: Tally,
    advance: Callable[[int, int], None],
) -> tuple[RowLogits, End]:
    """Generate ``settings.long_tokens`` tokens, in as many texts as the context asks for.

    ``advance`` is told how many there are, and how many there will be. Returns the last measured
    step in which all texts took part, and plain decoding there.
    """
    drafter = subject.drafter
    batch, prompt, each, rows = settings.long_run(model, drafter.max_depth)
    texts = prefixes(model, "held-out", batch, prompt, settings.seed + 1)
    keys = jax.vmap(jax.random.key)(settings.seed + jnp.arange(batch))
    how = {"keys": keys, "sampling": settings.sampling}
    drawn = settings.sampling.prepared(model.config.vocab_size)

    start = take_in(model, texts, drafter, max_length=rows, sampling=settings.sampling)
    weights = start.draft.weights
    native = begin(model, start, **how)
    engine = engine_of(subject, start, native.pending)
    total, alive = np.zeros(batch, np.int64), np.ones(batch, bool)
    emitted: list[list[int]] = [[] for _ in texts]  # since plain was last brought up
    runs, alone = runnable(subject), free(subject, weights, batch)
    index, last = 0, None
    for index in itertools.count():
        done = total >= each
        if done[alive].all():
            break
        limit = np.where(done, OUT, FREE + drafter.max_depth)
        measured = index % settings.long_every == 0
        if measured:
            advance(min(int(total.sum()), settings.long_tokens), settings.long_tokens)
            native, alive = _bring_up(native, emitted, alive, index, model, drafter, tally, how)
            emitted = [[] for _ in texts]
            plain = decode_from(model, native.start, drafter.max_depth + 1, by=drafter, **how)
        after, shown = cycle(
            *(model.config, runs, model.params, alone, engine, keys, drawn),
            *(limited(jnp.asarray(limit, jnp.int32)), jnp.int32(0)),
        )
        tokens, count = np.asarray(shown.tokens), np.asarray(shown.count)
        if measured:
            nowhere = np.zeros(batch, np.int64)
            expected = RowLogits(model, plain)
            made = measure(
                *(model, subject, weights, engine, after, shown, expected, nowhere),
                limit=limit,
                **how,
            )
            where = {"schedule": LONG, "cycle": index}
            shaky = functools.partial(
                fragile,
                *(model, subject, weights, after.memory, plain, made.offset),
                size=tally.bounds_at(where).widest("drafter"),
                **how,
            )
            end = End(weights, engine, after, shown, nowhere, made.offset, alive, None)
            last = last if done.any() else (expected, end)
            alive = tally.record(made, shown, plain, nowhere, alive, where, shaky)
            tally.drift.append(_drift(subject, index, total, alive, made.distances))
        for b in range(batch):
            emitted[b] += tokens[b, : count[b]].tolist()
        total = total + count
        engine = after
    _, alive = _bring_up(native, emitted, alive, index, model, drafter, tally, how)
    tally.facts["long run"] = {
        "tokens": int(total.sum()),
        "texts": batch,
        "tokens each": total.tolist(),
        "to the end": alive.tolist(),
        "context": model.config.max_position_embeddings,
    }
    assert last is not None  # the first step is measured, and every text takes part in it
    return last


def _drift(
    subject: Subject, index: int, total: np.ndarray, alive: np.ndarray, distances: Any
) -> dict[str, Any]:
    """A row: the largest distance by surface, over the texts that are compared."""
    row = {"subject": subject.name, "cycle": index, "tokens": int(total.max())}
    return row | {name: float(values[alive].max(initial=0.0)) for name, values in distances.items()}


def _bring_up(
    native: Native,
    emitted: list[list[int]],
    alive: np.ndarray,
    index: int,
    model: Model,
    drafter: Any,
    tally: Tally,
    how: dict[str, Any],
) -> tuple[Native, np.ndarray]:
    """Plain decoding as far as the subject has come; who emitted the same tokens on the way."""
    counts = np.array([len(tokens) for tokens in emitted], np.int32)
    reached, drawn = ahead(model, drafter, native, counts, **how)
    want, margin, second = drawn
    alive = alive.copy()
    for b in np.flatnonzero(alive):
        where = {"schedule": LONG, "cycle": index, "prefix": int(b)}
        got = np.array(emitted[b], np.int64)
        differ = np.flatnonzero(got != want[b, : len(got)])
        wrong = 0
        if len(differ):
            at, alive[b] = differ[0], False
            near = second[b, at] == got[at] and margin[b, at] <= tally.bounds_at(where).margin
            tally.facts["near ties"] += int(near)
            wrong = 0 if near else len(differ)
        tally.facts["tokens"] += len(got)
        tally.exact(WORDS["tokens"], wrong, where)
    return reached, alive
