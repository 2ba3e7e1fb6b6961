"""Times of benches: interleaved rounds of queued calls (``pallas_kernels.bench.timing``).

Calls go round the given steps. A step's time is of its own program, with the carry handed from call
to call. Verify and publish are timed apart from the same state of affairs: the marks that a cycle
of steps had before each verify and before each publish are kept and come round again, so that a
policy which writes every few commits does so as often as in the cycle.
"""

import dataclasses
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.bench.timing import (
    MOST_CALLS,
    Lead,
    Summary,
    Timed,
    choose_calls,
    measure_rounds,
    time_copy,
)
from treejax.ablation.lab import Bench, Step, could_not_run, one_line
from treejax.policies import Policy

LEAD_BYTES = 2**31
"""Of the copy that hides the host's work; about 12 ms of an H200."""


@dataclasses.dataclass(frozen=True)
class Time:
    """Milliseconds of one call: median and 10th to 90th percentile of the rounds."""

    median: float
    low: float
    high: float
    rounds: int
    calls: int

    @classmethod
    def of(cls, summary: Summary) -> "Time":
        return cls(*summary[:5])

    def measures(self, name: str) -> dict[str, float]:
        """For a row: ``name_ms`` and its percentiles."""
        return {
            f"{name}_ms": self.median,
            f"{name}_ms_p10": self.low,
            f"{name}_ms_p90": self.high,
        }


class Cycle:
    """The steps that calls go round."""

    def __init__(self, steps: Sequence[Step]):
        self.steps, self.at = steps, 0

    def next(self) -> tuple[int, Step]:
        at = self.at % len(self.steps)
        self.at += 1
        return at, self.steps[at]


def make_lead() -> Lead | None:
    """What to queue calls behind; a CPU has no queue to hide them in."""
    return Lead(LEAD_BYTES) if jax.devices()[0].platform == "gpu" else None


def copy_bandwidth() -> float:
    """Bytes a second that a copy through XLA moves, read and written: the median of five samples.

    A sample is what many copies in a row take longer than few: one alone lasts a millisecond on a
    GPU, a quarter of which is the host's.
    """
    gpu = jax.devices()[0].platform == "gpu"
    few, many = (8, 28) if gpu else (1, 3)
    copy, moved = time_copy(LEAD_BYTES if gpu else 2**26)

    def seconds(calls: int) -> float:
        copy.calls = calls
        return calls * copy.sample()

    seconds(few)
    longer = [seconds(many) - seconds(few) for _ in range(5)]
    return (many - few) * moved / statistics.median(longer)


def time_step(bench: Bench, steps: Sequence[Step], memory: int, label: str = "step") -> Timed:
    """Both in one program, the carry going round; its time goes by the bench's name and label."""
    cycle = Cycle(steps)

    most = most_calls(bench, memory)

    def run(calls: int) -> Callable[[], Any]:
        outputs = None
        for call in range(calls):
            _wait_if_full(bench, call, most)
            del outputs  # its memory serves the next call
            outputs = bench.step(cycle.next()[1])
        return lambda: jax.block_until_ready((outputs, bench.carry))

    return _timed(bench, label, run, most)


def time_apart(bench: Bench, steps: Sequence[Step], memory: int) -> tuple[Timed, Timed]:
    """Verify and publish, each alone, at the marks of one cycle of the steps."""
    before_verify, before_publish, scratch = [], [], ()
    for _ in range(2):  # the first brings a policy that defers to its steady state
        before_verify, before_publish = [], []
        for step in steps:
            scratch = ()  # its memory serves the next call
            assert bench.carry is not None
            before_verify.append(bench.carry.marks)
            made = bench.verify(step)
            before_publish.append(made.carry.marks)
            scratch = made.scratch
            bench.publish(scratch, step)
            del made
    verifying, publishing = Cycle(steps), Cycle(steps)
    most = most_calls(bench, memory)

    def verify(calls: int) -> Callable[[], Any]:
        number = None
        for call in range(calls):
            _wait_if_full(bench, call, most)
            at, step = verifying.next()
            number = bench.verify_alone(step, before_verify[at])
        return lambda: jax.block_until_ready((number, bench.carry))

    def publish(calls: int) -> Callable[[], Any]:
        for call in range(calls):
            _wait_if_full(bench, call, most)
            at, step = publishing.next()
            bench.publish(scratch, step, before_publish[at])
        return lambda: jax.block_until_ready(bench.carry)

    return _timed(bench, "verify", verify, most), _timed(bench, "publish", publish, most)


def period(policy: Policy) -> int:
    """Steps after which a policy does the same work again, so that a sample of whole periods holds
    as many writes as any other.

    Only a ring has a period, its commits a write; a ring whose rows run out before that writes
    earlier, and its samples are whole only on average.
    """
    return getattr(policy, "length", 1)


def _timed(bench: Bench, label: str, run: Callable[[int], Callable[[], Any]], most: int) -> Timed:
    """``run`` under the bench's name. After an error the bench starts from the drawn states: its
    carry was donated to the call that failed."""

    def guarded(calls: int) -> Callable[[], Any]:
        try:
            wait = run(calls)
        except Exception:  # raised again: the carry is gone whatever it was
            bench.release()
            raise

        def finish() -> Any:
            try:
                return wait()
            except Exception:  # as above
                bench.release()
                raise

        return finish

    return Timed(f"{bench.name} {label}", guarded, most, multiple=period(bench.policy))


def _wait_if_full(bench: Bench, call: int, most: int) -> None:
    """Where a period has more calls than fit in memory, the device catches up on the way."""
    if call and call % most == 0:
        bench.wait()


def most_calls(bench: Bench, memory: int) -> int:
    """Calls in a row whose results fit in ``memory`` while the device has not come to them."""
    batch, rows = bench.drawn.R.shape[1], bench.drawn.layers[0].g.shape[1]
    config = bench.drawn.sizes.config
    kept = sum(bench.policy.buffers(config, rows, batch).values())
    kept += bench.drawn.sizes.output_bytes(batch, rows)
    return max(1, min(MOST_CALLS, memory // max(1, kept)))


def measure(
    timed: Sequence[Timed],
    lead: Lead | None,
    warm_up: int,
    rounds: int,
    seen: Callable[[int], None],
) -> dict[str, Time | str]:
    """By name the times, everything interleaved, or in one line what memory was lacking; ``seen``
    is told the rounds that are done."""
    made: dict[str, Time | str] = {}
    ready = []
    for each in timed:
        try:
            for _ in range(-(-warm_up // each.most_calls)):
                each.run(min(warm_up, each.most_calls))()
            choose_calls(each, lead)
        except Exception as error:  # raised again unless memory was lacking
            made[each.name] = lack_of_memory(error)
        else:
            ready.append(each)
    gc.collect()  # not while the clock runs
    try:
        summaries = measure_rounds(ready, rounds, lambda: False, seen) if ready else {}
    except Exception as error:  # rounds that are not whole compare nothing
        return made | dict.fromkeys((each.name for each in ready), lack_of_memory(error))
    return made | {name: Time.of(summary) for name, summary in summaries.items()}


def lack_of_memory(error: Exception) -> str:
    """An error that says what was lacking, in one line; any other is raised again."""
    problem = one_line(error)
    if not could_not_run(problem):
        raise error
    return problem
