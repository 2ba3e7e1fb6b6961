"""Tokens to text while they arrive: whole characters only, and stop strings across tokens.

Text is released as soon as nothing that may follow can change it: incomplete UTF-8 and the
beginning of a possible stop string are held back.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Decode one sequence token by token.

    Args:
      tokenizer: a ``tokenizers.Tokenizer``, or None, in which case all text is empty.
      stops: strings that end the text; neither they nor what follows is released.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._decoder = DecodeStream(skip_special_tokens=True) if tokenizer else None
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that becomes certain with this token; ``stopped`` tells whether a stop came."""
        if self._decoder is None:
            return ""
        self._held += self._decoder.step(self._tokenizer, token) or ""
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        return text

    def flush(self) -> str:
        """What was held back for a stop string that never came."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ends ``text``."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
