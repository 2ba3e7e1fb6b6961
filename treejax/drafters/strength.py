"""How strong a text makes each form, learned from what its drafts gave.

What links the forms is a strength. If each of a level's candidates is right with a chance p, and a
form has the worth of c of them, the level passes with q = 1 - (1 - p)^c, so that log(-log(1 - q))
is a sum: of the text's level, log(-log(1 - p)), and of the form's bonus, log(c). A chain that fades
with depth has a c below 1, a tree one above. Both are learned, the bonus from text to text; but for
the first form's: where one form alone is run, level and bonus could not be told apart, and what
belongs to the texts would be held for the form's.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

LEVEL, _LEVEL_DOUBT = -0.1, 0.5  # of a text of which nothing is known, and its variance
BONUS_DOUBT = 0.15  # variance of what is thought of a form before it runs
_OWN = 0.06  # variance of a form's bonus from one text to the next
_SURE = 1e-4  # the same of the first form, whose strength is the level
_AGEING = 0.002  # what a text adds to the doubt about forms in general
_KEEP = 0.995  # of what a text showed, after a draft
_SURPRISE, _CHANGED = 0.1, 1.0  # weight of a step in the mean surprise, in standard deviations
_RESTING = 0.01  # variance of the level that a step without a draft adds: nothing is seen
_LEAST, _MOST = -5.0, 2.0  # strengths: chances of 0.7 % and 99.9 %


class _Curve(NamedTuple):
    """Accepted candidates of a step: expected, its slope in the strength, and the variance."""

    mean: float
    slope: float
    variance: float


def curve(strength: float, depth: int) -> _Curve:
    """Of a form of that depth each level of which passes alike."""
    return _curve(round(100 * min(max(strength, _LEAST), _MOST)), depth)


@functools.lru_cache(maxsize=65536)  # the loop waits for the answer
def _curve(hundredths: int, depth: int) -> _Curve:
    hazard = math.exp(hundredths / 100)
    fails = math.exp(-hazard)
    mean = by_chance = square = 0.0
    reach = 1.0
    for d in range(1, depth + 1):
        by_chance += d * reach
        reach *= 1 - fails
        mean += reach
        square += (2 * d - 1) * reach
    return _Curve(mean, by_chance * hazard * fails, square - mean * mean + 1e-6)


class Text:
    """The level of the text at hand and the forms' bonuses in it: most likely given what was
    accepted, where both are normal around what texts before it say. A step of Fisher's scoring
    after each draft follows the maximum.

    Args:
      depths: of each form's trees, 0 first.
      level: of texts like this one.
      known: bonus of each form, and the variance of what is known of it.
    """

    def __init__(self, depths: tuple[int, ...], level: float, known: Sequence[tuple[float, float]]):
        self._depths = depths
        self._usual = self.level = level
        self._prior = [bonus for bonus, _ in known]
        self._doubt = [min(doubt + _AGEING, BONUS_DOUBT) for _, doubt in known]
        self._doubt[1] = 0.0
        self._own = [_SURE if form == 1 else _OWN for form in range(len(known))]
        self._bonus = list(self._prior)
        self._accepted, self._steps = [0.0] * len(known), [0.0] * len(known)
        self._information = [0.0] * len(known)
        self._spread, self._surprise, self._rested = _LEVEL_DOUBT, 0.0, 0

    def strength(self, form: int, deviations: float = 0.0) -> float:
        """Expected, or by so many standard deviations higher."""
        own = 1 / (self._doubt[form] + self._own[form])
        all_known = own + self._information[form]
        variance = 1 / all_known + (own / all_known) ** 2 * self._spread + _RESTING * self._rested
        return self.level + self._bonus[form] + deviations * math.sqrt(variance)

    def drafts(self, form: int) -> float:
        """That speak for the form's strength on this text; older ones count for less."""
        return self._steps[form]

    def rest(self, steps: int = 1) -> None:
        self._rested += steps

    def see(self, form: int, accepted: float) -> None:
        """Take in a draft; a text that surprises for long is a new one."""
        expected = curve(self.strength(form), self._depths[form])
        doubt = (expected.slope * (self.strength(form, 1.0) - self.strength(form))) ** 2
        surprise = (accepted - expected.mean) / math.sqrt(expected.variance + doubt)
        self._surprise += _SURPRISE * (surprise - self._surprise)
        self._rested = 0
        if abs(self._surprise) > _CHANGED:
            self._forget()
        for sums in (self._accepted, self._steps, self._information):
            sums[:] = [_KEEP * value for value in sums]
        self._accepted[form] += accepted
        self._steps[form] += 1.0
        self._fit()

    def _forget(self) -> None:
        """Keep of the text what it says of forms in general. Were sums kept, those of forms that
        are not run any more would speak of the old level for long."""
        known = [self.general(form) for form in range(len(self._prior))]
        self._prior = [bonus for bonus, _ in known]
        self._doubt = [doubt for _, doubt in known]
        self._bonus = list(self._prior)
        for sums in (self._accepted, self._steps, self._information):
            sums[:] = [0.0] * len(sums)
        self._spread, self._surprise = _LEVEL_DOUBT, 0.0

    def _fit(self) -> None:
        """One step towards the maximum; the bonuses are eliminated, they meet in the level only."""
        score, precision = (self._usual - self.level) / _LEVEL_DOUBT, 1 / _LEVEL_DOUBT
        parts = []
        for form, steps in enumerate(self._steps):
            if steps < 1e-6:
                continue
            mean, slope, variance = curve(self.strength(form), self._depths[form])
            information = steps * slope * slope / variance
            own = 1 / (self._doubt[form] + self._own[form])
            pull = (self._accepted[form] - steps * mean) * slope / variance
            rest = pull - (self._bonus[form] - self._prior[form]) * own
            score += pull - information / (information + own) * rest
            precision += information * own / (information + own)
            self._information[form] = information
            parts.append((form, information, own, rest))
        move = _within_one(score / precision)
        self.level, self._spread = self.level + move, 1 / precision
        for form, information, own, rest in parts:
            self._bonus[form] += _within_one((rest - information * move) / (information + own))
            strength = self.level + self._bonus[form]
            self.level += min(max(strength, _LEAST), _MOST) - strength

    def general(self, form: int) -> tuple[float, float]:
        """The form's bonus in any text and the doubt about it, given what this one showed."""
        own, information = 1 / (self._doubt[form] + self._own[form]), self._information[form]
        all_known = own + information
        left = 1 / all_known + (information / all_known) ** 2 * self._spread
        share = self._doubt[form] * own
        bonus = self._prior[form] + share * (self._bonus[form] - self._prior[form])
        return bonus, self._doubt[form] - share * share * max(0.0, 1 / own - left)


def _within_one(step: float) -> float:
    """The curves are far from straight: longer steps overshoot."""
    return max(-1.0, min(1.0, step))
