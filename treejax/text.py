"""Tokens to text while they arrive: whole characters only, and stop strings across tokens.

Text is released as soon as nothing that may follow can change it: incomplete UTF-8 and the
beginning of a possible stop string are held back. Without a stop, all that is released is what
decoding all tokens at once gives.
"""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decode one sequence token by token.

    Args:
      tokenizer: a ``tokenizers.Tokenizer``, or None, in which case all text is empty.
      stops: strings that end the text; neither they nor what follows is released.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []  # the last whole characters' and those after them
        self._whole = 0  # how many of these tokens are whole characters
        self._held = ""
        self.stopped = False

    @property
    def watches(self) -> bool:
        """Whether there are strings that may end the text, which its tokens alone do not tell."""
        return bool(self._stops)

    def push(self, token: int) -> str:
        """Text that becomes certain with this token; ``stopped`` tells whether a stop came."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens.append(token)
        text = self._new_text()
        if not text.endswith(_INCOMPLETE):
            self._keep(text)
        return self._release()

    def flush(self) -> str:
        """What was held back for a character or a stop string that never came."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._keep(self._new_text())
        text = self._release()
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _new_text(self) -> str:
        """Text of the tokens that are not yet whole, decoded behind those that are.

        A decoder may treat the first token of a text differently, hence the context.
        """
        context = self._decode(self._tokens[: self._whole])
        return self._decode(self._tokens)[len(context) :]

    def _keep(self, text: str) -> None:
        """``text`` is certain: the tokens behind it become the context of what follows."""
        self._held += text
        if text:
            self._tokens = self._tokens[self._whole :]
        self._whole = len(self._tokens)

    def _release(self) -> str:
        """The part of the held text that cannot belong to a stop string."""
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ends ``text``."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
