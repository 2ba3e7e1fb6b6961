"""Settings of a drafter as text: ``mtp@draws=coupled``, ``mtp_tree@form=marginal,beam=8``."""

import dataclasses
from typing import Any

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

    Only fields whose default is a number, a truth value or a text can be written as text.

    Raises:
      ValueError: one line: an unknown setting, or a value of another type.
    """
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.name != "tree" and isinstance(field.default, bool | int | float | str)
    }
    made = {}
    for key, value in settings.items():
        if key not in defaults:
            known = ", ".join(defaults) or "none"
            raise ValueError(f"drafter {text!r}: setting {key!r} is unknown, expected of: {known}")
        try:
            made[key] = _convert(value, type(defaults[key]))
        except (KeyError, ValueError):
            expected = type(defaults[key]).__name__
            raise ValueError(
                f"drafter {text!r}: {key} is {value!r}, expected a value of type {expected}"
            ) from None
    return made


def _convert(value: str, kind: type) -> Any:
    return _BOOLEANS[value.lower()] if kind is bool else kind(value)
