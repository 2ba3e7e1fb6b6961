"""The cycles of one subject after prefixes that came to be in its state in different ways."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.continuation.calibration import depth_of
from treejax.audit.continuation.controls import cut
from treejax.audit.continuation.lengths import (
    Prompted,
    deepest,
    free,
    not_by_its_rule,
    plan_of,
    runnable,
    told,
    unread,
)
from treejax.audit.continuation.limits import FREE, OUT, ROOT, limited
from treejax.audit.continuation.settings import Settings
from treejax.audit.continuation.verdict import Tally
from treejax.audit.intake import NATIVE, Start, engine_of, history_of, take_in
from treejax.audit.memories import fragile
from treejax.audit.reference import Plain
from treejax.audit.rows import RowLogits
from treejax.audit.step import Cycle, Engine, Subject, cycle
from treejax.audit.surfaces import measure
from treejax.drafters.scripted import Script
from treejax.model import Model
from treejax.saving import restore_checkpoint, save_checkpoint
from treejax.state import init_state


class Course(NamedTuple):
    """What a subject goes through: prefixes, and what plain decoding says after them."""

    model: Model
    subject: Subject
    texts: Sequence[Sequence[int]]
    expected: RowLogits
    settings: Settings

    @property
    def plain(self) -> Plain:
        return self.expected.plain

    @property
    def rows(self) -> int:
        """Rows of the state: plain's."""
        return self.plain.state.max_length


class End(NamedTuple):
    """What a schedule left.

    Attributes:
      weights: the drafter's.
      start, engine, shown: input and outputs of the last step.
      before, offset: [B] offsets before and after it.
      alive: [B] whether a sequence still followed plain's text before it.
      saved: the engine that was saved half way, if one was.
    """

    weights: Any
    start: Engine
    engine: Engine
    shown: Cycle
    before: np.ndarray
    offset: np.ndarray
    alive: np.ndarray
    saved: Engine | None


def step(
    subject: Subject,
    model: Model,
    settings: Settings,
    weights: Any,
    engine: Engine,
    limit: np.ndarray,
) -> tuple[Engine, Cycle]:
    """One step of a subject; ``limit`` [B] is ``ROOT``, ``OUT`` or ``FREE``.

    ``weights`` are the drafter's, or what a script is told.
    """
    if not isinstance(weights, Prompted):
        weights = free(subject, weights, engine.state.batch)
    return cycle(
        *(model.config, runnable(subject), model.params, weights, engine, settings.keys()),
        settings.sampling.prepared(model.config.vocab_size),
        limited(jnp.asarray(limit, jnp.int32)),
        jnp.int32(0),
    )


def compile_step(model: Model, subject: Subject, settings: Settings) -> None:
    """Compile the step of a subject, without a prefix: on a thread, while others still run."""
    drafter, batch, nothing = subject.drafter, settings.prefixes, [0] * settings.prefixes
    rows = settings.rows(model, depth_of(drafter))
    draft = drafter.init(model, batch, rows)
    state = init_state(model.config, batch, rows, model.dtype, NATIVE)
    history = history_of([[0]] * batch, model.config, settings.sampling)
    start = Start(state, draft, jnp.zeros((batch, model.config.vocab_size)), history)
    cycle.lower(
        *(model.config, runnable(subject), model.params, free(subject, draft.weights, batch)),
        *(engine_of(subject, start, nothing), settings.keys()),
        settings.sampling.prepared(model.config.vocab_size),
        *(limited(jnp.asarray(nothing, jnp.int32)), jnp.int32(0)),
    ).compile()


def start_of(course: Course, schedule: str) -> tuple[Engine, Any]:
    """The engine after the prefixes, and its drafter's weights."""
    model, settings, drafter = course.model, course.settings, course.subject.drafter
    texts, room = course.texts, {"max_length": course.rows, "sampling": settings.sampling}
    if schedule != "primed":
        start = take_in(model, texts, drafter, **room)
        return engine_of(course.subject, start, course.plain.tokens[:, 0]), start.draft.weights
    halves, ones, rests = cut(texts)
    start = take_in(model, halves, drafter, **room)
    engine, weights = engine_of(course.subject, start, ones[:, 0]), start.draft.weights
    for token in ones.T:
        engine = engine.replace(pending=jnp.asarray(token, jnp.int32))
        engine, _ = step(
            course.subject, model, settings, weights, engine, np.full(len(texts), ROOT)
        )
    history = history_of(texts, model.config, settings.sampling)  # all of it is prompt
    memory = _at_the_prompt(engine.memory, drafter.init(model, len(texts), course.rows).memory)
    draft = start.draft.replace(memory=memory)
    onto = Start(engine.state, draft, start.logits, history)
    start = take_in(model, rests, drafter, onto=onto, **room)
    return engine_of(course.subject, start, course.plain.tokens[:, 0]), weights


def _at_the_prompt(memory: Any, empty: Any) -> Any:
    """The memory with its scripts, which count from the end of a prompt, at their beginning."""
    return jax.tree.map(
        lambda mine, none: none if isinstance(mine, Script) else mine,
        *(memory, empty),
        is_leaf=lambda node: isinstance(node, Script),
    )


def follow_lengths(course: Course, schedule: str, tally: Tally) -> End:
    """Steps in which paths of every length are published: the draft is scripted."""
    subject, plain, settings = course.subject, course.plain, course.settings
    engine, weights = start_of(course, schedule)
    batch, depth, by = len(course.texts), deepest(subject.drafter), unread(subject)
    tally.left_out += not_by_its_rule(subject)
    offset, alive = np.zeros(batch, np.int64), np.ones(batch, bool)
    limit, end = np.full(batch, FREE + subject.drafter.max_depth), None
    for index, right in enumerate(plan_of(batch, depth)):
        where = {"schedule": schedule, "cycle": index}
        window = offset[:, None] + np.arange(depth + 1)[None, :]
        answers = plain.tokens[np.arange(batch)[:, None], window]
        said = told(weights, answers, right, index)
        after, shown = step(by, course.model, settings, said, engine, limit)
        end = End(weights, engine, after, shown, offset, offset, alive, None)
        made, alive = check_step(course, end, limit, where, tally)
        end = end._replace(offset=made)
        engine, offset = after, np.where(alive, made, 0)
    assert end is not None  # there is a path of length 0
    return end


def follow_schedule(course: Course, schedule: str, tally: Tally) -> End:
    """All cycles of a schedule."""
    if schedule == "lengths":
        return follow_lengths(course, schedule, tally)
    model, settings = course.model, course.settings
    subject, batch, saved = course.subject, len(course.texts), None
    engine, weights = start_of(course, schedule)
    offset, alive = np.zeros(batch, np.int64), np.ones(batch, bool)
    end = None
    for index in range(settings.cycles):
        where = {"schedule": schedule, "cycle": index}
        if schedule == "resumed" and index == settings.cycles // 2:
            saved, engine = engine, _through_disk(engine, tally, where)
        limit = limits_of(settings, subject, index)
        after, shown = step(subject, model, settings, weights, engine, limit)
        end = End(weights, engine, after, shown, offset, offset, alive, saved)
        made, alive = check_step(course, end, limit, where, tally)
        for b in np.flatnonzero(limit == OUT):
            changed = _sat_out(engine, after, int(b))
            tally.exact("bytes changed while sitting out", changed, {**where, "prefix": int(b)})
        end = end._replace(offset=made)
        # A text that went another way is run on, and looked at no more.
        engine, offset = after, np.where(alive, made, 0)
    assert end is not None  # settings have cycles
    return end


def check_step(
    course: Course, end: End, limit: np.ndarray, where: dict[str, Any], tally: Tally
) -> tuple[np.ndarray, np.ndarray]:
    """Measure the step that ``end`` describes: the offsets after it, and who follows plain on."""
    how = {"keys": course.settings.keys(), "sampling": course.settings.sampling}
    plain, rest = course.plain, (course.model, course.subject, end.weights)
    made = measure(
        *(*rest, end.start, end.engine, end.shown, course.expected, end.before), limit=limit, **how
    )
    shaky = functools.partial(
        fragile,
        *(*rest, end.engine.memory, plain, made.offset),
        size=tally.envelope.widest("drafter"),
        **how,
    )
    alive = tally.record(made, end.shown, plain, end.before, end.alive, where, shaky)
    return made.offset, alive


def limits_of(settings: Settings, subject: Subject, index: int) -> np.ndarray:
    """How far each sequence may go in a cycle: the last one takes in the pending token alone, and
    in the second the last of several sequences sits out."""
    batch = settings.prefixes
    limit = np.full(batch, FREE + subject.drafter.max_depth)
    if index == settings.cycles - 1:
        limit[:] = ROOT
    elif index == 1 and batch > 1:
        limit[-1] = OUT
    return limit


def _through_disk(engine: Engine, tally: Tally, where: dict[str, Any]) -> Engine:
    """The engine saved, and restored into arrays of another object."""
    target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), engine)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder) / "state", 0, engine)
        restored = jax.tree.map(
            jnp.asarray, restore_checkpoint(Path(folder) / "state", target).tree
        )
    pairs = zip(jax.tree.leaves(engine), jax.tree.leaves(restored), strict=True)
    differ = sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)
    tally.exact("arrays that a saved state lost", differ, where)
    return restored


def _sat_out(before: Engine, after: Engine, b: int) -> int:
    """Bytes of R, C, K, length and pending token of sequence ``b`` that the step changed."""
    changed = 0
    for old, new in zip(_surfaces(before, b), _surfaces(after, b), strict=True):
        pair = [np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in (old, new)]
        changed += int((pair[0] != pair[1]).sum()) if pair[0].size == pair[1].size else pair[0].size
    return changed


def _surfaces(engine: Engine, b: int) -> list[Any]:
    state = engine.state
    length, R = int(state.length[b]), state.policy.read(state.recurrent)
    rows = [np.asarray(x)[:, b, :length] for x in (state.keys, state.values)]
    return [R[:, b], state.conv[:, b], *rows, state.length[b], engine.pending[b]]
