"""Which treejax made something."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str | None:
    """None for a package that is imported from a folder and not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
