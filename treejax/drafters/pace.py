"""How large the next tree should be, decided by what steps cost and by what they gave.

A ``Ledger`` keeps measured figures of each form (a size of tree, or no tree at all) for as long as
its owner likes; a ``Pace`` serves one run of the loop with it. Both live on the host: the loop asks
before each visit which of its compiled programs to run and for how many steps, and says afterwards
how they went.
"""

import math
import operator
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from treejax.drafters.strength import BONUS_DOUBT, LEVEL, Text, curve

RECENT = 33
"""Visits whose times are kept, by form; the median of their seconds a step is the cost."""

_TRIALS = 2  # visits of a form before its median time is believed: a first run is slow
_BREADTH = 0.6  # power of the candidates a level by which a tree is thought better than a chain
_CREDIT = 1.0  # plain steps' time that a run may risk at once
_TIRING = 8  # trials in vain, while resting is best, that halve what later ones may lose
_RESTS = 4  # visits of plain steps before anything is held against their time
_RENEW = 32  # drafts, for each time known of a plain step, after which one more is taken
_JITTER = 0.1  # of a step's time
_HOLD = 0.1  # of the drafts that speak for a form: so many more are made before it is asked again
_FOREVER = 10**6  # steps: more than any visit makes
_LEARN = 0.03  # how far a draft moves the level that the next text of its kind begins with
_MOST_KINDS = 64  # kinds of texts whose level is kept


class _Form:
    """A form's recent seconds with their median, and its bonus with the doubt about it."""

    def __init__(self, breadth: float) -> None:
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.cost = float("nan")
        self.bonus, self.doubt = _BREADTH * math.log(breadth), BONUS_DOUBT


class Ledger:
    """Costs and bonuses of forms, measured while serving; the first proposes nothing.

    A ledger that is kept from call to call spares later ones the trials that the first one makes.
    Seconds are those of whole steps: it serves one model, device, policy and batch.

    Args:
      depths: of each form's trees, 0 first.
      rows: of each form's trees with their root, growing; None for chains. They tell how wide a
        tree is, and what a form costs of which no step was made.
    """

    def __init__(self, depths: tuple[int, ...], rows: tuple[int, ...] | None = None):
        rows = tuple(depth + 1 for depth in depths) if rows is None else rows
        if len(depths) < 2 or depths[0] != 0 or min(depths[1:]) < 1:
            raise ValueError(f"a ledger of depths {depths}, expected 0, then depths of 1 or more")
        if len(rows) != len(depths) or any(map(operator.le, rows, depths)):
            raise ValueError(
                f"a ledger of depths {depths} and rows {rows}, expected more rows than levels"
            )
        self.depths, self.rows = depths, rows
        wide = [(r - 1) / max(d, 1) for r, d in zip(rows, depths, strict=True)]
        self._forms = [_Form(max(1.0, breadth)) for breadth in wide]
        self._levels: dict[Hashable, float] = {}
        self._serves: Hashable = None

    def __len__(self) -> int:
        return len(self._forms)

    def serve(self, what: Hashable) -> None:
        """Say what the next steps are steps of: model, device, size of batch.

        Raises:
          ValueError: the figures kept are of something else.
        """
        if any(form.seconds for form in self._forms) and what != self._serves:
            raise ValueError(
                "drafter 'budget' has figures of another model, device or size of batch, expected "
                "the same as before: make one object for each"
            )
        self._serves = what

    def record(self, form: int, seconds: float) -> None:
        """The time of a step, as one visit shows it."""
        mine = self._forms[form]
        mine.seconds.append(seconds)
        mine.cost = statistics.median_low(mine.seconds)

    def steps(self, form: int) -> int:
        """How many recent visits the form's cost is known from."""
        return len(self._forms[form].seconds)

    def tried(self, form: int) -> bool:
        return self.steps(form) >= _TRIALS

    def seconds(self, form: int) -> float:
        """Of a step: the median of recent ones; of a form that lacks trials what the two before it
        say by their rows, or the one time that was seen if that is less."""
        if form == 0 or self.tried(form):
            return self._forms[form].cost
        before = [mine.cost for mine in self._forms[max(0, form - 2) : form] if mine.seconds]
        if not before:
            return float("nan")
        guess = before[-1]
        if len(before) > 1:
            rows = self.rows[form - 2 : form + 1]
            rise = max(0.0, before[1] - before[0]) / max(rows[1] - rows[0], 1)
            guess += rise * (rows[2] - rows[1])
        return min([guess, *self._forms[form].seconds])

    def bonus(self, form: int) -> tuple[float, float]:
        """By which its strength exceeds a text's level, and the variance of what is known."""
        return self._forms[form].bonus, self._forms[form].doubt

    def learn_bonus(self, form: int, bonus: float, doubt: float) -> None:
        self._forms[form].bonus, self._forms[form].doubt = bonus, doubt

    def level(self, kind: Hashable) -> float:
        """Of recent texts of this kind."""
        return self._levels.get(kind, LEVEL)

    def learn_level(self, kind: Hashable, level: float) -> None:
        known = self._levels.pop(kind, LEVEL)
        self._levels[kind] = known + _LEARN * (level - known)
        if len(self._levels) > _MOST_KINDS:
            del self._levels[next(iter(self._levels))]  # not seen for longest

    def table(self) -> list[dict[str, float]]:
        """Seconds a step, and accepted candidates a step on a usual text, by form that was run."""
        return [
            {
                "form": form,
                "seconds": mine.cost,
                "accepted": curve(LEVEL + mine.bonus, self.depths[form]).mean,
            }
            for form, mine in enumerate(self._forms)
            if mine.seconds
        ]


class Plan(NamedTuple):
    """What the loop asks the device for next.

    Attributes:
      form: which of the programs.
      count: steps.
      ahead: whether another visit may be asked for before this one is fetched.
    """

    form: int
    count: int
    ahead: bool


def fitting(most: int, seconds: float, step: float) -> int:
    """Steps that fit a visit of so many seconds if each takes ``step``: 1 to ``most``, and 1 where
    that is unknown (nan) and seconds count."""
    if math.isinf(seconds):
        return most
    return 1 if math.isnan(step) else int(min(max(seconds / max(step, 1e-9), 1), most))


class Pace:
    """Chooses the form of each visit of one run, and how long it holds.

    The form from which most tokens a second are expected is taken: none at all where drafting does
    not pay (reference, part B: maximise E(N) / t(N)). Another one that would be better if its
    strength were a standard deviation higher is tried when what that is expected to lose is no
    more than its part of an allowance: the time of a plain step, and of every second served one
    ``patience``-th, evenly among such forms. So trials cost little where they are dear and come
    often where they are cheap, and a text that changes is noticed while nothing is drafted. While
    resting stays best, trials become rarer.

    A trial is one step. What is best holds until the next trial can be paid; a size no longer than
    what it was seen to do speaks for, as every draft tells something, where rests tell nothing.

    Args:
      patience: seconds served for each that trials may lose.
      kind: of the text, such as the settings that it is drawn with: texts of a kind are alike.
    """

    def __init__(self, ledger: Ledger, patience: int, kind: Hashable = None):
        self._ledger, self._patience, self._kind = ledger, patience, kind
        self._text = Text(
            ledger.depths,
            ledger.level(kind),
            [ledger.bonus(form) for form in range(len(ledger))],
        )
        self._earned, self._started = 0.0, False
        self._allowed = [0.0] * len(ledger)
        self._best, self._fruitless, self._drafts = 0, 0, 0

    def choose(self, most: int, seconds: float) -> Plan:
        """What to run next: at most so many steps, and what fits so many seconds; one step in any
        case."""
        ledger = self._ledger
        if ledger.steps(0) < _RESTS:  # the first, of which some are slow, are short
            count = 1 if not ledger.tried(0) else ledger.steps(0)
            return Plan(0, min(count, fitting(most, seconds, ledger.seconds(0))), True)
        if not self._started:
            self._started, self._earned = True, _CREDIT * ledger.seconds(0)
        rates, hopes = [1 / ledger.seconds(0)], [0.0]
        least = ledger.seconds(0)  # that a form costs which has no trials: larger trees cost more
        for form in range(1, len(ledger)):
            costs, tried = ledger.seconds(form), ledger.tried(form)
            cheapest = costs / (1 + _JITTER / math.sqrt(ledger.steps(form))) if tried else least
            rates.append(self.expected(form) / costs if ledger.steps(form) else 0.0)
            hopes.append(self.expected(form, 1.0) / cheapest)
            least = max(least, costs)
            if not ledger.steps(form):
                break  # forms are first tried in order, so that there is something to guess from
        # A form without its trials is run as a trial only.
        best = max((f for f in range(len(rates)) if ledger.tried(f)), key=rates.__getitem__)
        if best != self._best:
            self._best, self._fruitless = best, 0
        if best and self._drafts >= _RENEW * ledger.steps(0):
            self._drafts = 0  # were its time one of a busy device, rest would never be best again
            return Plan(0, 1, True)
        form, count = self._trial(best, rates[best], hopes)
        if form != best:
            self._fruitless += not best
            return Plan(form, 1, False)
        if best:
            count = min(count, int(_HOLD * self._text.drafts(best)))
        count = min(max(count, 1), fitting(most, seconds, ledger.seconds(best)))
        return Plan(best, count, True)

    def _trial(self, best: int, rate: float, hopes: list[float]) -> tuple[int, int]:
        """A form that may be better and may be tried now, the most hopeful first; else the best,
        and after how many steps of it the first of the others may be."""
        hopeful = [form for form, hope in enumerate(hopes) if form != best and hope > rate]
        for form in hopeful:
            self._allowed[form] += self._earned / len(hopeful)
        if hopeful:
            self._earned = 0.0
        missing = []
        for form in sorted(hopeful, key=hopes.__getitem__, reverse=True):
            lost = max(0.0, self._ledger.seconds(form) - self.expected(form) / rate)
            if lost <= self._allowed[form]:
                self._allowed[form] -= lost
                return form, 1
            missing.append(lost - self._allowed[form])
        if not missing:
            return best, _FOREVER
        part = self._ledger.seconds(best) * self._share() / len(hopeful)
        return best, min(math.ceil(min(missing) / part), _FOREVER)

    def _share(self) -> float:
        """Of the seconds served, what trials may lose."""
        return 1 / (self._patience * (1 + self._fruitless / _TIRING))

    def record(self, form: int, seconds: float, accepted: Sequence[float]) -> None:
        """How the steps of a visit went: seconds a step, and by step the candidates accepted, a
        sequence that took part."""
        self._ledger.record(form, seconds)
        self._earned += seconds * len(accepted) * self._share()
        if not form:
            self._text.rest(len(accepted))
            return
        self._drafts += len(accepted)
        for count in accepted:
            self._text.see(form, count)
            self._ledger.learn_level(self._kind, self._text.level)
            self._ledger.learn_bonus(form, *self._text.general(form))

    def expected(self, form: int, deviations: float = 0.0) -> float:
        """Tokens that a step of the form is expected to emit a sequence, on the text at hand, or
        would if its strength were by so many standard deviations higher."""
        if not form:
            return 1.0
        return 1.0 + curve(self._text.strength(form, deviations), self._ledger.depths[form]).mean


class Steady:
    """The pace of a drafter that has one form: as many steps as fit, by the last visit's time."""

    def __init__(self) -> None:
        self._step = float("nan")

    def choose(self, most: int, seconds: float) -> Plan:
        """See ``Pace.choose``."""
        return Plan(0, fitting(most, seconds, self._step), True)

    def record(self, form: int, seconds: float, accepted: Sequence[float]) -> None:
        """See ``Pace.record``."""
        self._step = seconds
