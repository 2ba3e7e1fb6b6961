"""The benchmark's clock: rounds, calls in a row, and what is queued behind a lead."""

import pytest

from pallas_kernels.bench import timing
from pallas_kernels.bench.timing import Timed, choose_calls, measure_rounds


def test_rounds_rotate_and_stop_after_the_limit():
    order = []
    waits = []

    def note(name):
        order.append(name)
        return lambda: waits.append(name)

    timed = [Timed(name, lambda calls, name=name: note(name)) for name in "abc"]
    timed[1].share = 0.5
    summaries = measure_rounds(timed, 5, lambda: len(order) >= 5, lambda done: None)
    assert order == waits == list("abcbca")
    assert all(summary.rounds == 2 for summary in summaries.values())


def test_short_calls_are_queued_and_no_more_than_fit(monkeypatch):
    now = [0.0]

    def pass_time(seconds):
        now[0] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    lead = timing.Lead(64)
    lead.seconds = 3.0
    monkeypatch.setattr(lead, "start", lambda: pass_time(1.0))
    # The host takes 0.25 ms a call; the device, busy with the lead at first, 0.5 ms.
    done = [lambda: pass_time(2.0 + 0.00025 * timed.calls)]
    timed = Timed("x", lambda calls: (pass_time(0.00025 * calls), done[0])[1], most_calls=7)
    timed.run(1)
    monkeypatch.setattr(timed, "lead", lead)
    timed.calls = 4
    assert timed.sample() == pytest.approx(0.0005) and timed.host == pytest.approx(0.00025)

    done[0] = lambda: None
    timed = Timed("x", lambda calls: (pass_time(0.00025 * calls), done[0])[1], most_calls=7)
    choose_calls(timed, lead)
    assert timed.calls == 7 and timed.lead is lead
    lead.seconds = 0.02  # hides 0.016 s of handing over, 4 calls of 4 ms; 10 ms would be 3 calls
    hosted = Timed("x", lambda calls: (pass_time(0.004 * calls), done[0])[1])
    choose_calls(hosted, lead)
    assert hosted.calls == 4
    periodic = Timed("x", lambda calls: (pass_time(0.004 * calls), done[0])[1], multiple=3)
    choose_calls(periodic, lead)
    assert periodic.calls == 3 and periodic.lead is lead
    narrow = Timed("x", lambda calls: (pass_time(0.0005 * calls), done[0])[1], 2, multiple=3)
    choose_calls(narrow, lead)
    assert narrow.calls == 3 and narrow.lead is None  # waits in between
    wide = Timed("x", lambda calls: (pass_time(0.00001 * calls), done[0])[1], 23, multiple=3)
    choose_calls(wide, None)
    assert wide.calls == 21
    slow = Timed("x", lambda calls: (pass_time(0.5 * calls), done[0])[1])
    choose_calls(slow, lead)
    assert slow.calls == 1 and slow.lead is None
