"""The file of measured rows: one JSON object a line, and a first line that says what made them.

Every row is on disk before the next one is measured, so a killed run loses at most the row that it
was writing. A run goes on only with the configuration and the options it began with.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from treejax.ablation.base import GATES, NOT_RUN, RED, Cell, Row

FILE = "rows.jsonl"
_TIMES = {"s", "ms", "us"}


class RowFile:
    """``rows.jsonl`` of one run: ``rows`` are those that are there."""

    def __init__(self, path: Path, rows: list[Row]):
        self.path, self.rows = path, rows

    @classmethod
    def create(cls, folder: Path, config: str, options: dict[str, Any]) -> Self:
        """Begin a run.

        Args:
          config: the TOML's text.
          options: what else decides the numbers; JSON-able.

        Raises:
          ValueError: the folder holds a run already.
        """
        path = folder / FILE
        if path.exists() and path.stat().st_size:
            raise ValueError(f"{path} holds a run already: --resume goes on with it")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(_line(_header(config, options)), encoding="utf-8")
        return cls(path, [])

    @classmethod
    def resume(cls, folder: Path, config: str, options: dict[str, Any]) -> Self:
        """Go on with a run, or begin one if there is none. A last line cut short is dropped.

        Raises:
          ValueError: another configuration or other options, or a damaged line.
        """
        path = folder / FILE
        complete = path.read_bytes() if path.exists() else b""
        complete = complete[: complete.rfind(b"\n") + 1]
        if not complete:  # not even the first line is whole
            path.unlink(missing_ok=True)
            return cls.create(folder, config, options)
        header, *rows = _parse(complete, path)
        _check(header, _header(config, options), path)
        with path.open("r+b") as file:
            file.truncate(len(complete))
        return cls(path, rows)

    def append(self, row: Row) -> None:
        """Write one row. Numbers that are not finite become null.

        Raises:
          RuntimeError: the row breaks the rules of ``Row``.
        """
        _validate(row)
        row = json.loads(_line(_finite(row)))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        self.rows.append(row)

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those cells that have no row yet."""
        return missing(cells, self.rows)


def read_rows(folder: Path) -> list[Row]:
    """All whole rows of a run, whatever it was made with; none if there is no run."""
    path = folder / FILE
    raw = path.read_bytes() if path.exists() else b""
    return _parse(raw[: raw.rfind(b"\n") + 1], path)[1:]


def missing(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Cell]:
    """Those cells that no row belongs to."""
    there: dict[tuple[str, ...], set[Any]] = {}
    left = []
    for cell in cells:
        names = tuple(sorted(cell.key))
        if names not in there:
            there[names] = {
                (row["arm"], row["repeat"], tuple((name, row[name]) for name in names))
                for row in rows
                if all(name in row for name in names)
            }
        if cell.identity() not in there[names]:
            left.append(cell)
    return left


def is_time(name: str) -> bool:
    """Whether a measure of this name is a time or a rate."""
    return not _TIMES.isdisjoint(name.split("_"))


def _header(config: str, options: dict[str, Any]) -> dict[str, Any]:
    settings = json.dumps([config, options], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return {"config": config, "options": options, "fingerprint": digest}


def _check(found: Any, expected: dict[str, Any], path: Path) -> None:
    if not isinstance(found, dict) or set(found) != set(expected):
        raise ValueError(f"{path} is no file of rows: its first line names no configuration")
    if found["config"] != expected["config"]:
        raise ValueError(f"{path} was made with another configuration: take a new --out")
    for name, value in expected["options"].items():
        before = found["options"].get(name)
        if before != value:
            raise ValueError(
                f"{path} was made with {name} {before!r}, not {value!r}: take a new --out"
            )
    if found["fingerprint"] != expected["fingerprint"]:
        raise ValueError(f"{path} was made with other options: take a new --out")


def _parse(complete: bytes, path: Path) -> list[Any]:
    made = []
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            made.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}, line {number}: not a JSON object, cut it out") from None
    return made


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """NumPy's numbers as Python's, and null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _validate(row: Row) -> None:
    absent = [name for name in ("arm", "repeat", "gate", "problem") if name not in row]
    if absent or row["gate"] not in GATES:
        raise RuntimeError(f"a row has no {absent or 'known gate'}: {row}")
    if (row["problem"] is not None) != (row["gate"] in (RED, NOT_RUN)):
        raise RuntimeError(f"a row is {row['gate']} and its problem is {row['problem']!r}")
    timed = [name for name, value in row.items() if is_time(name) and value is not None]
    if timed and row["gate"] == RED:
        raise RuntimeError(f"a red row of {row['arm']} has {timed[0]}")
