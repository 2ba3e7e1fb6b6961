"""Exit statuses and the one line that a user's mistake costs.

0 done, 1 a check failed, 2 a mistake of the user, 130 interrupted, by Ctrl-C or SIGTERM (a
scheduler's or ``timeout``'s): both end a command alike, with what it has. Commands write nothing of
Python's own to stderr: no traceback for a mistake, no warning with a source line.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

MISTAKE, INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"{self.prog}: {message}; --help lists the options\n")


def run_command(
    name: str, command: Callable[[Sequence[str]], int], arguments: Sequence[str]
) -> int:
    """The exit status of ``command(arguments)``; mistakes and lost readers are dealt with here.

    A ``ValueError`` or ``OSError`` of one line is a mistake: by the project's rule those are ours
    or the system's. One of several lines comes from inside a library and keeps its traceback.
    """
    # Read when the first triangular solve of a CPU loads its library, whose threads would wait for
    # each other by spinning: on busy cores 50 ms for a solve that takes a tenth of one.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    def show(message: Warning | str, *_: object) -> None:
        say(name, str(message))

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]
            with _terminated_is_interrupted():
                status = command(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_output()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if "\n" in str(error):
            raise
        say(name, _one_line(error))
        return MISTAKE


@contextlib.contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM raises what Ctrl-C raises; only a main thread can say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def say(name: str, message: str) -> None:
    """One line to stderr."""
    sys.stderr.write(f"{name}: {message}\n")


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _discard_output() -> None:
    """Nobody reads any more: what Python flushes at exit must not raise again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
