"""Requests: the host's side of a generation, with exact budgets and stops.

The device proposes what a step emits; a ``Request`` takes no more of it than was asked for. It ends
at the first stop token or stop string, or when its budget is used up, in the order of the tokens.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from treejax.stats import Stats
from treejax.steps.together import Emission
from treejax.text import TextStream


class Piece(NamedTuple):
    """What ``stream`` yields: the tokens of a step, and the text that became certain with each.

    Attributes:
      texts: per token; empty while a character or a possible stop string is incomplete.
      tokens: the step's tokens.
      drafted: per token, whether a drafter had proposed it.
    """

    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Request:
    """One prompt and what has been generated for it.

    Args:
      prompt: token ids, at least one.
      budget: tokens to deliver at most, the model's context already taken into account.
      stop_ids: tokens that end the text; they are delivered as tokens, not as text.
      text: decodes what is delivered.
    """

    def __init__(self, prompt: list[int], budget: int, stop_ids: set[int], text: TextStream):
        self.prompt = prompt
        self.budget = budget
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.stats = Stats(finish_reason="interrupted" if budget else "length")
        self.stop_ids = stop_ids
        self._decoder = text

    @property
    def finished(self) -> bool:
        return self.stats.finish_reason != "interrupted"

    @property
    def watched(self) -> bool:
        """Whether a stop string may end it, which the device cannot see."""
        return self._decoder.watches

    @property
    def left(self) -> int:
        """Tokens that may still be delivered; 0 once finished."""
        return 0 if self.finished else self.budget - len(self.tokens)

    @property
    def depth_limit(self) -> int:
        """How deep a candidate may lie so that its step fits the budget; -1 once finished."""
        return self.left - 1

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[str, ...]:
        """Deliver what a step emitted, as far as it goes: the text set free by each token taken."""
        texts: list[str] = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.stats.tokens += 1
            stopped = token in self.stop_ids
            freed = "" if stopped else self._decoder.push(token)
            if stopped or self._decoder.stopped:
                self.stats.finish_reason = "stop"
            elif len(self.tokens) == self.budget:
                self.stats.finish_reason = "length"
            if self.finished:
                freed += self._decoder.flush()
            texts.append(freed)
            self.text += freed
            if self.finished:
                break
        return tuple(texts)

    def follow(self, emission: Emission, step: int, row: int) -> Piece:
        """Take this sequence's share of a visit's step, and count it.

        A step that the device made after the text had ended, which it could not know of a stop
        string, counts as wasted and gives nothing.
        """
        count = int(emission.count[step, row])
        if self.finished:
            self.stats.wasted_steps += count > 0
            return Piece((), (), ())
        tokens = emission.tokens[step, row, :count].tolist()
        texts = self.take(tokens, emission.logprobs[step, row, :count].tolist())
        taken = len(texts)
        self.stats.count_step(int(emission.proposed[step, row]), min(taken, count - 1))
        return Piece(texts, tuple(tokens[:taken]), tuple(i < count - 1 for i in range(taken)))


type Stop = Sequence[str | int] | str | int | None
"""What ends a text beside the model's own end tokens: strings and token ids, several or one."""


def several(prompts: Any) -> tuple[Sequence[Any], bool]:
    """Prompts as a sequence of them, and whether there was one by itself.

    Raises:
      ValueError: neither a string, nor token ids, nor a list of either.
    """
    if isinstance(prompts, str):
        return [prompts], True
    try:
        first = prompts[0] if len(prompts) else ()
        if isinstance(prompts, bytes):  # whose items are integers, and no tokens
            raise TypeError
    except (TypeError, LookupError):
        raise ValueError(
            f"prompts are of type {type(prompts).__name__}, expected a string, a list of token "
            "ids, or a list of either"
        ) from None
    if isinstance(first, Sequence) or getattr(first, "ndim", 0):  # texts are sequences too
        return prompts, False
    return [prompts], True


def make_requests(model: Any, prompts: Sequence[Any], max_tokens: int, stop: Stop) -> list[Request]:
    """Validate and tokenise prompts; nothing is added to them.

    Raises:
      ValueError: one line saying which prompt or setting is wrong.
    """
    stop = _several_stops(stop)
    whole = isinstance(max_tokens, Integral) and not isinstance(max_tokens, bool)
    if not whole or max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens!r}, expected an integer of 0 or more")
    max_tokens = int(max_tokens)
    if len(prompts) == 0:
        raise ValueError("no prompt was given, expected at least one")
    stop_texts = [item for item in stop if isinstance(item, str)]
    if "" in stop_texts:
        raise ValueError("a stop string is empty, expected at least one character")
    if stop_texts and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none: use token ids")
    given = [item for item in stop if not isinstance(item, str)]
    size = model.config.vocab_size
    for item in given:
        if not isinstance(item, Integral) or isinstance(item, bool) or not 0 <= int(item) < size:
            raise ValueError(f"stop holds {item!r}, expected strings or token ids in 0..{size - 1}")
    stop_ids = set(model.config.eos_token_ids) | {int(item) for item in given}
    context = model.config.max_position_embeddings
    requests = []
    for index, prompt in enumerate(prompts):
        ids = _token_ids(model, prompt, index)
        if len(ids) >= context:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens and the model's context is {context}; "
                "shorten it"
            )
        budget = min(max_tokens, context - len(ids))
        requests.append(Request(ids, budget, stop_ids, TextStream(model.tokenizer, stop_texts)))
    return requests


def _token_ids(model: Any, prompt: Any, index: int) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(
                f"prompt {index} is text and the model has no tokenizer: pass token ids"
            )
        ids = model.tokenizer.encode(prompt, add_special_tokens=False).ids
    else:
        ids = _integers(prompt, index)
    if not ids:
        raise ValueError(f"prompt {index} is empty, expected at least one token")
    wrong = [token for token in ids if not 0 <= token < model.config.vocab_size]
    if wrong:
        bound = model.config.vocab_size - 1
        raise ValueError(f"prompt {index} holds token {wrong[0]}, expected 0..{bound}")
    return ids


def _integers(prompt: Any, index: int) -> list[int]:
    """Token ids as a list; numbers that are no integers are refused, not cut."""
    try:
        tokens = np.asarray(prompt)
    except ValueError:  # rows of different lengths
        tokens = np.empty((1, 1))
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        what = f"an array of shape {tokens.shape}" if tokens.ndim > 1 else repr(prompt)
        raise ValueError(f"prompt {index} is {what}, expected text or a list of token ids")
    return [int(token) for token in tokens]


def _several_stops(stop: Any) -> list[Any]:
    """Stops as a list, from several, one, or None."""
    if stop is None:
        return []
    if isinstance(stop, str | Integral):
        return [stop]
    if isinstance(stop, bytes) or not isinstance(stop, Iterable):
        raise ValueError(f"stop is {stop!r}, expected strings or token ids, several or one")
    return list(stop)
