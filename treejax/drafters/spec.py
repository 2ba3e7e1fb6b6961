"""Settings of a drafter as text: ``mtp@draws=coupled``, ``mtp_tree@form=marginal,beam=8``."""

import dataclasses
from typing import Any, get_args

_SIMPLE = (bool, int, float, str)  # in the order in which a text is tried
_BOOLEANS = {"true": True, "false": False}


def read_spec(text: str) -> tuple[str, dict[str, str]]:
    """The name and the settings of "name" or "name@key=value,key=value".

    Raises:
      ValueError: one line: text of another form.
    """
    name, separator, rest = text.partition("@")
    settings = {}
    for item in rest.split(",") if separator else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise ValueError(
                f"drafter {text!r}: setting {item!r} is malformed, expected NAME@key=value,..."
            )
        settings[key] = value
    return name.strip(), settings


def convert(kind: Any, text: str, settings: dict[str, str]) -> dict[str, Any]:
    """The settings as values of the fields of dataclass ``kind``; its tree is not among them.

    Only numbers, truth values and texts can be written as text.

    Raises:
      ValueError: one line: an unknown setting, or a value of another type.
    """
    kinds = {}
    for field in dataclasses.fields(kind):
        simple = [each for each in _SIMPLE if each in (get_args(field.type) or (field.type,))]
        if simple and field.name != "tree":
            kinds[field.name] = simple
    made = {}
    for key, value in settings.items():
        if key not in kinds:
            known = ", ".join(kinds) or "none"
            raise ValueError(f"drafter {text!r}: setting {key!r} is unknown, expected of: {known}")
        made[key] = _convert(text, key, value, kinds[key])
    return made


def _convert(text: str, key: str, value: str, kinds: list[type]) -> Any:
    for kind in kinds:
        try:
            return _BOOLEANS[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            continue
    expected = " or ".join(kind.__name__ for kind in kinds)
    raise ValueError(f"drafter {text!r}: {key} is {value!r}, expected a value of type {expected}")


def spec_of(drafter: Any) -> str:
    """A drafter's name, and after it those of its settings that ``convert`` reads and that are not
    the defaults."""
    changed = [
        f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"
        for field in dataclasses.fields(drafter)
        if field.name != "tree"
        and isinstance(value := getattr(drafter, field.name), _SIMPLE)
        and value != field.default
    ]
    return drafter.name + ("@" + ",".join(changed) if changed else "")
