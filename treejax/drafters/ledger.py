"""What steps cost and what they gave, by form: a size of tree, or no tree at all.

A ``Ledger`` keeps such figures for as long as its owner likes; a ``Pace`` decides by them.
"""

import math
import operator
import statistics
from collections import deque
from collections.abc import Hashable, Sequence

from treejax.drafters.strength import BONUS_DOUBT, LEVEL

RECENT = 33
"""Visits whose times are kept, by form."""

LONG = 4
"""Steps of a visit from which on its time says what a step takes, and not what a visit takes."""

JITTER = 0.1
"""Of a step's time."""

_TRIALS = 2  # visits of a form before its median time is believed: a first run is slow
_BREADTH = 0.6  # power of the candidates a level by which a tree is thought better than a chain
_MOST_KINDS = 64  # kinds of texts whose level is kept


class _Form:
    """A form's recent visits, and what a step of it takes."""

    def __init__(self) -> None:
        self.visits: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self.cost = float("nan")

    def beside(self) -> float | None:
        """Seconds that visits surely take beside their steps, by short ones and long ones; None if
        there are not both."""
        short = [seconds for steps, seconds in self.visits if steps == 1]
        many = [visit for visit in self.visits if visit[0] >= LONG]
        if not short or not many:
            return None
        length = statistics.median_low(steps for steps, _ in many)
        step = statistics.median_low(seconds / steps for steps, seconds in many)
        one = statistics.median_low(short) * (1 - JITTER / math.sqrt(len(short)))
        return (one - step) / (1 - 1 / length)

    def settle(self, beside: float) -> None:
        """Find the cost, as the median over steps, if a visit takes so much beside them."""
        found = sorted((max(took - beside, took / 2) / steps, steps) for steps, took in self.visits)
        left = sum(steps for _, steps in found) / 2
        for cost, steps in found:
            self.cost = cost
            left -= steps
            if left <= 0:
                break


class Kind:
    """What texts of a kind have in common.

    Attributes:
      level: of recent texts.
      bonuses: by form, by which its strength exceeds a text's level, and the variance of that.
      allowed: seconds that trials of each form may lose, earned by what was served.
      earned: seconds that are not yet shared out; None before the first text.
    """

    def __init__(self, breadths: Sequence[float]) -> None:
        self.level = LEVEL
        self.bonuses = [(_BREADTH * math.log(breadth), BONUS_DOUBT) for breadth in breadths]
        self.allowed = [0.0] * len(breadths)
        self.earned: float | None = None


class Ledger:
    """Costs and bonuses of forms, measured while serving; the first proposes nothing.

    A ledger that is kept from call to call spares later ones the trials that the first one makes.
    A visit takes as long as its steps and something beside them, which hangs on the device and not
    on the form: programs are handed over and results fetched. Seconds are those of whole steps: it
    serves one model, device, policy and batch.

    Args:
      depths: of each form's trees, 0 first.
      rows: of each form's trees with their root, growing; None for chains. They tell how wide a
        tree is, and what a form costs of which no step was made.

    Attributes:
      beside: seconds that a visit surely takes beside its steps.
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
        self._breadths = [max(1.0, breadth) for breadth in wide]
        self._forms = [_Form() for _ in depths]
        self.beside = 0.0
        self._kinds: dict[Hashable, Kind] = {}
        self._serves: Hashable = None

    def __len__(self) -> int:
        return len(self._forms)

    def serve(self, what: Hashable) -> None:
        """Say what the next steps are steps of: model, device, size of batch.

        Raises:
          ValueError: the figures kept are of something else.
        """
        if any(form.visits for form in self._forms) and what != self._serves:
            raise ValueError(
                "drafter 'budget' has figures of another model, device or size of batch, expected "
                "the same as before: make one object for each"
            )
        self._serves = what

    def record(self, form: int, steps: int, seconds: float) -> None:
        """The time of a visit."""
        self._forms[form].visits.append((steps, seconds))
        known = [beside for mine in self._forms if (beside := mine.beside()) is not None]
        self.beside = max(0.0, statistics.median_low(known)) if known else 0.0
        for mine in self._forms:
            mine.settle(self.beside)

    def visits(self, form: int) -> int:
        """How many recent visits the form's cost is known from."""
        return len(self._forms[form].visits)

    def tried(self, form: int) -> bool:
        return self.visits(form) >= _TRIALS

    def seconds(self, form: int) -> float:
        """Of a step: the median of recent ones; of a form that lacks trials what the two before it
        say by their rows, or the one time that was seen if that is less."""
        mine = self._forms[form]
        if form == 0 or self.tried(form):
            return mine.cost
        before = [mine.cost for mine in self._forms[max(0, form - 2) : form] if mine.visits]
        if not before:
            return float("nan")
        guess = before[-1]
        if len(before) > 1:
            rows = self.rows[form - 2 : form + 1]
            rise = max(0.0, before[1] - before[0]) / max(rows[1] - rows[0], 1)
            guess += rise * (rows[2] - rows[1])
        return min(guess, mine.cost) if mine.visits else guess

    def kind(self, name: Hashable) -> Kind:
        """What is known of texts of a kind."""
        mine = self._kinds.pop(name, None) or Kind(self._breadths)
        self._kinds[name] = mine
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]  # not seen for longest
        return mine

    def table(self) -> list[dict[str, float]]:
        """Seconds a step, by form that was run."""
        return [
            {"form": form, "seconds": mine.cost}
            for form, mine in enumerate(self._forms)
            if mine.visits
        ]
