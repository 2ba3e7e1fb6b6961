"""Faults in what a request is handed: cuts at its budget and at its stop tokens."""

from collections.abc import Sequence

from treejax.requests import Request


def one_token_deeper(request: Request) -> int:
    """A candidate may lie one deeper than the budget allows."""
    return request.depth_limit if request.finished else request.depth_limit + 1


def one_token_too_many(request: Request, tokens: Sequence[int]) -> None:
    """The token after the budget's last is delivered if the step put it out."""
    room = request.budget - len(request.tokens)
    request.take(tokens, [0.0] * len(tokens))
    if len(tokens) > room and len(request.tokens) == request.budget:
        request.tokens.append(tokens[room])


def stops_ignored(request: Request, tokens: Sequence[int]) -> None:
    """What a step puts out behind a stop token is delivered with it."""
    before = len(request.tokens)
    request.take(tokens, [0.0] * len(tokens))
    taken = len(request.tokens) - before
    if request.finished and request.stats.finish_reason == "stop":
        request.tokens.extend(tokens[taken:])


ONE_TOO_MANY = {"limit": one_token_deeper, "deliver": one_token_too_many}
"""Both hooks of one fault: a cut that is one off."""
