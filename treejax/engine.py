"""The public way in: continue one prompt or several, at once or piece by piece."""

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from treejax.loop import run
from treejax.model import Model, check_model
from treejax.policies import Policy
from treejax.requests import Piece, Request, Stop, make_requests, several
from treejax.sampling import Sampling
from treejax.stats import Stats
from treejax.steps.rules.base import Rule

DEFAULT_POLICY = "auto"


@dataclasses.dataclass(frozen=True)
class Generation:
    """A finished text.

    Attributes:
      text: the continuation, without prompt and stop string; empty without a tokenizer.
      tokens: the continuation's token ids, a stop token included.
      stats: figures; see ``treejax.stats``.
      finish_reason: "stop" or "length"; "interrupted" if the loop was left early.
      logprobs: a log-probability a token under the unprocessed model, or None if not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    finish_reason: str
    logprobs: tuple[float, ...] | None


def complete(
    model: Model,
    prompts: Any,
    *,
    max_tokens: int = 64,
    policy: str | Policy = DEFAULT_POLICY,
    implementation: str = "auto",
    drafter: Any = "auto",
    tree: Any = None,
    sampling: Sampling | None = None,
    rule: str | Rule = "match",
    seed: int | Sequence[int] = 0,
    stop: Stop = (),
    logprobs: bool = False,
    steps_per_visit: int | str = "auto",
) -> Any:
    """Continue one prompt or several.

    Args:
      model: from ``load_model``.
      prompts: a string, a list of token ids, or a list of either.
      max_tokens: tokens to generate at most; prompt and text stay within the model's context.
      policy: state policy, a name of ``treejax.policies.REGISTRY`` or an object; "auto" is the
        one that ``choose_policy`` finds in its table of measurements.
      implementation: "auto" is the policy's kernels where they can run, and plain JAX elsewhere;
        "xla" is plain JAX; "mosaic_gpu" the kernels, or an error. A policy object has its own.
      drafter: a name of ``treejax.drafters.REGISTRY`` or an object; None decodes plainly; "auto"
        is the default one, or "suffix" for a model without an MTP head.
      tree: the shape the drafter fills ("hydra27", "chain5", ...); None for its own default.
      sampling: how to draw; greedy by default.
      rule: which candidates are accepted, a name of ``treejax.steps.rules.REGISTRY`` or an object;
        "match" emits plain decoding's own stream, the others its distribution or, if they are
        lossy, another one, which the statistics say.
      seed: one for all prompts (a stream is the same alone and in a batch), or one a prompt.
      stop: strings that end a text, and token ids beside the model's own end tokens; several, or
        one by itself.
      logprobs: report the model's log-probability of every token.
      steps_per_visit: steps that the device makes between two visits of the host, 1 to 32 (vLLM's
        ``num_scheduler_steps``), or "auto": as many as fit into 1/25 s, and 1 with stop strings or
        for a drafter that chooses its tree step by step; the statistics say how many. The text is
        the same. After a stop string the device runs on to the end of the next visit at most; what
        it does for nothing is counted as ``wasted_steps``.

    Returns:
      A ``Generation``, or a list of them if ``prompts`` is a list of prompts.

    Raises:
      ValueError: one line, before anything is compiled: an argument that cannot be.
    """
    check_model(model)
    prompts, single = several(prompts)
    requests = make_requests(model, prompts, max_tokens, stop)
    how = (policy, drafter, tree, sampling, seed)
    served = run(
        *(model, requests, *how, logprobs),
        implementation=implementation,
        rule=rule,
        steps_per_visit=steps_per_visit,
    )
    for _ in served:
        pass
    results = [_result(request, logprobs) for request in requests]
    return results[0] if single else results


def stream(
    model: Model,
    prompt: Any,
    *,
    max_tokens: int = 64,
    policy: str | Policy = DEFAULT_POLICY,
    implementation: str = "auto",
    drafter: Any = "auto",
    tree: Any = None,
    sampling: Sampling | None = None,
    rule: str | Rule = "match",
    seed: int = 0,
    stop: Stop = (),
    steps_per_visit: int | str = "auto",
) -> Generator[Piece, None, Generation]:
    """Continue one prompt and yield a ``Piece`` a step; arguments as for ``complete``.

    The generator's return value (``yield from``, ``StopIteration.value``) is the ``Generation``.

    Raises:
      ValueError: one line, at the call: an argument that cannot be.
    """
    check_model(model)
    (request,) = make_requests(model, [prompt], max_tokens, stop)
    how = (policy, drafter, tree, sampling, seed)
    served = run(
        *(model, [request], *how),
        implementation=implementation,
        rule=rule,
        steps_per_visit=steps_per_visit,
    )
    return _pieces(request, served)


def _pieces(request: Request, served: Iterator[list[Piece]]) -> Generator[Piece, None, Generation]:
    for (piece,) in served:
        yield piece
    return _result(request, False)


def _result(request: Request, logprobs: bool) -> Generation:
    return Generation(
        text=request.text,
        tokens=tuple(request.tokens),
        stats=request.stats,
        finish_reason=request.stats.finish_reason,
        logprobs=tuple(request.logprobs) if logprobs else None,
    )
