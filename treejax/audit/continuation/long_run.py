"""Thousands of tokens by one subject, side by side with plain decoding: what the errors grow to.

Every token is compared. Every so many cycles plain decoding, which has come exactly as far, is
recorded for one more step, and all surfaces of the subject's next step are measured.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.continuation.lengths import free, runnable
from treejax.audit.continuation.limits import FREE, OUT, limited
from treejax.audit.continuation.settings import Settings
from treejax.audit.continuation.verdict import WORDS, Tally
from treejax.audit.decoding import STRIDE, Going, decode_stride, follow_stride
from treejax.audit.intake import Start, engine_of, take_in
from treejax.audit.memories import fragile
from treejax.audit.prefixes import prefixes
from treejax.audit.reference import decode_from
from treejax.audit.rows import RowLogits
from treejax.audit.step import Subject, cycle
from treejax.audit.surfaces import measure
from treejax.loop import state_rows
from treejax.model import Model
from treejax.shapes import Array


def run(
    model: Model,
    subject: Subject,
    settings: Settings,
    tally: Tally,
    advance: Callable[[int, int], None],
) -> None:
    """Generate ``settings.long_tokens`` tokens, in as many texts as the context asks for.

    ``advance`` is told how many there are, and how many there will be.
    """
    drafter, slack = subject.drafter, 2 * (subject.drafter.max_depth + 1)
    context = model.config.max_position_embeddings
    prompt = min(settings.length, context // 4)
    room = min(context - prompt - slack, settings.long_tokens)
    batch = -(-settings.long_tokens // room)
    each = -(-settings.long_tokens // batch)
    texts = prefixes(model, "held-out", batch, prompt, settings.seed + 1)
    keys = jax.vmap(jax.random.key)(settings.seed + jnp.arange(batch))
    how = {"keys": keys, "sampling": settings.sampling}
    drawn = settings.sampling.prepared(model.config.vocab_size)

    rows = state_rows(model, prompt + each + slack)
    start = take_in(model, texts, drafter, max_length=rows, sampling=settings.sampling)
    weights = start.draft.weights
    plain = decode_from(model, start, drafter.max_depth + 1, by=drafter, **how)
    native = Native(start, jnp.asarray(plain.tokens[:, 0], jnp.int32))
    engine = engine_of(subject, start, plain.tokens[:, 0])
    total, alive = np.zeros(batch, np.int64), np.ones(batch, bool)
    emitted: list[list[int]] = [[] for _ in texts]  # since plain was last brought up
    runs, alone = runnable(subject), free(subject, weights, batch)
    index = 0
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
            made = measure(
                *(model, subject, weights, engine, after, shown, RowLogits(model, plain), nowhere),
                limit=limit,
                **how,
            )
            where = {"schedule": "long", "cycle": index}
            shaky = functools.partial(
                fragile,
                *(model, subject, weights, after.memory, plain, made.offset),
                size=tally.envelope.widest("drafter"),
                **how,
            )
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
        "context": context,
    }


def _drift(
    subject: Subject, index: int, total: np.ndarray, alive: np.ndarray, distances: Any
) -> dict[str, Any]:
    """A row: the largest distance by surface, over the texts that are compared."""
    row = {"subject": subject.name, "cycle": index, "tokens": int(total.max())}
    return row | {name: float(values[alive].max(initial=0.0)) for name, values in distances.items()}


class Native(NamedTuple):
    """Plain decoding so far: a start to go on from, and the pending tokens [B]."""

    start: Start
    pending: Array


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
    start, settings = native.start, how["sampling"].prepared(model.config.vocab_size)
    going = Going(start.state, native.pending, start.logits, start.history)
    memory, free = start.draft.memory, jnp.full((STRIDE, len(counts)), -1, jnp.int32)
    drawn = [np.zeros((3, 0, len(counts)))]
    for done in range(0, int(counts.max()), STRIDE):
        more = jnp.asarray(np.clip(counts - done, 0, STRIDE))
        going, left = decode_stride(
            *(model.config, model.params, going, how["keys"], settings, more, free),
        )
        memory, _ = follow_stride(
            *(model.config, drafter, False, start.draft.weights, memory, settings, how["keys"]),
            (left.tree, left.choice, left.hidden),
        )
        drawn.append(np.stack([left.token, left.margin, left.second]))
    want, margin, second = np.concatenate(drawn, axis=1).swapaxes(1, 2)  # [B, T] each
    alive = alive.copy()
    for b in np.flatnonzero(alive):
        got = np.array(emitted[b], np.int64)
        differ = np.flatnonzero(got != want[b, : len(got)])
        wrong = 0
        if len(differ):
            at, alive[b] = differ[0], False
            near = second[b, at] == got[at] and margin[b, at] <= tally.envelope.margin
            tally.facts["near ties"] += int(near)
            wrong = 0 if near else len(differ)
        tally.facts["tokens"] += len(got)
        where = {"schedule": "long", "cycle": index, "prefix": int(b)}
        tally.exact(WORDS["tokens"], wrong, where)
    draft = start.draft.replace(memory=memory)
    return Native(Start(going.state, draft, going.logits, going.history), going.pending), alive
