"""How large the next tree should be, decided by what steps cost and by what they gave.

A ``Pace`` serves one run of the loop, on the host, with a ``Ledger`` that outlives it: the loop
asks before each visit which of its compiled programs to run and for how many steps, and says
afterwards how they went.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from treejax.drafters.ledger import JITTER, LONG, Ledger
from treejax.drafters.strength import Text, curve

_RESTS = (1, 1, 2 * LONG)  # steps of plain visits before anything is held against their time
_WORTH = 50  # visits of the best form hold so many times what a visit takes beside its steps
_CREDIT = 1.0  # plain steps' time that texts of a new kind may risk at once
_TIRING = 8  # trials in vain, while resting is best, that halve what later ones may lose
_RENEW = 32  # drafts, for each time known of a plain step, after which one more is taken
_HOLD = 0.1  # of the drafts that speak for a form: so many more are made before it is asked again
_FOREVER = 10**6  # steps: more than any visit makes
_LEARN = 0.1  # how far a draft moves the level that the next text of its kind begins with


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

    A trial is one step, or a whole visit if that can be paid: as many steps as outweigh what a
    visit takes beside them. What is best holds until the next trial can be paid; a size for a whole
    visit, and no longer than what it was seen to do speaks for, as every draft tells something,
    where rests tell nothing.

    Args:
      patience: seconds served for each that trials may lose.
      kind: of the text, such as the settings that it is drawn with: texts of a kind are alike.
    """

    def __init__(self, ledger: Ledger, patience: int, kind: Hashable = None):
        self._ledger, self._patience, self._kind = ledger, patience, ledger.kind(kind)
        self._text = Text(ledger.depths, self._kind.level, self._kind.bonuses)
        self._best, self._fruitless, self._drafts = 0, 0, 0

    def choose(self, most: int, seconds: float) -> Plan:
        """What to run next: at most so many steps, and what fits so many seconds; one step in any
        case."""
        ledger = self._ledger
        if ledger.visits(0) < len(_RESTS):  # short ones and a long one, each by itself
            count = _RESTS[ledger.visits(0)]
            return Plan(0, min(count, fitting(most, seconds, ledger.seconds(0))), False)
        if self._kind.earned is None:
            self._kind.earned = _CREDIT * ledger.seconds(0)
        rates, hopes = [1 / ledger.seconds(0)], [0.0]
        least = ledger.seconds(0)  # that a form costs which has no trials: larger trees cost more
        for form in range(1, len(ledger)):
            costs, tried = ledger.seconds(form), ledger.tried(form)
            cheapest = costs / (1 + JITTER / math.sqrt(ledger.visits(form))) if tried else least
            rates.append(self.expected(form) / costs if ledger.visits(form) else 0.0)
            hopes.append(self.expected(form, 1.0) / cheapest)
            least = max(least, costs)
            if not ledger.visits(form):
                break  # forms are first tried in order, so that there is something to guess from
        # A form without its trials is run as a trial only.
        best = max((f for f in range(len(rates)) if ledger.tried(f)), key=rates.__getitem__)
        if best != self._best:
            self._best, self._fruitless = best, 0
        if best and self._drafts >= _RENEW * ledger.visits(0):
            self._drafts = 0  # were its time one of a busy device, rest would never be best again
            return Plan(0, 1, True)
        form, count = self._trial(best, rates[best], hopes)
        if form != best:
            self._fruitless += not best
            return Plan(form, min(count, fitting(most, seconds, ledger.seconds(form))), False)
        if best:
            count = max(self._whole(best), min(count, int(_HOLD * self._text.drafts(best))))
        count = min(max(count, 1), fitting(most, seconds, ledger.seconds(best)))
        return Plan(best, count, True)

    def _whole(self, form: int) -> int:
        """Steps that outweigh what a visit of them takes beside."""
        return max(1, math.ceil(_WORTH * self._ledger.beside / self._ledger.seconds(form)))

    def _trial(self, best: int, rate: float, hopes: list[float]) -> tuple[int, int]:
        """A form that may be better and may be tried now, the most hopeful first, and for how many
        steps; else the best, and after how many steps of it the first of the others may be."""
        hopeful = [form for form, hope in enumerate(hopes) if form != best and hope > rate]
        kind = self._kind
        for form in hopeful:
            kind.allowed[form] += (kind.earned or 0.0) / len(hopeful)
        if hopeful:
            kind.earned = 0.0
        missing = []
        for form in sorted(hopeful, key=hopes.__getitem__, reverse=True):
            step = max(0.0, self._ledger.seconds(form) - self.expected(form) / rate)
            # A short trial is a visit more, and ends one of the best form early; a whole one
            # takes the place of one.
            losses = {self._whole(form): self._whole(form) * step}
            losses.setdefault(1, 2 * self._ledger.beside + step)
            for steps, lost in losses.items():
                if lost <= kind.allowed[form]:
                    kind.allowed[form] -= lost
                    return form, steps
            missing.append(min(losses.values()) - kind.allowed[form])
        if not missing:
            return best, _FOREVER
        part = self._ledger.seconds(best) * self._share() / len(hopeful)
        return best, min(math.ceil(min(missing) / part), _FOREVER)

    def _share(self) -> float:
        """Of the seconds served, what trials may lose."""
        return 1 / (self._patience * (1 + self._fruitless / _TIRING))

    def record(self, form: int, steps: int, seconds: float, accepted: Sequence[float]) -> None:
        """How a visit of so many steps went: its seconds, and by step the candidates accepted, a
        sequence that took part; steps that were cut short tell nothing and are left out there."""
        self._ledger.record(form, steps, seconds)
        if self._kind.earned is not None:
            self._kind.earned += seconds * self._share()
        if not form:
            self._text.rest(len(accepted))
            return
        self._drafts += len(accepted)
        for count in accepted:
            self._text.see(form, count)
            self._kind.level += _LEARN * (self._text.level - self._kind.level)
            self._kind.bonuses[form] = self._text.general(form)

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

    def record(self, form: int, steps: int, seconds: float, accepted: Sequence[float]) -> None:
        """See ``Pace.record``."""
        self._step = seconds / steps
