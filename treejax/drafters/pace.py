"""How large the next tree should be, decided by what steps cost and by what they gave.

A ``Ledger`` keeps measured figures of each form (a size of tree, or no tree at all) for as long as
its owner likes; a ``Pace`` serves one run of the loop with it. Both live on the host: the loop asks
before each step which of its compiled programs to run, and says afterwards how it went.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Hashable

RECENT = 33
"""Steps whose times are kept, by form; their median is the cost."""

_LONG, _SHORT = 0.995, 0.9  # decay a draft, of a form's gain in general and of the text at hand
_FADE = 0.98  # decay a step without a draft: what was seen of the text grows old
_ASSUMED = 8.0  # steps that a form is given credit for, so that a bad start does not end it
_PRIOR = 6.0  # how many steps of its own outweigh what other forms say of a form
_FIRST_REST = 16  # steps without a draft before the first look whether the text has changed
_LEARN = 0.3  # how far a draft moves the level that the next text begins with
_MOST_KINDS = 64  # kinds of texts whose level is kept


@dataclasses.dataclass
class _Figures:
    """One form: recent seconds and their median, decayed sums of steps and accepted candidates."""

    seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT))
    cost: float = float("nan")
    steps: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: float, decay: float, steps: float = 1.0) -> None:
        self.steps = self.steps * decay + steps
        self.accepted = self.accepted * decay + accepted


class Ledger:
    """Costs and gains of forms, measured while serving; the first proposes nothing.

    A ledger that is kept from call to call spares later ones the trials that the first one makes.
    Seconds are those of whole steps: it serves one model, device, policy and batch.

    Args:
      depths: of each form's trees, 0 first. A form is at first assumed to have half its depth
        accepted, which a few steps correct.
      trials: steps that every form gets before figures are trusted.
    """

    def __init__(self, depths: tuple[int, ...], trials: int = 3):
        if len(depths) < 2 or depths[0] != 0 or min(depths[1:]) < 1 or trials < 1:
            raise ValueError(
                f"a ledger of depths {depths} and {trials} trials, expected 0, then depths of 1 "
                "or more, and 1 trial or more"
            )
        self.depths, self.trials = depths, trials
        self._levels: dict[Hashable, float] = {}
        self._figures = [_Figures() for _ in depths]

    def __len__(self) -> int:
        return len(self._figures)

    def record(self, form: int, seconds: float, accepted: float, level: float = 1.0) -> None:
        """One step: its time, and accepted candidates a sequence that took part.

        On a text of a low ``level`` little was to be expected: it counts as that part of a step, or
        the form that served the hard texts would look worse than the others.
        """
        figures = self._figures[form]
        figures.seconds.append(seconds)
        figures.cost = statistics.median(figures.seconds)
        figures.add(accepted, _LONG, level)

    def untried(self) -> int | None:
        """The form with fewest steps if it lacks trials, the smallest first; or None."""
        counts = [len(figures.seconds) for figures in self._figures]
        least = min(counts)
        return counts.index(least) if least < self.trials else None

    def seconds(self, form: int) -> float:
        """Of a step: the median of recent ones."""
        return self._figures[form].cost

    def gain(self, form: int) -> float:
        """Accepted candidates a step, in general."""
        figures, assumed = self._figures[form], 0.5 * self.depths[form]
        return (figures.accepted + _ASSUMED * assumed) / (figures.steps + _ASSUMED)

    def level(self, kind: Hashable) -> float:
        """What recent texts of this kind gave by what texts in general give; see ``Pace``."""
        return self._levels.get(kind, 1.0)

    def learn_level(self, kind: Hashable, level: float) -> None:
        known = self._levels.pop(kind, 1.0)
        self._levels[kind] = known + _LEARN * (level - known)
        if len(self._levels) > _MOST_KINDS:
            del self._levels[next(iter(self._levels))]  # not seen for longest

    def table(self) -> list[dict[str, float]]:
        """Seconds a step and accepted candidates a step, by form, of those that were tried."""
        return [
            {"form": form, "seconds": self.seconds(form), "accepted": self.gain(form)}
            for form, figures in enumerate(self._figures)
            if figures.seconds
        ]


class Pace:
    """Chooses the form of each step of one run.

    The gain of a form on the text at hand is its gain in general times the text's *level*, what
    recent steps gave by what they give in general, corrected by the form's own recent steps. The
    form with most tokens a second is taken: none at all where drafting does not pay (reference,
    part B: maximise E(N) / t(N)). Because the text may change, the cheapest draft is made all the
    same after 16 steps without one, then after 32, 64 and so on up to ``patience``, until drafting
    pays again.

    Args:
      kind: of the text, such as the settings that it is drawn with: texts of a kind are alike.
    """

    def __init__(self, ledger: Ledger, patience: int, kind: Hashable = None):
        self._ledger, self._patience, self._kind = ledger, patience, kind
        # "steps" are the gains that were expected in general; a new text is like recent ones.
        self._level = _Figures(steps=1.0, accepted=ledger.level(kind))
        self._own = [_Figures() for _ in range(len(ledger))]
        self._rested, self._rest = 0, min(_FIRST_REST, patience)

    def choose(self) -> int:
        """The form to run next."""
        untried = self._ledger.untried()
        if untried is not None:
            return untried
        best = self._best(range(len(self._ledger)))
        if best:
            self._rest = min(_FIRST_REST, self._patience)
        elif self._rested >= self._rest:
            self._rest = min(2 * self._rest, self._patience)
            return min(range(1, len(self._ledger)), key=self._ledger.seconds)
        return best

    def record(self, form: int, seconds: float, accepted: float) -> None:
        """How a step went: seconds, and accepted candidates a sequence that took part."""
        level = 1.0
        if form:
            self._level.add(accepted, _SHORT, self._ledger.gain(form))
            self._own[form].add(accepted, _SHORT)
            level = min(max(self._level.accepted / self._level.steps, 0.05), 20.0)
            self._ledger.learn_level(self._kind, level)
        else:
            for figures in (self._level, *self._own):
                figures.steps *= _FADE
                figures.accepted *= _FADE
        self._ledger.record(form, seconds, accepted, level)
        self._rested = 0 if form else self._rested + 1

    def expected(self, form: int) -> float:
        """Tokens that a step of the form is expected to emit a sequence, on the text at hand."""
        if not form:
            return 1.0
        level, own = self._level.accepted / self._level.steps, self._own[form]
        general = level * self._ledger.gain(form)
        return 1.0 + (_PRIOR * general + own.accepted) / (_PRIOR + own.steps)

    def _best(self, forms: range) -> int:
        return max(forms, key=lambda form: self.expected(form) / self._ledger.seconds(form))


class Steady:
    """The pace of a drafter that has one form."""

    def choose(self) -> int:
        return 0

    def record(self, form: int, seconds: float, accepted: float) -> None:
        pass
