"""Prompts cut from packages that a model was not trained on, read where they are.

A TOML file names passages by path, byte offset, length and SHA-256. Their text is never part of
this repository: it comes from a wheel, or from a package that is installed.
"""

import dataclasses
import hashlib
import importlib.metadata
import zipfile
from pathlib import Path
from typing import Protocol

from treejax.config import from_mapping, read_toml


@dataclasses.dataclass(frozen=True)
class Passage:
    path: str
    offset: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Passages:
    """Attributes: ``source`` is "wheel" or "installed"."""

    package: str
    version: str
    source: str
    passages: tuple[Passage, ...]


class Reader(Protocol):
    """What gives the bytes of a file inside a package."""

    def __call__(self, path: str, /) -> bytes: ...


def read_passages(config: str | Path, wheel: str | Path | None) -> dict[str, str]:
    """Texts of all passages of a TOML file by ``path@offset``.

    Raises:
      ValueError: one line: the package, its version or a passage is not what the file says.
    """
    wanted = from_mapping(Passages, read_toml(config), str(config))
    if wanted.source == "wheel":
        if wheel is None:
            raise ValueError(
                f"{config} needs --wheel FILE, a wheel of {wanted.package} {wanted.version} "
                f"(pip download --no-deps {wanted.package}=={wanted.version})"
            )
        archive = open_wheel(wheel, wanted.package, wanted.version)
        reader: Reader = archive.read
    elif wanted.source == "installed":
        if wheel is not None:
            raise ValueError(f"{config} reads the installed {wanted.package}: leave out --wheel")
        reader = installed_reader(wanted.package, wanted.version)
    else:
        raise ValueError(f"{config}: source is {wanted.source!r}, expected wheel or installed")
    if not wanted.passages:
        raise ValueError(f"{config} names no passages, expected at least one")
    return {f"{p.path}@{p.offset}": _cut(p, reader, str(config)) for p in wanted.passages}


def open_wheel(wheel: str | Path, package: str, version: str) -> zipfile.ZipFile:
    """The wheel of exactly this package and version."""
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel} is not a readable wheel: {error}") from None
    if f"{package}-{version}.dist-info/METADATA" not in archive.namelist():
        raise ValueError(f"{wheel} is not a wheel of {package} {version}")
    return archive


def installed_reader(package: str, version: str) -> Reader:
    """Reads from an installed distribution of exactly this version."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{package} is not installed: pip install {package}=={version}") from None
    if distribution.version != version:
        raise ValueError(f"{package} {distribution.version} is installed, expected {version}")
    return lambda path: Path(str(distribution.locate_file(path))).read_bytes()


def _cut(passage: Passage, read: Reader, config: str) -> str:
    try:
        raw = read(passage.path)
    except (KeyError, OSError):
        raise ValueError(f"{config}: the package has no file {passage.path!r}") from None
    raw = raw[passage.offset : passage.offset + passage.bytes]
    if hashlib.sha256(raw).hexdigest() != passage.sha256:
        raise ValueError(
            f"{config}: {passage.path} at {passage.offset} is not the passage whose SHA-256 it says"
        )
    return raw.decode()
