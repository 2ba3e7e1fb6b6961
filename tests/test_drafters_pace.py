"""How large the next tree is: costs and gains that are told, no clock involved."""

import itertools
import math
from collections import deque

import numpy as np
import pytest

from treejax.drafters.ledger import RECENT, Ledger
from treejax.drafters.pace import Pace, Steady
from treejax.drafters.strength import curve

# Depths, worth of a level's candidates, rows and seconds of forms. On a CPU every row costs; on an
# accelerator a tree costs little more than a chain of its depth.
TABLES = {
    "cpu": ((0, 2, 5, 10, 12), (1, 1, 1, 1.5, 1.8), (1, 3, 6, 15, 31), (2.1, 4.0, 5.4, 16.0, 28.0)),
    "middle": ((0, 2, 5, 6, 9), (1, 1, 1, 1.6, 2.0), (1, 3, 6, 16, 28), (1.0, 1.3, 1.7, 2.2, 3.0)),
    "gpu": ((0, 2, 5, 10, 12), (1, 1, 1, 1.5, 1.8), (1, 3, 6, 15, 31), (10.0, 10.8, 12, 13.8, 15)),
    "six": (
        *((0, 1, 3, 5, 8, 12), (1, 1, 1, 1.6, 1.8, 2.2)),
        *((1, 2, 4, 13, 21, 49), (10.0, 10.5, 11.2, 12.2, 13.5, 15.0)),
    ),
}
CHANCES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
LEVELS = {
    "even": lambda p, depth: np.full(depth, p),
    "fading": lambda p, depth: p * 0.93 ** np.arange(depth),
    "rising": lambda p, depth: p + (1 - p) * 0.5 * (1 - 0.7 ** np.arange(depth)),
}


class Text:
    """Text in which each of a level's candidates is right by chance, which depends on the depth."""

    def __init__(self, table, levels, chance):
        depths, worths, _, self.seconds = TABLES[table]
        chances = [LEVELS[levels](chance, depth) for depth in depths]
        self.reach = [
            np.cumprod(1 - (1 - p) ** worth) for p, worth in zip(chances, worths, strict=True)
        ]
        self.tokens = [1.0 + float(reach.sum()) for reach in self.reach]


VISIT = 40.0  # what a visit may take, where a table's seconds are a thousandth


class Device:
    """What a visit takes beside its steps: hidden if the next is asked for while it runs, which a
    device whose loops block the host (``blocks``) never does. ``beside`` adds up what shows."""

    def __init__(self, beside=0.0, blocks=False):
        self.each, self.blocks, self.beside = beside, blocks, 0.0

    def visit(self, seconds, ahead):
        shown = 0.0 if ahead and not self.blocks else self.each
        self.beside += shown
        return seconds + shown


def follow(pace, steps, outcome, most=32, seconds=VISIT, device=None):
    """Forms chosen for so many steps, by visits as the loop asks for them: another is under way
    while one is fetched, unless the pace wants to know how it went or the device blocks.
    ``outcome(form)`` is what a step takes and how many candidates it accepts."""
    chosen, asked, plan, device = [], deque(), None, device or Device()
    while len(chosen) < steps:
        while not asked or (plan.ahead and len(asked) < (1 if device.blocks else 2)):
            plan = pace.choose(most, seconds)
            asked.append(plan)
        form, count, ahead = asked.popleft()
        assert 1 <= count <= most
        took, accepted = zip(*(outcome(form) for _ in range(count)), strict=True)
        pace.record(form, count, device.visit(sum(took), ahead), accepted)
        chosen += [form] * count
    return chosen[:steps]


def serve(ledger, text, steps, random, sequences=1, patience=100, device=None):
    """Expected tokens and seconds of the forms chosen; times have 10 % of noise, and a step in a
    hundred takes three times as long."""
    device = device or Device()

    def outcome(form):
        noise = np.exp(0.1 * random.standard_normal()) * (3 if random.random() < 0.01 else 1)
        accepted = float((random.random((sequences, 1)) < text.reach[form]).sum() / sequences)
        return text.seconds[form] * noise, accepted

    before = device.beside
    chosen = follow(Pace(ledger, patience), steps, outcome, device=device)
    seconds = sum(text.seconds[f] for f in chosen) + device.beside - before
    return np.array([sum(text.tokens[f] for f in chosen), seconds])


def given_up(table, levels, chance, known, texts=3, sequences=1):
    """Tokens a second against the best form's of 400 steps, and whether that form is none."""
    text = Text(table, levels, chance)
    rates = np.array(text.tokens) / np.array(text.seconds)
    total = np.zeros(2)
    for seed in range(texts):
        random = np.random.default_rng([seed, int(1000 * chance)])
        ledger = Ledger(TABLES[table][0], TABLES[table][2])
        for before in random.permutation((0.3, 0.6, 0.8, 0.5, 0.9)) if known else ():
            serve(ledger, Text(table, levels, before), 150, random, sequences)
        total += serve(ledger, text, 400, random, sequences)
    return 1 - total[0] / total[1] / rates.max(), rates.argmax() == 0


def grid(known, tables=tuple(TABLES), sequences=1):
    cells = itertools.product(tables, LEVELS, CHANCES)
    made = [given_up(*cell, known=known, sequences=sequences) for cell in cells]
    plain = [lost for lost, is_plain in made if is_plain]
    other = [lost for lost, is_plain in made if not is_plain]
    return plain, other


@pytest.mark.parametrize(
    ("known", "sequences", "plain_mean", "plain_most", "mean", "nine_in_ten", "most"),
    [
        (True, 1, 0.02, 0.035, 0.02, 0.037, 0.09),
        (False, 1, 0.022, 0.033, 0.033, 0.062, 0.13),
        (True, 4, 0.018, 0.032, 0.014, 0.024, 0.04),
    ],
)
def test_on_random_texts_it_stays_near_the_best_form_in_hindsight(
    known, sequences, plain_mean, plain_most, mean, nine_in_ten, most
):
    """Texts of 400 steps, all trials included, with a ledger that has seen five mixed texts and
    with a new one. What is left where drafting pays is the price of learning in so few steps."""
    plain, other = grid(known, sequences=sequences)
    assert np.mean(plain) < plain_mean and max(plain) < plain_most
    assert np.mean(other) < mean and np.quantile(other, 0.9) < nine_in_ten and max(other) < most


@pytest.mark.parametrize(("first", "second"), [(0.8, 0.1), (0.1, 0.8), (0.5, 0.9)])
@pytest.mark.parametrize("table", TABLES)
def test_a_text_that_changes_half_way_is_followed(table, first, second):
    """Against the best single form of the whole text: within 4 %, mostly far better."""
    texts = [Text(table, "even", chance) for chance in (first, second)]
    seconds = np.array(texts[0].seconds)
    best = ((np.array(texts[0].tokens) + texts[1].tokens) / (2 * seconds)).max()
    total = np.zeros(2)
    for seed in range(3):
        random = np.random.default_rng(seed)
        ledger = Ledger(TABLES[table][0], TABLES[table][2])
        for before in (0.3, 0.6, 0.8, 0.5, 0.9):
            serve(ledger, Text(table, "even", before), 150, random)
        total += serve_halves(ledger, texts, random)
    assert total[0] / total[1] > 0.96 * best


def serve_halves(ledger, texts, random):
    pace, total = Pace(ledger, 100), np.zeros(2)
    for text in texts:
        chosen = follow(
            *(pace, 300),
            lambda f: (text.seconds[f], float((random.random() < text.reach[f]).sum())),  # noqa: B023
        )
        total += sum(text.tokens[f] for f in chosen), sum(text.seconds[f] for f in chosen)
    return total


def run(pace, steps, seconds, gain):
    """Forms chosen when ``gain(form)`` candidates are accepted each time."""
    return follow(pace, steps, lambda form: (seconds[form], gain(form)))


@pytest.mark.parametrize("depth", [1, 3, 12])
@pytest.mark.parametrize("strength", [-3.0, -0.5, 1.2])
def test_curves_are_those_of_levels_that_pass_alike(depth, strength):
    passes = 1 - np.exp(-np.exp(strength))
    reach = passes ** np.arange(1, depth + 1)
    shares = np.append(reach, 0.0)
    shares = np.insert(-np.diff(shares), 0, 1 - reach[0])  # of 0, 1 .. depth accepted
    counts = np.arange(depth + 1)
    made = curve(strength, depth)
    mean = (shares * counts).sum()
    np.testing.assert_allclose(made.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(made.variance, (shares * (counts - mean) ** 2).sum(), rtol=1e-3)
    rise = curve(strength + 0.01, depth).mean - curve(strength - 0.01, depth).mean
    np.testing.assert_allclose(made.slope, rise / 0.02, rtol=1e-2)


def test_steps_of_no_candidates_end_in_rest_and_looks_cost_what_patience_says():
    seconds = [1.0, 2.0, 2.5]
    chosen = run(Pace(Ledger((0, 2, 5)), 100), 1000, seconds, lambda form: 0.0)
    lost = sum(seconds[form] - 1 for form in chosen[100:])
    assert 1 <= lost <= 0.011 * 900 + 2


def test_patience_decides_how_much_is_tried():
    """A form that loses a tenth and may well be better, in texts where little is accepted."""
    text = Text("cpu", "even", 0.4)
    drafts = [
        sum(
            serve(Ledger(*TABLES["cpu"][:3:2]), text, 1000, np.random.default_rng(seed), 1, n)[1]
            for seed in range(3)
        )
        for n in (400, 10)
    ]
    assert drafts[0] < drafts[1]  # seconds of as many steps: plain ones are the cheapest


def test_an_easier_text_brings_drafting_back_and_a_harder_one_ends_it():
    seconds = [1.0, 1.3, 2.0]
    pace = Pace(Ledger((0, 2, 5)), 50)
    assert run(pace, 300, seconds, lambda form: 0.0)[-50:].count(0) >= 45
    assert run(pace, 300, seconds, lambda form: [0, 2, 5][form])[-50:].count(2) >= 45
    assert run(pace, 300, seconds, lambda form: 0.0)[-50:].count(0) >= 45


def test_a_form_that_the_model_of_strengths_underrates_is_found():
    """A chain of 5 that mostly passes whole where one of 2 mostly fails."""
    chosen = run(Pace(Ledger((0, 2, 5)), 100), 300, [1.0, 1.2, 1.5], lambda f: [0, 0.5, 4.0][f])
    assert chosen[-50:].count(2) >= 45


def test_dear_forms_are_not_tried_where_they_cannot_pay():
    chosen = run(Pace(Ledger((0, 2, 5, 12)), 100), 400, [1.0, 2.0, 9.0, 40.0], lambda form: 0.0)
    assert 3 not in chosen and chosen.count(2) <= 1


def test_texts_of_a_kind_are_alike():
    """Hard texts of one temperature do not spoil what is expected at another."""
    ledger, seconds = Ledger((0, 3, 5)), [1.0, 1.5, 2.0]
    for _ in range(4):
        run(Pace(ledger, 100, kind=2.0), 60, seconds, lambda form: 0.0)
        run(Pace(ledger, 100, kind=0.0), 60, seconds, lambda form: [0, 3.0, 4.5][form])
    hard, easy = (Pace(ledger, 100, kind=kind).expected(2) for kind in (2.0, 0.0))
    assert hard < 1.8 and easy > 3.0


def test_rest_holds_as_long_as_a_visit_takes_and_a_trial_is_one_step():
    """A form that loses much is tried once its allowance pays for it, and rest holds until then."""
    ledger, seconds = Ledger((0, 2)), [1.0, 3.0]
    pace, trials, counts = Pace(ledger, 100), [], []
    for step in range(60):
        plan = pace.choose(32, 9.9)
        assert plan.count <= 9 and plan.ahead == (plan.form == 0 and step > 2)
        trials += [step] * plan.form
        counts += [plan.count] * (not plan.form)
        pace.record(plan.form, plan.count, plan.count * seconds[plan.form], [0.0] * plan.count)
    assert len(trials) >= 3 and counts[:3] == [1, 1, 8] and counts.count(9) > 30
    assert pace.choose(4, math.inf) in [(0, 4, True), (1, 1, False)]
    assert pace.choose(1, 9.9).count == 1


def test_a_plain_steps_time_that_was_taken_on_a_busy_device_is_taken_again():
    """Were it not, drafts that do not pay would be made for ever."""
    ledger = Ledger((0, 2))
    for _ in range(4):
        ledger.record(0, 1, 9.0)
    assert run(Pace(ledger, 100), 1600, [1.0, 2.0], lambda form: 0.3 * form)[-50:].count(0) >= 45


def test_a_size_holds_the_longer_the_more_is_known_and_a_surprise_ends_it():
    pace, counts, seconds = Pace(Ledger((0, 4)), 100), [], [1.0, 1.2]
    for _ in range(120):
        plan = pace.choose(32, 1e9)
        took = plan.count * seconds[plan.form]
        pace.record(plan.form, plan.count, took, [2.0 * plan.form] * plan.count)
        counts += [plan.count] * (plan.form == 1)
    assert counts[0] == 1 and max(counts[:9]) == 1 and max(counts[-20:]) >= 16
    for _ in range(4):
        plan = pace.choose(32, 1e9)
        pace.record(plan.form, plan.count, plan.count * seconds[plan.form], [0.0] * plan.count)
    assert plan.form == 0 or plan.count < 8


def test_a_drafter_of_one_form_makes_what_fits_by_the_last_visits_time():
    pace = Steady()
    assert pace.choose(32, 0.04) == (0, 1, True)
    pace.record(0, 1, 0.003, [0.0])
    assert pace.choose(32, 0.04) == (0, 13, True) and pace.choose(5, 0.04).count == 5
    assert pace.choose(7, math.inf).count == 7
    pace.record(0, 5, 5.0, [0.0] * 5)
    assert pace.choose(32, 0.04).count == 1


def test_costs_are_medians_of_recent_steps_and_guessed_before():
    ledger = Ledger((0, 2, 4))
    for seconds in (100.0, 1.0, 1.0):
        ledger.record(0, 1, seconds)
    ledger.record(1, 1, 90.0)
    assert ledger.seconds(0) == 1.0
    assert ledger.seconds(1) == 1.0  # the only time seen may be that of a slow first run
    ledger.record(1, 1, 3.0)
    assert ledger.seconds(1) == 3.0 and ledger.seconds(2) == 5.0  # two rows more
    for _ in range(RECENT):
        ledger.record(1, 1, 7.0)
    assert ledger.seconds(1) == 7.0
    assert [row["form"] for row in ledger.table()] == [0, 1]


def test_what_a_visit_takes_beside_its_steps_is_no_forms_cost():
    """Of one step or of many: 0.5 a visit and 0.6, or 2.0, a step; it is learned of short and long
    visits, and a form that ran in short ones alone is told no dearer than it is."""
    ledger = Ledger((0, 2))
    for steps in (1, 1, 8, 1, 16, 1, 32, 1, 1, 1):
        ledger.record(0, steps, 0.5 + 0.6 * steps)
    for _ in range(3):
        ledger.record(1, 1, 2.5)
    assert 0.35 < ledger.beside <= 0.5  # what is sure of it
    assert ledger.seconds(0) == pytest.approx(0.6, abs=0.02)
    assert ledger.seconds(1) == pytest.approx(2.0, abs=0.15)


def test_visits_that_take_much_beside_their_steps_are_long():
    """Of the best size from the start, and of a trial that loses nothing by it."""
    text, random = Text("gpu", "even", 0.9), np.random.default_rng(0)
    counts = {}
    for beside in (0.0, 5.0):
        ledger, device = Ledger(TABLES["gpu"][0], TABLES["gpu"][2]), Device(beside, blocks=True)
        pace, seen = Pace(ledger, 100), []
        choose = pace.choose
        pace.choose = lambda *how, choose=choose, seen=seen: seen.append(choose(*how)) or seen[-1]

        def outcome(form):
            return text.seconds[form], float((random.random() < text.reach[form]).sum())

        follow(pace, 60, outcome, seconds=1e9, device=device)
        counts[beside] = [plan.count for plan in seen if plan.form]
    assert max(counts[0.0][:4]) < 8 and min(counts[5.0][:3]) > 8


def test_figures_serve_one_thing():
    ledger = Ledger((0, 2))
    ledger.serve("a")
    ledger.serve("b")
    ledger.record(0, 1, 1.0)
    ledger.serve("b")
    with pytest.raises(ValueError, match="figures of another model"):
        ledger.serve("a")


def test_ledgers_that_cannot_be():
    for depths in ((0,), (1, 2), (0, 0)):
        with pytest.raises(ValueError, match="a ledger of depths"):
            Ledger(depths)
    for rows in ((1,), (1, 2)):
        with pytest.raises(ValueError, match="expected more rows than levels"):
            Ledger((0, 2), rows)
