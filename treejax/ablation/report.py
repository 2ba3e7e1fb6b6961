"""What a run leaves beside its rows: the environment, and the summary as CSV and JSON."""

import csv
import datetime
import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from treejax.ablation.base import RED, Row
from treejax.cli.versions import installed_version

_PACKAGE = Path(__file__).parent.parent


def made_with() -> dict[str, Any]:
    """What must stay the same while a run's rows are measured: rows of two are never pooled."""
    return {
        "commit": _checkout()[0],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def environment(config: str, seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """What the numbers were made with.

    ``commit`` and ``dirty`` are those of the checkout that treejax runs from, None outside one.
    """
    commit, dirty = _checkout()
    devices = jax.devices()
    return {
        "commit": commit,
        "dirty": dirty,
        "device": f"{devices[0].platform}: {devices[0].device_kind}",
        "devices": len(devices),
        "treejax": installed_version("treejax"),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "arguments": list(arguments),
        "config": config,
    }


def write_summary(folder: Path, environment: dict[str, Any], records: Sequence[Row]) -> None:
    """``summary.csv`` and ``summary.json``."""
    names = list(dict.fromkeys(name for record in records for name in record))
    with (folder / "summary.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(records)
    whole = {"environment": environment, "rows": list(records)}
    (folder / "summary.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def problems(rows: Sequence[Row]) -> list[str]:
    """One line for every red row."""
    return [f"{_place(row)}: {row['problem']}" for row in rows if row["gate"] == RED]


def _place(row: Row) -> str:
    """Arm, key and repeat of a row: all that stands before its gate."""
    names = list(row)[: list(row).index("gate")]
    return ", ".join(str(row[n]) if n != "repeat" else f"repeat {row[n]}" for n in names)


def _checkout() -> tuple[str | None, bool | None]:
    """Commit and dirty flag, if git has the package under version control."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        return _git("rev-parse", "HEAD").strip(), bool(_git("status", "--porcelain").strip())
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout
