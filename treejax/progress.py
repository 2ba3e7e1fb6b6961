"""How long work says how far it is; a command shows it as a bar, a library call stays silent."""

from typing import Protocol


class Advance(Protocol):
    """Says how far the work is: ``done`` of ``total``, in any unit."""

    def __call__(self, description: str, done: int, total: int, /) -> None: ...


def silent(description: str, done: int, total: int, /) -> None:
    """Progress that nobody asked to see."""
