"""Read the Python modules of a package from its wheel, without installing it.

Invariant: what is read is every ``.py`` file outside directories called ``tests`` or ``test`` and
outside ``conftest.py``, in sorted order of the path, decoded as UTF-8 (a file that is not UTF-8
is left out).
"""

import zipfile
from pathlib import Path, PurePosixPath


def is_test(path: str) -> bool:
    """Whether a path inside a package is a test module."""
    parts = PurePosixPath(path).parts
    return "tests" in parts[:-1] or "test" in parts[:-1] or parts[-1] == "conftest.py"


def read_modules(wheel: str | Path) -> dict[str, str]:
    """Text of every non-test module in ``wheel``, by its path there."""
    try:
        archive = zipfile.ZipFile(wheel)
    except FileNotFoundError:
        raise ValueError(f"no such wheel: {wheel}") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel} is not a wheel: {error}") from None
    texts = {}
    with archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and not is_test(name):
                try:
                    texts[name] = archive.read(name).decode("utf-8")
                except UnicodeDecodeError:
                    continue
    if not any(texts.values()):
        raise ValueError(f"{wheel} holds no Python source: expected a wheel of a Python package")
    return texts
