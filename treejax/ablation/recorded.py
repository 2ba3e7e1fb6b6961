"""Recorded requests: a JSON-lines file of prompts with their own settings.

One object a line, with exactly one of

* ``prompt``: text;
* ``messages``: a conversation, ``[{"role": ..., "content": ...}, ...]``, rendered by the model's
  own chat template;
* ``tokens``: token ids;

and perhaps ``sampling`` (``temperature`` and the other fields of ``Settings``), ``max_tokens``,
``seed`` and ``id``. Anything else is refused: a setting silently left out is another request.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from treejax.config import from_mapping
from treejax.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to draw, as for ``treejax.Sampling``; a temperature of 0 is greedy."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def sampling(self) -> Sampling:
        return Sampling(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One line of the file, as it stands there."""

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()
    sampling: Settings | None = None
    max_tokens: int | None = None
    seed: int | None = None
    id: str | None = None


def read_requests(path: str | Path) -> dict[str, tuple[int, Recorded]]:
    """Requests and the lines they stand on, by ``id``; "line N" without one.

    Raises:
      ValueError: one line that names the file and the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from None
    made: dict[str, tuple[int, Recorded]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        request = _read_line(line, where)
        name = request.id or f"line {number}"
        if name in made:
            raise ValueError(f"{where}: id {name!r} is there already, expected another")
        made[name] = number, request
    if not made:
        raise ValueError(f"{path} holds no request, expected one JSON object a line")
    return made


def prompt_of(
    request: Recorded, render: Callable[[Sequence[dict[str, str]]], str] | None
) -> str | tuple[int, ...]:
    """Text or token ids; ``render`` makes text of messages, and is needed for them alone."""
    if request.messages and render is not None:
        return render([dataclasses.asdict(message) for message in request.messages])
    return request.tokens if request.prompt is None else request.prompt


def _read_line(line: str, where: str) -> Recorded:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {type(values).__name__}, expected a JSON object")
    kinds = [name for name in ("prompt", "messages", "tokens") if name in values]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise ValueError(f"{where}: {found} given, expected one of prompt, messages, tokens")
    request = from_mapping(Recorded, values, where)
    if not values[kinds[0]]:
        raise ValueError(f"{where}: {kinds[0]} is empty, expected at least one")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise ValueError(f"{where}: max_tokens is {request.max_tokens}, expected at least 1")
    if request.seed is not None and not 0 <= request.seed < 2**32:
        raise ValueError(f"{where}: seed is {request.seed}, expected 0..{2**32 - 1}")
    if request.sampling is not None:
        try:
            request.sampling.sampling().prepared()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return request
