"""How large the next tree should be, decided by what steps cost and by what they gave.

A ``Ledger`` keeps measured figures of each form (a size of tree, or no tree at all) for as long as
its owner likes; a ``Pace`` serves one run of the loop with it. Both live on the host: the loop asks
before each step which of its compiled programs to run, and says afterwards how it went.
"""

import dataclasses
import statistics
from collections import deque

RECENT = 33
"""Steps whose times are kept, by form; their median is the cost."""

_LONG, _SHORT = 0.995, 0.9  # decay a step, of a form's gain in general and of the text at hand
_PRIOR = 6.0  # how many steps of its own outweigh what other forms say of a form


@dataclasses.dataclass
class _Figures:
    """One form: recent seconds, and decayed sums of steps and of accepted candidates."""

    seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT))
    steps: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: float, decay: float) -> None:
        self.steps = self.steps * decay + 1.0
        self.accepted = self.accepted * decay + accepted


class Ledger:
    """Costs and gains of ``forms`` forms, measured while serving; the first proposes nothing.

    A ledger that is kept from call to call spares later ones the trials that the first one makes.
    Seconds are those of whole steps: it serves one model, device, policy and batch.

    Args:
      forms: how many there are.
      trials: steps that every form gets before figures are trusted.
    """

    def __init__(self, forms: int, trials: int = 3):
        if forms < 2 or trials < 1:
            raise ValueError(f"a ledger of {forms} forms and {trials} trials, expected 2 and 1")
        self.trials = trials
        self._figures = [_Figures() for _ in range(forms)]

    def __len__(self) -> int:
        return len(self._figures)

    def record(self, form: int, seconds: float, accepted: float) -> None:
        """One step: its time, and accepted candidates a sequence that took part."""
        figures = self._figures[form]
        figures.seconds.append(seconds)
        figures.add(accepted, _LONG)

    def untried(self) -> int | None:
        """The form with fewest steps if it lacks trials, the smallest first; or None."""
        counts = [len(figures.seconds) for figures in self._figures]
        least = min(counts)
        return counts.index(least) if least < self.trials else None

    def seconds(self, form: int) -> float:
        return statistics.median(self._figures[form].seconds)

    def gain(self, form: int) -> float:
        """Accepted candidates a step, in general; one more step with half a candidate is assumed,
        so that a form is never given up for good."""
        figures = self._figures[form]
        return (figures.accepted + 0.5) / (figures.steps + 1.0) if form else 0.0

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
    part B: maximise E(N) / t(N)). After ``patience`` steps without a draft one is made, because the
    text may have changed.
    """

    def __init__(self, ledger: Ledger, patience: int):
        self._ledger, self._patience = ledger, patience
        self._level = _Figures()  # "steps" are the gains that were expected in general
        self._own = [_Figures() for _ in range(len(ledger))]
        self._resting = 0

    def choose(self) -> int:
        """The form to run next."""
        untried = self._ledger.untried()
        if untried is not None:
            return untried
        if self._resting >= self._patience:
            return self._best(range(1, len(self._ledger)))
        return self._best(range(len(self._ledger)))

    def record(self, form: int, seconds: float, accepted: float) -> None:
        """How a step went: seconds, and accepted candidates a sequence that took part."""
        if form:
            expected = self._ledger.gain(form)
            level = self._level
            level.steps = level.steps * _SHORT + expected
            level.accepted = level.accepted * _SHORT + accepted
            self._own[form].add(accepted, _SHORT)
        self._ledger.record(form, seconds, accepted)
        self._resting = 0 if form else self._resting + 1

    def expected(self, form: int) -> float:
        """Tokens that a step of the form is expected to emit a sequence, on the text at hand."""
        if not form:
            return 1.0
        level = (self._level.accepted + 1.0) / (self._level.steps + 1.0)
        general, own = level * self._ledger.gain(form), self._own[form]
        return 1.0 + (_PRIOR * general + own.accepted) / (_PRIOR + own.steps)

    def _best(self, forms: range) -> int:
        return max(forms, key=lambda form: self.expected(form) / self._ledger.seconds(form))


class Steady:
    """The pace of a drafter that has one form."""

    def choose(self) -> int:
        return 0

    def record(self, form: int, seconds: float, accepted: float) -> None:
        pass
