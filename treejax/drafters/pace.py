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

_LONG, _SHORT = 0.995, 0.98  # decay a draft, of a form's figures in general and of the text at hand
_FADE = 0.98  # decay a step without a draft: what was seen of the text grows old
_ASSUMED = 8.0  # candidates that a form is given credit for, so that a bad start does not end it
_PRIOR = 20.0  # how many steps of its own outweigh what other forms say of a form
_NEW = 2.0  # tests of a candidate that outweigh what other texts of the kind were like
_CHANCE = 0.6  # of a candidate to be right in a text of which nothing is known
_FIRST_REST = 16  # steps without a draft before the first look whether the text has changed
_LEARN = 0.3  # how far a draft moves the chance that the next text begins with
_MOST_KINDS = 64  # kinds of texts whose chance is kept


@dataclasses.dataclass
class _Sums:
    """Decayed sums: what was accepted, and by what it is to be divided."""

    accepted: float = 0.0
    by: float = 0.0

    def add(self, accepted: float, by: float, decay: float) -> None:
        self.accepted = self.accepted * decay + accepted
        self.by = self.by * decay + by


class _Form:
    """A form's recent seconds with their median, and accepted by predicted candidates."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.cost = float("nan")
        self.sums = _Sums()


def geometric(chance: float, depth: int) -> float:
    """Accepted candidates of a chain each of which is right with ``chance`` if the last one was."""
    return sum(chance**d for d in range(1, depth + 1))


class Ledger:
    """Costs and gains of forms, measured while serving; the first proposes nothing.

    A ledger that is kept from call to call spares later ones the trials that the first one makes.
    Seconds are those of whole steps: it serves one model, device, policy and batch.

    Args:
      depths: of each form's trees, 0 first.
      trials: steps that every form gets before figures are trusted.
    """

    def __init__(self, depths: tuple[int, ...], trials: int = 3):
        if len(depths) < 2 or depths[0] != 0 or min(depths[1:]) < 1 or trials < 1:
            raise ValueError(
                f"a ledger of depths {depths} and {trials} trials, expected 0, then depths of 1 "
                "or more, and 1 trial or more"
            )
        self.depths, self.trials = depths, trials
        self._chances: dict[Hashable, float] = {}
        self._forms = [_Form() for _ in depths]

    def __len__(self) -> int:
        return len(self._forms)

    def record(self, form: int, seconds: float, accepted: float, chance: float = _CHANCE) -> None:
        """One step: its time, and accepted candidates a sequence that took part, on a text in which
        a candidate is right with ``chance``."""
        mine = self._forms[form]
        mine.seconds.append(seconds)
        mine.cost = statistics.median(mine.seconds)
        mine.sums.add(accepted, geometric(chance, self.depths[form]), _LONG)

    def untried(self) -> int | None:
        """The form with fewest steps if it lacks trials, the smallest first; or None."""
        counts = [len(form.seconds) for form in self._forms]
        least = min(counts)
        return counts.index(least) if least < self.trials else None

    def seconds(self, form: int) -> float:
        """Of a step: the median of recent ones."""
        return self._forms[form].cost

    def gain(self, form: int, chance: float = _CHANCE) -> float:
        """Accepted candidates a step on a text of that chance: those of a chain of the form's
        depth, times what the form gave by what such chains were to give. A tree gives more."""
        sums, depth = self._forms[form].sums, self.depths[form]
        better = (sums.accepted + _ASSUMED) / (sums.by + _ASSUMED)
        return min(better * geometric(chance, depth), float(depth))

    def chance(self, kind: Hashable) -> float:
        """That a candidate is right in recent texts of this kind."""
        return self._chances.get(kind, _CHANCE)

    def learn_chance(self, kind: Hashable, chance: float) -> None:
        known = self._chances.pop(kind, _CHANCE)
        self._chances[kind] = known + _LEARN * (chance - known)
        if len(self._chances) > _MOST_KINDS:
            del self._chances[next(iter(self._chances))]  # not seen for longest

    def table(self) -> list[dict[str, float]]:
        """Seconds a step, and accepted candidates a step on a usual text, by form that was run."""
        return [
            {"form": form, "seconds": self.seconds(form), "accepted": self.gain(form)}
            for form, mine in enumerate(self._forms)
            if mine.seconds
        ]


class Pace:
    """Chooses the form of each step of one run.

    Every candidate on an accepted path is a test of the text: the share that passes is the chance
    that the next one will, and what a form of some depth then gains is nearly geometric in it. This
    is corrected by what the form gives in general and by its own recent steps. The form with most
    tokens a second is taken: none at all where drafting does not pay (reference, part B: maximise
    E(N) / t(N)). Because the text may change, the cheapest draft is made all the same after 16
    steps without one, then after 32, 64 and so on up to ``patience``, until drafting pays again.

    Args:
      kind: of the text, such as the settings that it is drawn with: texts of a kind are alike.
    """

    def __init__(self, ledger: Ledger, patience: int, kind: Hashable = None):
        self._ledger, self._patience, self._kind = ledger, patience, kind
        self._tests = _Sums(_NEW * ledger.chance(kind), _NEW)  # a new text is like recent ones
        self._own = [_Sums() for _ in range(len(ledger))]
        self._rested, self._rest = 0, min(_FIRST_REST, patience)

    @property
    def chance(self) -> float:
        """That a candidate is right in this text."""
        return self._tests.accepted / self._tests.by

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
        if form:
            failed = accepted < self._ledger.depths[form]
            self._tests.add(accepted, accepted + failed, _SHORT)
            self._own[form].add(accepted, 1.0, _SHORT)
            self._ledger.learn_chance(self._kind, self.chance)
        else:
            for sums in (self._tests, *self._own):
                sums.add(0.0, 0.0, _FADE)
        self._ledger.record(form, seconds, accepted, self.chance)
        self._rested = 0 if form else self._rested + 1

    def expected(self, form: int) -> float:
        """Tokens that a step of the form is expected to emit a sequence, on the text at hand."""
        if not form:
            return 1.0
        general, own = self._ledger.gain(form, self.chance), self._own[form]
        return 1.0 + (_PRIOR * general + own.accepted) / (_PRIOR + own.by)

    def _best(self, forms: range) -> int:
        return max(forms, key=lambda form: self.expected(form) / self._ledger.seconds(form))


class Steady:
    """The pace of a drafter that has one form."""

    def choose(self) -> int:
        return 0

    def record(self, form: int, seconds: float, accepted: float) -> None:
        pass
