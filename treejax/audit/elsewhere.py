"""A user's objects in a fresh process: what can go there, and one clear line where it cannot.

A fresh process makes an object again by importing the module that defines its class. A notebook or
a script is ``__main__``, which nobody can import; a module with code at its top level runs it once
more when it is imported.
"""

import io
import os
import pickle
import sys
from typing import Any

from treejax.audit.raised import said

_FRESH = "TREEJAX_AUDIT_FRESH"  # set in the environment of fresh processes

_GUARD = 'put what it runs below `if __name__ == "__main__":`'


class Unmade(Exception):
    """An object could not be made again; one line."""


def environment() -> dict[str, str]:
    """Of a fresh process: it imports from where this one does, and takes no more of a GPU's memory
    than it needs, as this one may hold most of it."""
    path = os.pathsep.join(filter(None, sys.path))
    return os.environ | {
        "PYTHONPATH": path,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        _FRESH: "1",
    }


def refuse_inside() -> None:
    """Refuse to audit in an audit's fresh process: it would start one of its own, and so on.

    Raises:
      RuntimeError: one line.
    """
    if _FRESH in os.environ:
        raise RuntimeError(
            "an audit was started where an audit's fresh process imports a module, expected "
            f"definitions alone: {_GUARD}"
        )


def why_it_stays(thing: Any) -> str | None:
    """Why no fresh process can make an object again, in one line; None where it can."""
    try:
        packed = _packed(thing)
        again = pickle.loads(packed)
        same = again == thing or _packed(again) == packed
    except Unmade as unmade:
        return str(unmade)
    except Exception as error:  # whatever its class does when it is pickled, it does not travel
        return f"it cannot be pickled ({said(error)})"
    return None if same else "what it is after pickling differs from what it was before"


class _Packer(pickle.Pickler):
    """Refuses what is defined in ``__main__``, wherever it hangs on an object."""

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__":
            name = getattr(obj, "__qualname__", type(obj).__qualname__)
            raise Unmade(f"{name} is defined in __main__, which a fresh process cannot import")
        return NotImplemented


def _packed(thing: Any) -> bytes:
    file = io.BytesIO()
    _Packer(file).dump(thing)
    return file.getvalue()


def make_again(packed: bytes) -> Any:
    """The object that was pickled, in a fresh process.

    Raises:
      Unmade: one line: what went wrong in the module that defines it, what was expected, what to
        do.
    """
    try:
        return pickle.loads(packed)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported
        head = f"a fresh process could not import what defines it: {said(error)}"
        if isinstance(error, ModuleNotFoundError):
            raise Unmade(
                f"{head}; expected a module that Python finds: install it, or put its folder on "
                "PYTHONPATH"
            ) from None
        raise Unmade(
            f"{head}; expected a module that only defines things when it is imported: {_GUARD}"
        ) from None


def ended(code: int, error: str) -> str:
    """What became of a fresh process that ended without an answer; ``error``: its stderr."""
    last = (error.strip().splitlines() or ["nothing"])[-1]
    head = f"a fresh process ended without an answer (status {code}, last words: {last})"
    if code < 0:  # a signal, most often for want of memory
        return f"{head}; expected nobody to end it: see that memory suffices for two processes"
    return f"{head}; expected a module that only defines things when it is imported: {_GUARD}"
