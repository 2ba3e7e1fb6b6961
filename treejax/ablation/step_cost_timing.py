"""Times of ``step_cost``: the whole step, its phases and a host's visits, all interleaved.

A step of a large model takes longer than the host needs to hand one over, but the first of a
sample waits for the host. So every sample is some calls in a row, queued behind a copy whose time
is taken off. A visit is timed as it happens: the host asks for a step and waits for the tokens. The
loop is timed as decoding runs it: some steps a visit, the next visit asked for before the last one
is fetched, so that the device goes on meanwhile.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.bench.timing import MOST_CALLS, Lead, Timed, measure_rounds
from treejax.ablation.lab_run import queue_bytes
from treejax.ablation.lab_timing import Time, lack_of_memory, period
from treejax.ablation.step_cost_bench import Bench, path_choice
from treejax.policies import kernel_rows
from treejax.steps.many import Visit

STEP, VISIT, LOOP = "step", "visit", "loop"
SHORT = 0.002
"""Seconds of a call below which a sample has as many as may wait for a device: what the copy's own
time varies by is divided among them."""
PHASES = ("draft", "verify", "select", "publish")


class Key(NamedTuple):
    """What a time is of; ``length`` is what a script emits a step, 0 for phases."""

    arm: str
    context: int
    part: str
    length: int = 0


@dataclasses.dataclass
class Entry:
    """Something to time; ``tokens`` counts what visits emit, and ``visits`` how many there were."""

    key: Key
    bench: Bench
    timed: Timed
    queued: bool
    tokens: int = 0
    visits: int = 0


def make_entries(bench: Bench, contexts: Sequence[int], phases: bool) -> list[Entry]:
    """All that is timed of an arm."""
    made = []
    for context in contexts:
        for length in bench.arm.lengths or (0,):
            made += [_step(bench, context, length), _visit(bench, context, length)]
            made += [_loop(bench, context, length)] if bench.looped else []
        if phases:
            made += _phases(bench, context)
    return made


def measure(
    entries: Sequence[Entry],
    lead: Lead | None,
    calls: int,
    rounds: int,
    seen: Callable[[int], None],
) -> tuple[dict[Key, Time], dict[str, str]]:
    """Times by key, and by arm why it has none: memory that was lacking."""
    problems: dict[str, str] = {}
    for entry in entries:
        timed = entry.timed
        timed.calls = timed.whole(calls)
        timed.lead = lead if entry.queued else None
        if entry.bench.name in problems:
            continue
        try:
            timed.sample()  # the first run of a program is slow
            if timed.sample() < SHORT:
                timed.calls = timed.whole(MOST_CALLS)
        except Exception as error:  # raised again unless memory was lacking
            problems[entry.bench.name] = lack_of_memory(error)
            entry.bench.release()
        timed.host = float("inf")
    ready = [entry for entry in entries if entry.bench.name not in problems]
    for entry in ready:
        entry.tokens = entry.visits = 0
    if not ready:
        return {}, problems
    found = measure_rounds([entry.timed for entry in ready], rounds, lambda: False, seen)
    return {entry.key: Time.of(found[entry.timed.name]) for entry in ready}, problems


def _entry(
    bench: Bench,
    key: Key,
    run: Callable[[int], Callable[[], Any]],
    queued: bool,
    most: int = MOST_CALLS,
) -> Entry:
    name = " ".join(map(str, key))
    timed = Timed(name, run, max(1, most), multiple=period(bench.arm.policy))
    return Entry(key, bench, timed, queued)


def _step(bench: Bench, context: int, length: int) -> Entry:
    def run(calls: int) -> Callable[[], Any]:
        bench.rewind(context, length)
        emission = None
        for _ in range(calls):
            emission = bench.step()
        return lambda: jax.block_until_ready((emission, bench.carry))

    # A step that waits for the host on its way cannot be queued.
    queued = bench.arm.off != "path"
    return _entry(bench, Key(bench.name, context, STEP, length), run, queued)


def _visit(bench: Bench, context: int, length: int) -> Entry:
    def run(calls: int) -> Callable[[], Any]:
        bench.rewind(context, length)
        jax.block_until_ready(bench.carry)
        for _ in range(calls):
            entry.tokens += bench.visit()
        entry.visits += calls
        return lambda: None

    entry = _entry(bench, Key(bench.name, context, VISIT, length), run, False)
    return entry


def _loop(bench: Bench, context: int, length: int) -> Entry:
    """Visits of the loop's own program, one ahead of what was fetched."""

    def fetch(visit: Visit) -> None:
        emission, made = jax.device_get((visit.emission, visit.made))
        entry.tokens += int(emission.count[: int(made)].sum())
        entry.visits += int(made)

    def run(calls: int) -> Callable[[], Any]:
        bench.rewind(context, length)
        asked: list[Visit] = []
        for done in range(0, calls, bench.steps_a_visit):
            asked.append(bench.loop(min(bench.steps_a_visit, calls - done)))
            if len(asked) > 1:
                fetch(asked.pop(0))
        return lambda: fetch(asked.pop())

    entry = _entry(bench, Key(bench.name, context, LOOP, length), run, True)
    return entry


def _phases(bench: Bench, context: int) -> list[Entry]:
    """The phases of a step, each from the same state of affairs, at the marks of a cycle of steps:
    a policy that writes every few commits does so as often as in the cycle."""
    size = bench.arm.tree
    bench.rewind(context)
    tree = bench.propose()
    bound, typical = size.max_depth + 1, typical_length(bench.arm.lengths)
    deepest = size.path(size.depths.index(size.max_depth))
    choice = path_choice(list(deepest[: typical or 1]), bench.batch, bound)
    before_verify, before_publish, made = [], [], None
    for _ in range(2 * period(bench.arm.policy)):  # at first a policy that defers is not steady
        bench.rewind(context)
        before_verify.append(bench.marks)
        made = bench.verify(tree)
        before_publish.append(bench.marks)
        bench.publish(made.scratch, choice)
    assert made is not None
    scratch, logits = made.scratch, made.output.logits
    half = len(before_verify) // 2
    verifying = itertools.cycle(before_verify[half:])
    publishing = itertools.cycle(before_publish[half:])

    def repeated(call: Callable[[], Any]) -> Callable[[int], Callable[[], Any]]:
        def run(calls: int) -> Callable[[], Any]:
            bench.rewind(context)
            result = None
            for _ in range(calls):
                del result  # its memory serves the next call
                result = call()
            return lambda: jax.block_until_ready((result, bench.carry))

        return run

    config = bench.model.config
    rows = kernel_rows(size.capacity)
    kept = sum(bench.arm.policy.buffers(config, rows, bench.batch).values())
    kept += 4 * bench.batch * rows * config.vocab_size
    runs: Iterable[tuple[str, Callable[[], Any], int]] = (
        ("draft", bench.propose, MOST_CALLS),
        ("verify", lambda: bench.verify(tree, next(verifying)), queue_bytes() // kept),
        ("select", lambda: bench.choose(tree, logits), MOST_CALLS),
        ("publish", lambda: bench.publish(scratch, choice, next(publishing)), MOST_CALLS),
    )
    return [
        _entry(bench, Key(bench.name, context, part), repeated(call), True, min(most, MOST_CALLS))
        for part, call, most in runs
    ]


def typical_length(lengths: Sequence[int]) -> int:
    """The length whose step stands for the arm: the middle one; 0 without any."""
    return lengths[len(lengths) // 2] if lengths else 0
