"""The loop: propose, verify, select, publish, until every sequence has what it asked for.

``steps.together.step`` is those four in one compiled program. Around it the host only carries out
what needs a host: exact budgets, stop tokens, text. Plain decoding is the same step with a drafter
that proposes nothing.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax.drafters import Drafter, make_drafter
from treejax.drafters.spec import spec_of
from treejax.history import History, begin
from treejax.model import Model, check_prompt, prompt_blocks
from treejax.policies import Policy, kernel_problem, make_policy
from treejax.policies.choose import choose_policy
from treejax.requests import Request
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.state import State, init_state, state_bytes, with_policy
from treejax.stats import Stats
from treejax.steps.prompt import PROMPT_POLICY, Intake, adopt, first_token
from treejax.steps.rules import rule_for
from treejax.steps.rules.base import Rule
from treejax.steps.together import Carry, Emission, step

_log = logging.getLogger(__name__)

CACHE_ROWS = 256
"""States are allocated in multiples of this, so that nearby lengths share compiled programs."""

DEFAULT_DRAFTER, DEFAULT_TREE = "mtp+suffix", "hydra8"
"""What drafts unless asked otherwise, where the model has an MTP head; "suffix" elsewhere."""


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


def run(
    model: Model,
    requests: list[Request],
    policy: str | Policy,
    drafter: Any,
    tree: Any,
    sampling: Sampling | None,
    seed: int | Sequence[int],
    logprobs: bool = False,
    warm_up: bool = False,
    implementation: str = "auto",
    max_length: int | None = None,
    rule: str | Rule = "match",
) -> Generator[list[Piece], None, State | None]:
    """Serve requests of one batch to their end, and yield a list of pieces a step, one a request.

    All programs are compiled before the first token is computed; no step compiles afterwards. The
    return value is the state after the last step, which holds every token but the pending ones; it
    is None if nothing was asked for. ``warm_up`` also runs the programs once before, without
    effect: the first run of a program is slow, and would count as decoding in a new process.
    ``max_length`` is how many tokens the state has room for: calls that share it share programs;
    None takes as few steps of ``CACHE_ROWS`` as these requests need.

    Raises:
      ValueError: one line: a setting, or a ``max_length`` that is too small.
    """
    settings = jax.device_put(settle(model, requests, sampling))
    drafter = choose_drafter(model, drafter, tree)
    forms = drafter.forms
    rules = [rule_for(rule, form.proposals, form.shape) for form in forms]
    if isinstance(policy, str) and policy == "auto":
        pick = choose_policy(model.config, len(requests), drafter.capacity, implementation)
        policy = pick.policy
        _log.info("policy %s: %s", *pick)
    unsupported = kernel_problem(model.config, drafter.capacity)
    policy = make_policy(policy, implementation, unsupported)
    keys = _keys(seed, len(requests))
    prompts = [request.prompt for request in requests]
    rows = max(len(r.prompt) + r.budget for r in requests)
    if max_length is None:
        max_length = state_rows(model, rows)
    if max_length < rows:
        raise ValueError(f"max_length is {max_length}, expected at least the {rows} tokens asked")
    draft = drafter.init(model, len(requests), max_length)
    for request in requests:
        _name(request.stats, policy, drafter, rules[-1])
    if all(request.finished for request in requests):
        return None

    config, params, weights = model.config, model.params, draft.weights
    state = init_state(config, len(requests), max_length, model.dtype, PROMPT_POLICY)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    check_prompt(config, state, tokens, lengths)
    blocks = list(prompt_blocks(tokens, lengths))
    history = _histories(tokens, lengths, config.vocab_size, settings)
    nobody = np.full(len(requests), -1, np.int32)
    want = np.bool_(logprobs)
    rest = keys, settings, want
    fixed = [(config, *pair, params, weights) for pair in zip(forms, rules, strict=True)]

    started = time.perf_counter()
    intake = Intake(config, params, forms[0], weights)  # any form takes in the prompt
    logits = jnp.zeros((len(requests), config.vocab_size), jnp.float32)
    taken = state, draft.memory, logits
    carry = jax.eval_shape(
        lambda state: Carry(with_policy(state, policy), draft.memory, state.length, history), state
    )
    jobs = [*intake.programs(taken, blocks), lambda: adopt.lower(state, policy)]
    jobs += [lambda form=form: step.lower(*form, carry, nobody, *rest) for form in fixed]
    _compile(jobs)
    if warm_up:  # prompts of no tokens
        taken = jax.block_until_ready(intake(taken, [(b, np.zeros_like(n)) for b, n in blocks]))
    first_token(taken[-1], settings, keys, taken[0].length, history, want)
    compiled = time.perf_counter()

    state, memory, logits = intake(taken, blocks)
    pending, logprob = first_token(logits, settings, keys, state.length, history, want)
    carry = Carry(adopt(state, policy), memory, pending, history)
    firsts, logprob = jax.device_get((pending, logprob))
    ready = time.perf_counter()
    if warm_up:  # steps that no sequence takes part in
        for form in fixed:
            carry, _ = step(*form, carry, nobody, *rest)
        carry = jax.block_until_ready(carry)
    warmed = time.perf_counter()
    scratch = sum(policy.buffers(config, drafter.capacity, len(requests)).values())
    durable = state_bytes(carry.state)
    pieces = []
    for request, token, value in zip(requests, firsts.tolist(), logprob.tolist(), strict=True):
        request.stats.compile_s = compiled - started + warmed - ready
        request.stats.prefill_s = ready - compiled
        request.stats.state_bytes = durable
        request.stats.scratch_bytes = scratch
        pieces.append(Piece(request.take([token], [value]), (token,), (False,)))
    yield pieces

    pace, depths = drafter.pace(settings), [form.max_depth for form in forms]
    while not all(request.finished for request in requests):
        started, limits, form = time.perf_counter(), _limits(requests), pace.choose()
        carry, emission = step(*fixed[form], carry, limits, *rest)
        emission = jax.device_get(emission)
        seconds = time.perf_counter() - started
        part = limits >= 0
        if limits[part].min() >= depths[form]:  # a tree cut short tells nothing
            pace.record(form, seconds, float((emission.count - 1)[part].mean()))
        yield [_deliver(r, emission, row, seconds) for row, r in enumerate(requests)]
    for request in requests:
        drafter.learn(request.tokens)
    return carry.state


def settle(model: Model, requests: Sequence[Request], sampling: Sampling | None) -> Sampling:
    """The settings as the steps take them; what may not come too early is what ends a request."""
    sampling = Sampling() if sampling is None else sampling
    if sampling.min_tokens is not None and sampling.end_tokens is None:
        ends = set(model.config.eos_token_ids).union(*(r.stop_ids for r in requests))
        sampling = sampling.replace(end_tokens=tuple(sorted(ends)))
    return sampling.prepared(model.config.vocab_size)


def _histories(
    tokens: np.ndarray, lengths: np.ndarray, vocabulary: int, sampling: Sampling
) -> History | None:
    """What the prompts hold, if a setting asks."""
    if not sampling.needs_history:
        return None
    return begin(jnp.asarray(tokens), jnp.asarray(lengths), vocabulary)


def state_rows(model: Model, tokens: int) -> int:
    """Rows that a state of so many tokens is allocated with."""
    return min(-(-tokens // CACHE_ROWS) * CACHE_ROWS, model.config.max_position_embeddings)


def _compile(lowerings: Iterable[Callable[[], Any]]) -> None:
    """Compile programs; while one compiles, the next is traced."""
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(lower().compile) for lower in lowerings]
        for job in jobs:
            job.result()


def choose_drafter(model: Model, drafter: Any, tree: Any) -> Drafter:
    """``make_drafter``, and "auto": the default drafter, or "suffix" without an MTP head."""
    if drafter != "auto":
        return make_drafter(drafter, tree)
    if "mtp" not in model.params:
        return make_drafter("suffix", tree)
    return make_drafter(DEFAULT_DRAFTER, DEFAULT_TREE if tree is None else tree)


def _deliver(request: Request, emission: Emission, row: int, seconds: float) -> Piece:
    """Hand one sequence its share of a step, and count it."""
    if request.finished:
        return Piece((), (), ())
    count = int(emission.count[row])
    tokens = emission.tokens[row, :count].tolist()
    texts = request.take(tokens, emission.logprobs[row, :count].tolist())
    taken = len(texts)
    accepted = min(taken, count - 1)
    request.stats.count_step(int(emission.proposed[row]), accepted)
    request.stats.decode_s += seconds
    return Piece(texts, tuple(tokens[:taken]), tuple(i < count - 1 for i in range(taken)))


def _limits(requests: list[Request]) -> np.ndarray:
    return np.array([request.depth_limit for request in requests], np.int32)


def _keys(seed: Any, batch: int) -> Array:
    """One key a sequence; a single seed serves all, so that a stream is the same in any batch."""
    seeds = [seed] * batch if np.ndim(seed) == 0 else list(seed)
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds for {batch} prompts, expected one, or one a prompt")
    for value in seeds:
        if not 0 <= value < 2**32:  # a larger one would be cut to these bits without a word
            raise ValueError(f"seed is {value}, expected an integer in 0..{2**32 - 1}")
    return jnp.stack([jax.random.key(int(value)) for value in seeds])


def _name(stats: Stats, policy: Policy, drafter: Drafter, rule: Rule) -> None:
    """Say what serves a request."""
    stats.rule, stats.lossless = rule.name, rule.lossless
    stats.policy, stats.drafter, stats.tree = policy.name, spec_of(drafter), drafter.shape.name
    stats.implementation, stats.device = policy.implementation, jax.devices()[0].device_kind
