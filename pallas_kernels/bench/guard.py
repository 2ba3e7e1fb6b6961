"""Exit statuses and the one line that a user's mistake costs.

0 done, 1 a gate was red, 2 a mistake of the user, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

NAME = "pallas_kernels.bench"
RED, MISTAKE, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"{self.prog}: {message}; --help lists the options\n")


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """The exit status of ``command(arguments)``.

    A ``ValueError`` or ``OSError`` of one line is a mistake of the user. One of several lines comes
    from inside a library and keeps its traceback.
    """
    try:
        return command(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if "\n" in str(error):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            say(f"{error.filename}: {error.strerror}")
        else:
            say(str(error))
        return MISTAKE


def say(message: str) -> None:
    """One line to stderr."""
    sys.stderr.write(f"{NAME}: {message}\n")


def one_line(error: BaseException) -> str:
    """The type and the first line of an error, for libraries whose messages run on."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
