"""What a user asks the audits for, and whether every part of it can act (FC-26)."""

import dataclasses
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from pallas_kernels.implementation import resolve
from treejax.audit.faults import REGISTRY as ENGINE_FAULTS
from treejax.audit.sampler.faults import REGISTRY as SAMPLER_FAULTS
from treejax.drafters import Drafter, make_drafter
from treejax.model import Model
from treejax.policies import Policy, check_policy, make_policy
from treejax.steps.rules import named
from treejax.steps.rules.base import Rule

AUDITS = ("component", "continuation", "sampler")
DTYPES = ("float32", "bfloat16")

FAULTS: dict[str, Mapping[str, Any]] = {
    "continuation": ENGINE_FAULTS,
    "sampler": SAMPLER_FAULTS,
}
"""What can be planted, by the audit that must catch it."""

_ACTS: dict[str, tuple[str, ...]] = {
    "policy": ("component", "continuation"),
    "drafter": ("continuation",),
    "rule": ("continuation", "sampler"),
    "model": ("continuation", "sampler"),
    "dtype": ("continuation", "sampler"),
    "implementation": ("component", "continuation"),
    "faults": ("continuation", "sampler"),
    "envelope": ("continuation",),
    "calibrate": ("continuation",),
}
"""The audits in which an option acts; it is refused where none of them was asked for."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a user asks for; what is None or empty was not given.

    Attributes:
      audits: of ``AUDITS``; empty means all.
      policy: names or objects. drafter: "drafter:tree" or objects. rule: names or objects.
      faults: names; empty means all, None plants none.
      quick: seconds instead of a proof: fewer subjects and smaller samples.
      model: folder, name or loaded; None is the model that ships.
      envelope: file of a calibrated envelope to hold errors against.
      calibrate: file to write a newly calibrated envelope to, before it is used.
      seed, seeds: of all that is random, and how many of them where an audit takes several.

    Raises:
      ValueError: one line: an unknown name, or an option without effect.
    """

    audits: tuple[str, ...] = ()
    policy: tuple[str | Policy, ...] = ()
    drafter: tuple[str | Drafter, ...] = ()
    rule: tuple[str | Rule, ...] = ()
    faults: tuple[str, ...] | None = None
    quick: bool = False
    model: str | Path | Model | None = None
    dtype: str | None = None
    implementation: str = "auto"
    envelope: str | Path | None = None
    calibrate: str | Path | None = None
    seed: int | None = None
    seeds: int | None = None

    def __post_init__(self):
        for name in self.audits:
            if name not in AUDITS:
                raise ValueError(f"audit {name!r} is unknown, expected of: {', '.join(AUDITS)}")
        for option, audits in _ACTS.items():
            if self._given(option) and not set(audits) & set(self.chosen):
                raise ValueError(
                    f"{option} cannot act in the audit {' and '.join(self.chosen)}: leave it out, "
                    f"or audit {' or '.join(audits)} too"
                )
        if isinstance(self.model, Model) and self.dtype is not None:
            raise ValueError(
                "dtype cannot act on a model that is loaded: give it to load_model, or leave it out"
            )
        if self.envelope is not None and self.calibrate is not None:
            raise ValueError(
                "envelope and calibrate were both given, one reads a file and the other makes it: "
                "leave one out"
            )
        self._check_values()

    def _given(self, option: str) -> bool:
        value = getattr(self, option)
        return value is not None if option == "faults" else value not in (None, (), "auto")

    def _check_values(self) -> None:
        """Names and numbers, each by itself."""
        for name in self.faults or ():
            known = [known for faults in FAULTS.values() for known in faults]
            if name not in known:
                raise ValueError(
                    f"fault {name!r} is unknown, expected of: {', '.join(known)}; --list-faults "
                    "says what each does"
                )
            (audit,) = (audit for audit, faults in FAULTS.items() if name in faults)
            if audit not in self.chosen:
                raise ValueError(
                    f"fault {name!r} cannot act in the audit {' and '.join(self.chosen)}: leave it "
                    f"out, or audit {audit} too"
                )
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype is {self.dtype!r}, expected {' or '.join(DTYPES)}")
        for name, least in (("seed", 0), ("seeds", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole or not least <= int(value) < 2**32:
                raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")
        if self.envelope is not None and not Path(self.envelope).is_file():
            raise ValueError(f"no envelope file {str(self.envelope)!r}: calibrate writes one")
        if self.implementation != "auto":
            resolve(self.implementation)
        for policy in self.policy:
            if isinstance(policy, str):
                make_policy(policy, "xla")
            else:
                check_policy(policy)
        for drafter in self.drafter:
            read_drafter(drafter)
        for rule in self.rule:
            named(rule)

    def planted(self, audit: str) -> tuple[str, ...]:
        """The faults to plant that an audit must catch; none where that audit does not run."""
        if self.faults is None or audit not in FAULTS or audit not in self.chosen:
            return ()
        return tuple(name for name in FAULTS[audit] if not self.faults or name in self.faults)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The audits to run, in their order."""
        return tuple(name for name in AUDITS if not self.audits or name in self.audits)


def read_drafter(drafter: str | Drafter) -> Drafter:
    """The drafter of "drafter:tree", or of "drafter" with its own tree; objects are themselves.

    Raises:
      ValueError: an unknown drafter, setting or tree.
    """
    if not isinstance(drafter, str):
        return make_drafter(drafter)
    name, colon, tree = drafter.partition(":")
    if name.partition("@")[0] == "scripted":
        raise ValueError("drafter 'scripted' needs the answers: from Python, audit an object of it")
    return make_drafter(name, tree if colon else None)
