"""What each policy is held to, and why it is not held to more.

LumoTree's rule, 1.10 E_native + 2^-24 M + 2^-149, fits arithmetic that is the native update. It is
counted for every policy, and it gates where a policy promises that update. Others sum the same
terms in another order, so that in single cells their error may be a few roundings above a native
error that happens to be small there; they are given those roundings, in units of 2^-24 of the
cell's largest value, and nothing in proportion to their own error.
"""

import dataclasses

from treejax.audit.component.truth import STRICT, Rule
from treejax.policies import Policy

STEPPED = Rule("stepped", 1.10, (4.0, 16.0))
"""The native update node by node, which the compiler may sum in another order at some widths (at
16 x 16 on a CPU it does, at 64 x 64 it does not). Of 28,000 cells the worst was at 1.1 and 7.6."""
SOLVED = Rule("solved", 1.10, (16.0, 64.0))
"""Outputs of triangular solves. Decays are differences of sums: a sum of size G carries |G| 2^-24
of rounding, which is relative in what is multiplied by it, and |G| reaches some tens; keys that
overlap multiply it. Of 230,000 cells over five steps the worst was at 10.6 and 29.9."""
REBUILT = Rule("rebuilt", 1.10, (8.0, 64.0))
"""States from pseudo-values, for the same reason; of 10,000 the worst was at 4.6 and 19.8 (of those
that sum decays from a path's end, as the ring does, at 1.2 and 8.5)."""
RELATIVE = {
    "bf16x3": Rule("bf16x3", 1.10, (1.0, 1.0), 2e-4),
    "tf32": Rule("tf32", 1.10, (1.0, 1.0), 1e-2),
}
"""By the products' precision: the bounds of the laboratory's gate, relative to the values."""
CONTRACT = 1e-5
"""Relative RMS of published states in float32 that the design promises of every policy."""


@dataclasses.dataclass(frozen=True)
class Promise:
    """What gates.

    Attributes:
      outputs, states: rules of their cells.
      bitwise: whether published states are the bits of single-token decoding.
      confined: whether what is not a number stays in its row and those below it, also in a verify;
        where ``bitwise``, it never reaches a state of another path in any case.
      exact: whether the products are float32.
    """

    outputs: Rule
    states: Rule
    bitwise: bool = False
    confined: bool = False
    exact: bool = True


PROMISES = {
    "replay": Promise(STRICT, STRICT, bitwise=True, confined=True),
    "solve_replay": Promise(SOLVED, STRICT, bitwise=True),
    "snapshot": Promise(STEPPED, STEPPED, confined=True),
    "per_path": Promise(STEPPED, STEPPED, confined=True),
}
"""By a policy's name; every other, a user's own too, is held to ``SOLVED`` and ``REBUILT``."""


def promise_of(policy: Policy, promises: dict[str, Promise] = PROMISES) -> Promise:
    """The rules that gate for a policy, from its name and the precision of its products."""
    promise = promises.get(policy.name, Promise(SOLVED, REBUILT))
    loose = RELATIVE.get(getattr(policy, "precision", "ieee"))
    if loose is None:
        return promise
    return dataclasses.replace(
        promise,
        outputs=loose,
        states=promise.states if promise.bitwise else loose,
        exact=promise.bitwise,
    )
