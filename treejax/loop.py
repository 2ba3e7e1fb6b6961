"""The loop: propose, verify, select, publish, until every sequence has what it asked for.

``steps.together`` is those four as one step, and ``steps.many`` makes as many of them on the device
as the host asks for at a visit, with exact budgets and end tokens. The host does what needs a host:
text, and stop strings in it. The next visit is asked for before the last one is fetched, unless the
drafter tries a form of which it wants to know how that went. Plain decoding is the same step with a
drafter that proposes nothing.

No drafter needs the host between steps: what a drafter knows of the sequences is ``memory`` on the
device, the text that ``suffix`` looks up included. The host hands it finished responses, ``learn``,
when all requests are served.
"""

import logging
import math
import operator
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treejax.drafters import Draft, Drafter, make_drafter
from treejax.drafters.spec import spec_of
from treejax.history import History, begin
from treejax.model import Model, check_prompt, prompt_blocks
from treejax.policies import Policy, kernel_problem, make_policy, policy_title
from treejax.policies.choose import choose_policy
from treejax.requests import Piece, Request
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.state import State, init_state, state_bytes, with_policy
from treejax.stats import Stats
from treejax.steps.many import MOST_STEPS, end_tokens, steps
from treejax.steps.prompt import PROMPT_POLICY, Intake, adopt, first_token, variants
from treejax.steps.rules import rule_for
from treejax.steps.rules.base import Rule
from treejax.steps.together import Carry
from treejax.steps.visits import Visits, choose_loop, keeps_host, rehearsals

_log = logging.getLogger(__name__)

CACHE_ROWS = 256
"""States are allocated in multiples of this, so that nearby lengths share compiled programs."""

VISIT_SECONDS = 0.04
"""What a visit takes at most where the loop decides: a text that comes 25 times a second flows, and
the host's half a millisecond a visit is one per cent of it, however short a model's steps are."""

DEFAULT_DRAFTER, DEFAULT_TREE = "mtp+suffix", "hydra8"
"""What drafts unless asked otherwise, where the model has an MTP head; "suffix" elsewhere."""


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
    steps_per_visit: int | str = "auto",
) -> Generator[list[Piece], None, State | None]:
    """Serve requests of one batch to their end, and yield a list of pieces a step, one a request.

    Whether all of it can be is seen at the call, and nothing is compiled before the first ``next``.
    All programs are compiled before the first token is computed; no step compiles afterwards. The
    return value is the state after the last step, which holds every token but the pending ones; it
    is None if nothing was asked for. Of a sequence that a stop string ended it holds what the
    device had decoded when the host saw the string, all but the last token: the rest of that visit,
    and the next visit if it was under way. ``warm_up`` also runs the programs once before, without
    effect: the first run of a program is slow, and would count as decoding in a new process.
    ``max_length`` is how many tokens the state has room for: calls that share it share programs;
    None takes as few steps of ``CACHE_ROWS`` as these requests need. ``steps_per_visit`` is how
    many steps the device makes between two visits of the host, 1 to ``MOST_STEPS``: the stream is
    the same, and the pieces of a visit come one after the other. "auto" is as many as fit into
    ``VISIT_SECONDS`` by the last visit's time; a drafter of several forms holds the one that it
    chose for no more than that. With stop strings, after which steps are made for nothing, it is 1,
    and so it is on a GPU for a large model, whose steps follow each other without a gap.

    Raises:
      ValueError: one line: a setting, or a ``max_length`` that is too small.
    """
    looped, most = choose_loop(model, check_steps(steps_per_visit))
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
    rows = max(len(r.prompt) + r.budget for r in requests)
    if max_length is None:
        max_length = state_rows(model, rows)
    if max_length < rows:
        raise ValueError(f"max_length is {max_length}, expected at least the {rows} tokens asked")
    draft = drafter.init(model, len(requests), max_length)
    for request in requests:
        _name(request.stats, policy, drafter, rules[-1])
    made = _Setup(
        model=model,
        policy=policy,
        drafter=drafter,
        rules=rules,
        settings=settings,
        keys=keys,
        draft=draft,
        max_length=max_length,
        looped=looped,
        most=most,
    )
    return _serve(requests, made, logprobs, warm_up)


class _Setup(NamedTuple):
    """What serves a batch, as it was settled: ``keys`` [B], ``rules`` one a form of the drafter.

    ``looped`` and ``most`` are those of ``choose_loop``.
    """

    model: Model
    policy: Policy
    drafter: Drafter
    rules: list[Rule]
    settings: Sampling
    keys: Array
    draft: Draft
    max_length: int
    looped: bool
    most: int | None


def _serve(
    requests: list[Request], setup: _Setup, logprobs: bool, warm_up: bool
) -> Generator[list[Piece], None, State | None]:
    """``run``, once all is settled."""
    if all(request.finished for request in requests):
        return None
    model, policy, drafter, rules, settings, keys, draft, max_length, looped, most = setup
    forms = drafter.forms
    config, params, weights = model.config, model.params, draft.weights
    state = init_state(config, len(requests), max_length, model.dtype, PROMPT_POLICY)
    prompts = [request.prompt for request in requests]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    check_prompt(config, state, tokens, lengths)
    blocks = list(prompt_blocks(tokens, lengths))
    history = _histories(tokens, lengths, config.vocab_size, settings)
    nobody, want = jnp.zeros(len(requests), jnp.int32), np.bool_(logprobs)
    rest = keys, settings, want, end_tokens([request.stop_ids for request in requests])
    idly = np.ones(len(requests), bool), np.int32(1), np.bool_(True)  # a step without effect
    programs = [(config, *pair, looped, params, weights) for pair in zip(forms, rules, strict=True)]

    started = time.perf_counter()
    intake = Intake(config, params, forms[0], weights)  # any form takes in the prompt
    logits = jnp.zeros((len(requests), config.vocab_size), jnp.float32)
    taken = state, draft.memory, logits
    carry = jax.eval_shape(
        lambda state: Carry(with_policy(state, policy), draft.memory, state.length, history), state
    )
    jobs = [*intake.programs(taken, blocks), lambda: adopt.lower(state, policy)]
    jobs += [lambda p=program: steps.lower(*p, carry, nobody, *rest, *idly) for program in programs]
    _compile(jobs)
    if warm_up:  # prompts of no tokens
        taken = jax.block_until_ready(intake(taken, variants(blocks)))
    first_token(taken[-1], settings, keys, taken[0].length, history, want)
    compiled = time.perf_counter()

    state, memory, logits = intake(taken, blocks)
    pending, logprob = first_token(logits, settings, keys, state.length, history, want)
    carry = Carry(adopt(state, policy), memory, pending, history)
    firsts, logprob = jax.device_get((pending, logprob))
    ready = time.perf_counter()
    for program in programs * rehearsals(warm_up):
        carry, nobody, _ = steps(*program, carry, nobody, *rest, *idly)
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

    left = jnp.array([request.left for request in requests], jnp.int32)
    visits = Visits(programs, carry, left, rest, keeps_host(looped))
    yield from _decode(visits, requests, drafter, settings, most)
    for request in requests:
        drafter.learn(request.tokens)
    return visits.carry.state


def _decode(
    visits: Visits,
    requests: list[Request],
    drafter: Drafter,
    settings: Sampling,
    steps_per_visit: int | None,
) -> Generator[list[Piece]]:
    """Visits until every request has ended: a list of pieces a step.

    The drafter's pace says which form a visit runs, and of how many steps it is. While one runs,
    the next is asked for, unless how it goes decides on the next.
    """
    pace, depths = drafter.pace(settings), [form.max_depth for form in drafter.forms]
    most, seconds, plan = steps_per_visit or MOST_STEPS, math.inf, None
    if steps_per_visit is None:
        seconds = VISIT_SECONDS
        most = 1 if any(r.watched for r in requests) else most
    while not all(request.finished for request in requests):
        while visits.wants(plan is not None and plan.ahead):
            plan = pace.choose(most, seconds)
            visits.ask(plan.form, plan.count, [request.finished for request in requests])
        visit = visits.fetch()
        if not visit.made:
            raise RuntimeError("no step was made for requests that have not ended: this is a bug")
        for request in requests:
            if not request.finished:
                request.stats.count_visit(visit.made, visit.seconds, visit.wait, visit.idle)
        accepted = []
        for step in range(visit.made):
            over = all(request.finished for request in requests)
            limits = np.array([request.depth_limit for request in requests])
            part = limits >= 0
            if not over and limits[part].min() >= depths[visit.form]:  # cut short it tells nothing
                accepted.append(float((visit.emission.count[step] - 1)[part].mean()))
            pieces = [r.follow(visit.emission, step, row) for row, r in enumerate(requests)]
            if not over:
                yield pieces
        if accepted:
            pace.record(visit.form, visit.made, visit.busy, accepted)
    while visits.under_way:  # nothing but what a stop string wasted
        visit = visits.fetch()
        for step in range(visit.made):
            for row, request in enumerate(requests):
                request.follow(visit.emission, step, row)


def check_steps(count: int | str) -> int | None:
    """``steps_per_visit`` as a number, None for "auto".

    Raises:
      ValueError: not a number of steps that a visit can make.
    """
    if count == "auto":
        return None
    whole = isinstance(count, Integral) and not isinstance(count, bool)
    if not whole or not 1 <= int(count) <= MOST_STEPS:
        raise ValueError(
            f"steps_per_visit is {count!r}, expected an integer in 1..{MOST_STEPS}, or 'auto'"
        )
    return int(count)


def settle(model: Model, requests: Sequence[Request], sampling: Sampling | None) -> Sampling:
    """The settings as the steps take them; what may not come too early is what ends a request."""
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling is {sampling!r}, expected settings: treejax.Sampling(temperature=0.8)"
        )
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
    """Tokens that a state for so many has room for: with its spare row whole ``CACHE_ROWS``, which
    is also what attention kernels can copy in bulk."""
    rows = (tokens // CACHE_ROWS + 1) * CACHE_ROWS - 1
    return min(rows, model.config.max_position_embeddings)


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


def _keys(seed: Any, batch: int) -> Array:
    """One key a sequence; a single seed serves all, so that a stream is the same in any batch."""
    seeds = [seed] * batch if np.ndim(seed) == 0 else list(seed)
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds for {batch} prompts, expected one, or one a prompt")
    for i, value in enumerate(seeds):
        try:
            seeds[i] = operator.index(value)
        except TypeError:
            seeds[i] = -1
        if not 0 <= seeds[i] < 2**32:  # a larger one would be cut to these bits without a word
            raise ValueError(f"seed is {value!r}, expected an integer in 0..{2**32 - 1}")
    return jnp.stack([jax.random.key(value) for value in seeds])


def _name(stats: Stats, policy: Policy, drafter: Drafter, rule: Rule) -> None:
    """Say what serves a request."""
    stats.rule, stats.lossless = rule.name, rule.lossless
    stats.policy, stats.drafter = policy_title(policy), spec_of(drafter)
    stats.tree = drafter.shape.name
    stats.implementation, stats.device = policy.implementation, jax.devices()[0].device_kind
