"""Arms of the laboratory: a policy of the registry, with settings of its own if wanted.

``wy`` is a policy with its defaults; ``wy:precision=tf32``, ``ring:length=8,rows=64`` set fields.
"""

import dataclasses
from typing import Any

from treejax.policies import REGISTRY, Policy, make_policy


def make_arm(text: str, implementation: str, dtype: str) -> Policy:
    """The policy that an arm names, on a resolved implementation.

    A policy that stores keys is told the operands' dtype, unless the arm says it.

    Raises:
      ValueError: an unknown policy or setting, or a value that its field does not take.
    """
    name, _, rest = text.partition(":")
    policy: Any = make_policy(name, implementation)
    fields = {f.name: f for f in dataclasses.fields(policy) if f.name != "implementation"}
    settings = {}
    for item in rest.split(",") if rest else ():
        key, separator, value = item.partition("=")
        if key not in fields or not separator:
            known = ", ".join(fields) or "none"
            raise ValueError(
                f"arm {text!r}: setting {item!r} is unknown, expected key=value of: {known}"
            )
        settings[key] = _convert(text, key, value, getattr(policy, key))
    if "keys" in fields and implementation != "xla":
        settings.setdefault("keys", dtype)
    return dataclasses.replace(policy, **settings)


def check_arms(arms: tuple[str, ...], where: str) -> None:
    """Refuse a policy that nobody has, before anything runs."""
    for arm in arms:
        name = arm.partition(":")[0]
        if name not in REGISTRY:
            known = ", ".join(REGISTRY)
            raise ValueError(
                f"{where}: arm {arm!r} names policy {name!r}, expected one of: {known}"
            )


def _convert(arm: str, key: str, value: str, default: Any) -> Any:
    if isinstance(default, int):
        if not value.isdigit():
            raise ValueError(f"arm {arm!r}: {key} is {value!r}, expected a number")
        return int(value)
    return value
