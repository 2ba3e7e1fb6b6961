"""How large the next tree is: costs and gains that are told, no clock involved."""

import numpy as np
import pytest

from treejax.drafters.pace import RECENT, Ledger, Pace


def filled(seconds, accepted, steps=60):
    """A ledger that has seen ``steps`` steps of every form."""
    ledger = Ledger((0, 3, 5)[: len(seconds)])
    for form, (cost, gain) in enumerate(zip(seconds, accepted, strict=True)):
        for _ in range(steps):
            ledger.record(form, cost, gain)
    return ledger


def run(pace, steps, seconds, gain):
    """Forms chosen when ``gain(form)`` candidates are accepted each time."""
    chosen = []
    for _ in range(steps):
        form = pace.choose()
        pace.record(form, seconds[form], gain(form))
        chosen.append(form)
    return chosen


def test_every_form_is_tried_before_figures_are_trusted():
    pace = Pace(Ledger((0, 2, 4), trials=2), patience=50)
    assert run(pace, 6, [1.0, 1.0, 1.0], lambda form: 0.0) == [0, 1, 2, 0, 1, 2]


def test_most_tokens_a_second_wins_and_nothing_where_drafting_does_not_pay():
    good = filled([1.0, 1.5, 3.0], [0, 2.0, 3.0])  # (1 + 2) / 1.5 is most
    assert Pace(good, 50).choose() == 1
    deep = filled([1.0, 1.5, 1.6], [0, 2.0, 3.0])
    assert Pace(deep, 50).choose() == 2
    bad = filled([1.0, 2.0, 3.0], [0, 0.3, 0.4])
    assert Pace(bad, 50).choose() == 0


def test_a_harder_text_stops_drafting_and_an_easier_one_brings_it_back():
    seconds = [1.0, 2.0, 2.5]
    pace = Pace(filled(seconds, [0, 2.0, 3.0]), patience=8)
    hard = run(pace, 60, seconds, lambda form: 0.0)
    assert hard[0] == 2 and hard[-20:].count(0) >= 15
    # While resting it looks again, and no more often than patience says.
    assert 1 <= 20 - hard[-20:].count(0) <= 3
    assert set(hard[-20:]) == {0, 1}  # with the cheapest form


def test_looks_become_rare_and_a_bad_start_is_no_end():
    seconds = [1.0, 1.3, 2.5]
    pace = Pace(Ledger((0, 3, 5)), patience=64)
    chosen = run(pace, 200, seconds, lambda form: 0.0)
    looks = [i for i, form in enumerate(chosen[40:]) if form]
    assert 1 <= len(looks) <= 5
    later = run(pace, 120, seconds, lambda form: [0, 2.0, 2.2][form])
    assert later[-30:].count(1) >= 28


def test_an_easy_text_after_a_hard_one():
    seconds = [1.0, 2.0, 2.5]
    pace = Pace(filled(seconds, [0, 2.0, 3.0]), patience=8)
    run(pace, 60, seconds, lambda form: 0.0)
    easy = run(pace, 60, seconds, lambda form: [0, 2.0, 3.5][form])
    assert easy[-20:].count(2) >= 18


def test_a_text_that_likes_another_form_than_most_do_gets_it():
    seconds = [1.0, 1.5, 2.0]
    pace = Pace(filled(seconds, [0, 1.5, 2.6]), patience=50)
    assert pace.choose() == 2
    chosen = run(pace, 80, seconds, lambda form: [0, 1.6, 1.0][form])
    assert chosen[-10:].count(1) >= 8


def test_texts_of_a_kind_are_alike():
    """Hard texts of one temperature do not spoil what is expected at another."""
    seconds = [1.0, 1.5, 2.0]
    ledger = filled(seconds, [0, 2.0, 3.0])
    for _ in range(4):
        run(Pace(ledger, 64, kind=2.0), 40, seconds, lambda form: 0.0)
    assert Pace(ledger, 64, kind=2.0).choose() == 0
    assert Pace(ledger, 64, kind=0.0).choose() == 2


def test_costs_are_medians_of_recent_steps():
    ledger = Ledger((0, 2))
    for seconds in (100.0, 1.0, 1.0):
        ledger.record(0, seconds, 0.0)
        ledger.record(1, seconds, 1.0)
    assert ledger.seconds(1) == 1.0
    for _ in range(RECENT):
        ledger.record(1, 7.0, 1.0)
    assert ledger.seconds(1) == 7.0
    assert [row["form"] for row in ledger.table()] == [0, 1]


def test_ledgers_that_cannot_be():
    for depths, trials in (((0,), 3), ((1, 2), 3), ((0, 0), 3), ((0, 2), 0)):
        with pytest.raises(ValueError, match="a ledger of depths"):
            Ledger(depths, trials)


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.5, 0.7, 0.85, 0.95])
def test_on_random_texts_it_stays_near_the_best_form_in_hindsight(chance):
    """Texts in which a candidate is right by chance, chains of 2 and 5 and a tree that is a little
    better and costly; texts of 400 tokens after 600 mixed ones, tokens a second against the best.

    Where plain decoding is best (a chance below 0.4 here) it gives up at most 2 %. Elsewhere the
    choice is as noisy as what a few dozen steps say of the text."""
    rng = np.random.default_rng(int(100 * chance))
    depths, seconds = (0, 2, 5, 10), [2.1, 4.0, 5.4, 16.0]

    def accepted(form, p):
        better = 1 - (1 - p) ** (1.15 if form == 3 else 1.0)
        wrong = rng.random(depths[form]) >= better
        return int(np.argmax(wrong)) if wrong.any() else depths[form]

    def serve(pace, p, tokens, fixed=None):
        time, made = 0.0, 0
        while made < tokens:
            form = pace.choose() if fixed is None else fixed
            hits = accepted(form, p)
            if fixed is None:
                pace.record(form, seconds[form], hits)
            time, made = time + seconds[form], made + 1 + hits
        return made / time

    ledger = Ledger(depths)
    for p in (0.8, 0.5, 0.1):
        serve(Pace(ledger, 128), p, 200)
    runs = [serve(Pace(ledger, 128, kind=chance), chance, 400) for _ in range(12)]
    best = max(np.mean([serve(None, chance, 400, form) for _ in range(12)]) for form in range(4))
    assert np.mean(runs[2:]) > (0.98 if chance < 0.4 else 0.92) * best
