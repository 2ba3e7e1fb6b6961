"""What an audited object raises is a finding about that object: a failed check which names it.

The other checks go on. Ctrl-C and the end of a time limit are no ``Exception`` and pass.
"""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

from treejax.audit.base import Check, Where

RAISED = "exceptions raised"  # the name of the check

_MACHINERY = tuple(map(str, (Path(jax.__file__).parent, Path(__file__).parent, "<frozen")))
_PYTHON = str(Path(contextlib.__file__).parent)
"""Where lines of a traceback that are not the audited object's own begin: JAX's and the audits',
and Python's own, among which packages may be installed."""


@contextlib.contextmanager
def guarded(audit: str, subject: str, where: Where, into: list[Check]) -> Iterator[None]:
    """Run what is audited: whatever it raises becomes a failed check in ``into``."""
    try:
        yield
    except Exception as error:  # a user's object may raise anything
        into.append(failed(audit, subject, where, said(error)))


def failed(audit: str, subject: str, where: Where, reason: str) -> Check:
    """The failed check of what did not run to its end; ``reason`` is one line."""
    return Check(audit, subject, RAISED, where, 1.0, 0.0, note=reason)


def said(error: BaseException) -> str:
    """An exception in one line: its type, the first line of its message, and where it was raised.

    Where is the innermost line that is neither JAX's, the audits' nor Python's own.
    """
    head, *_ = str(error).strip().splitlines() or [""]
    kind = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)]
    place = ""
    if own:
        at = own[-1]
        place = f", raised at {Path(at.filename).name}:{at.lineno} in {at.name}"
    return f"{kind}: {head}{place}" if head else f"{kind}{place}"


def _is_own(file: str) -> bool:
    python = file.startswith(_PYTHON) and "site-packages" not in file
    return not (python or file.startswith(_MACHINERY))
