"""How ``generate`` prints a text while it comes."""

import io

from treejax.cli import printing
from treejax.engine import Piece


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_two_tones_on_a_terminal_only(monkeypatch):
    """Accepted candidates in colour; NO_COLOR, files and dumb terminals get the bare text."""
    piece = Piece(("ab", "", "c"), (1, 2, 3), (True, True, False))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def shown(out):
        printer = printing.TextPrinter(out)
        printer.show(piece)
        printer.close()
        return out.getvalue()

    assert shown(Terminal()) == "\x1b[32mab\x1b[0mc\n"
    assert shown(io.StringIO()) == "abc"
    monkeypatch.setenv("TERM", "dumb")
    assert shown(Terminal()) == "abc\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == "abc\n"
