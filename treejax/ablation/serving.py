"""Requests served by arms, each held against plain decoding before its figures count.

The reference is plain decoding under ``replay``, which leaves what native decoding leaves. All
requests of a run share one state size, so that an arm compiles one step a set of sampling stages.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from treejax import agreement
from treejax.ablation.base import GREEN, NEAR_TIE, RED, Row
from treejax.agreement import Agreement, Recording, drain
from treejax.drafters import Best, Drafter, make_drafter
from treejax.loop import run
from treejax.model import Model
from treejax.policies import Policy, make_policy
from treejax.requests import Request
from treejax.sampling import Sampling
from treejax.text import TextStream

REFERENCE = "replay"
PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Arm:
    """What serves: a policy, and "drafter:tree" or "drafter", or None for plain decoding."""

    policy: str
    draft: str | None

    @property
    def name(self) -> str:
        return PLAIN if self.draft is None else f"{self.policy}/{self.draft}"

    def drafter(self) -> Drafter:
        """
        Raises:
          ValueError: one line: an unknown name, or a tree that the drafter cannot fill.
        """
        if self.draft is None:
            return make_drafter(None)
        drafter, _, tree = self.draft.partition(":")
        return make_drafter(drafter, tree or None)


@dataclasses.dataclass(frozen=True)
class Task:
    """One request in one mode.

    Attributes:
      corpus, prompt, mode: names, as rows show them.
      tokens: of the prompt. budget: new tokens at most.
      sampling: how to draw, with which seed.
    """

    corpus: str
    prompt: str
    mode: str
    tokens: tuple[int, ...]
    budget: int
    sampling: Sampling
    seed: int

    @property
    def key(self) -> dict[str, str]:
        """What names the task in a row."""
        return {"corpus": self.corpus, "prompt": self.prompt, "mode": self.mode}


class Reference:
    """Plain decoding of one task: its tokens, and its states until ``forget``."""

    def __init__(self, server: "Server", task: Task):
        self._server, self._task = server, task
        self.plain = server.serve(task, server.policy(REFERENCE), make_drafter(None))
        self._held: dict[int, Recording] = {}
        if self.plain.state is not None:
            self._held[int(self.plain.state.length[0])] = self.plain

    def holding(self, length: int) -> Recording:
        """Plain decoding up to a state of ``length`` tokens; a drafted one may pass a stop.

        It is decoded once: arms of one tree come to the same length under every policy.
        """
        if length not in self._held:
            task = dataclasses.replace(self._task, budget=length - len(self._task.tokens) + 1)
            policy = self._server.policy(REFERENCE)
            self._held[length] = self._server.serve(task, policy, make_drafter(None), stop=False)
        return self._held[length]

    def forget(self) -> None:
        """Keep the tokens and give the states' memory back."""
        self.plain = self.plain._replace(state=None)
        self._held.clear()


class Verdict(NamedTuple):
    gate: str
    problem: str | None
    measures: Row


@dataclasses.dataclass(frozen=True)
class Server:
    """What all arms share.

    Attributes:
      max_length: rows of every state.
      ignore_eos: generate each task's whole budget, whatever comes.
    """

    model: Model
    implementation: str
    max_length: int
    ignore_eos: bool

    def policy(self, name: str) -> Policy:
        return make_policy(name, self.implementation)

    def serve(
        self, task: Task, policy: Policy, drafter: Drafter, stop: bool | None = None
    ) -> Recording:
        """Generate. Programs are compiled, and run once, before the clocks of the figures start."""
        stop = not self.ignore_eos if stop is None else stop
        ends = set(self.model.config.eos_token_ids) if stop else set()
        request = Request(list(task.tokens), task.budget, ends, TextStream(None))
        how = (policy, drafter, None, task.sampling, task.seed)
        steps = run(self.model, [request], *how, warm_up=True, max_length=self.max_length)
        state = drain(steps)
        return Recording(tuple(request.tokens), request.stats, state)

    def judge(self, task: Task, made: Recording, reference: Reference) -> Verdict:
        """Hold a generation against plain decoding: tokens, and states where both are there."""
        plain = reference.plain
        counts = len(made.tokens), len(plain.tokens)
        if made.tokens == plain.tokens:
            if made.state is not None and plain.state is not None:
                plain = reference.holding(int(made.state.length[0]))
        else:  # a stop that one of them missed shows in the lengths alone
            made = made._replace(tokens=made.tokens[: len(plain.tokens)], state=None)
        found = agreement.compare(self.model, task.tokens, made, plain, task.sampling, task.seed)
        measures = _comparison(found)
        if found.pair is None and counts[0] != counts[1]:
            return Verdict(RED, "ends after {} tokens, plain after {}".format(*counts), measures)
        if not found.ok:
            return Verdict(RED, str(found), measures)
        return Verdict(NEAR_TIE if found.near_tie else GREEN, None, measures)


def figures_of(task: Task, made: Recording) -> Row:
    """What one generation did, with its times."""
    stats = made.stats
    first = stats.accepted_per_pos[0] if stats.accepted_per_pos else 0
    return {
        "prompt_tokens": len(task.tokens),
        "budget": task.budget,
        "tokens": stats.tokens,
        "finish_reason": stats.finish_reason,
        "steps": stats.steps,
        "drafts": stats.num_drafts,
        "proposed": stats.num_draft_tokens,
        "accepted": stats.num_accepted_tokens,
        "accepted_per_pos": stats.accepted_per_pos,
        "first_accepted": first / stats.num_drafts if stats.num_drafts else None,
        "acceptance_length": stats.acceptance_length if stats.num_drafts else None,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "compile_s": stats.compile_s,
        "tokens_per_s": stats.decode_tokens_per_s if stats.decode_s else None,
        "scratch_bytes": stats.scratch_bytes,
        "state_bytes": stats.state_bytes,
    }


def describe(policy: Policy, drafter: Drafter) -> Row:
    """What an arm is: drafter, policy, and the tree's nodes (without the root), width and depth."""
    return {
        "policy": policy.name,
        "drafter": drafter.name,
        "tree": drafter.shape.name,
        "nodes": drafter.capacity - 1,
        "width": _width(drafter),
        "depth": drafter.max_depth,
        "implementation": policy.implementation,
    }


def _width(drafter: Drafter) -> int:
    """Nodes of the widest level; of a tree without a fixed shape, what there can be at most."""
    shape = drafter.shape
    if isinstance(shape, Best):
        return shape.nodes
    depths: Sequence[int] = shape.depths
    return max((depths.count(depth) for depth in set(depths) if depth), default=0)


def _comparison(found: Agreement) -> Row:
    made: dict[str, Any] = {"compared": found.compared, "equal": found.equal}
    made["margin_nats"] = found.margin if found.pair is not None else None
    return made | {f"distance_{name}": value for name, value in found.surfaces.items()}
