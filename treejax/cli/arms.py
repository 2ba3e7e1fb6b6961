"""Arms of a comparison: what is decoded, beside what, and how arms are timed.

An arm is a policy, a drafter and a tree. Every arm decodes the same prompts with the same seed,
greedily and sampled, and is held against plain decoding token by token. Only arms that agree are
timed, interleaved with plain decoding in one process.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from treejax import agreement
from treejax.agreement import Agreement, Recording
from treejax.drafters import Scripted, make_drafter
from treejax.loop import DEFAULT_DRAFTER, DEFAULT_TREE
from treejax.model import Model
from treejax.policies.choose import DEFAULT
from treejax.sampling import Sampling
from treejax.stats import Stats

MODES = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95)}
PLAIN_POLICY = "replay"  # its published state is the native chain, bit for bit
DRAFTS = (
    "mtp:chain5",
    "mtp_tree:best15x10",
    "suffix:best16x8",
    "mtp+suffix:hydra27",
    f"{DEFAULT_DRAFTER}:{DEFAULT_TREE}",
    "scripted:3,2,2",
)
_SCHEDULE = ((3, 3), (0, 0), (2, 1), (3, 0), (1, 1))  # (levels, right ones): each kind of step


@dataclasses.dataclass(frozen=True)
class Arm:
    policy: str
    drafter: str
    tree: str

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.drafter}:{self.tree}"


class Case(NamedTuple):
    """One generation: a mode's name and the index of a prompt."""

    mode: str
    prompt: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One arm on one case: how it agrees with plain decoding, and its figures."""

    arm: Arm
    case: Case
    agreement: Agreement
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Task:
    """What all arms do.

    Attributes:
      prompts: token ids.
      budget: tokens to generate after each, whatever they are.
      together: serve all cases of an arm as one batch: less to compile.
      implementation: of all arms and of plain decoding beside them.
    """

    model: Model
    prompts: Sequence[Sequence[int]]
    budget: int
    seed: int
    together: bool
    implementation: str = "auto"

    @property
    def cases(self) -> list[Case]:
        return [Case(mode, i) for mode in MODES for i in range(len(self.prompts))]

    def references(self) -> dict[Case, Recording]:
        """Plain decoding of every case."""
        return dict(self._serve(PLAIN_POLICY, None, self.together))

    def follow(self, arm: Arm, references: dict[Case, Recording]) -> Iterator[Row]:
        """Decode every case with one arm and compare."""
        together = self.together or arm.drafter == "scripted"
        drafter = self._drafter(arm, references)
        for case, drafted in self._serve(arm.policy, drafter, together):
            plain, sampling = references[case], MODES[case.mode]
            prompt = self.prompts[case.prompt]
            agreed = agreement.compare(self.model, prompt, drafted, plain, sampling, self.seed)
            yield Row(arm, case, agreed, drafted.stats)

    def _drafter(self, arm: Arm, references: dict[Case, Recording]) -> Any:
        if arm.drafter != "scripted":
            return make_drafter(arm.drafter, arm.tree)
        truth = tuple(references[case].tokens for case in self.cases)
        return Scripted(tree=arm.tree, truth=truth, schedule=_SCHEDULE)

    def _serve(self, policy: str, drafter: Any, together: bool) -> Iterator[tuple[Case, Recording]]:
        groups = [self.cases] if together else [[case] for case in self.cases]
        for group in groups:
            recordings = agreement.record(
                self.model,
                [self.prompts[case.prompt] for case in group],
                self.budget,
                policy=policy,
                drafter=drafter,
                sampling=_sampling(group),
                seed=self.seed,
                implementation=self.implementation,
            )
            yield from zip(group, recordings, strict=True)

    def time(self, arms: Sequence[Arm], repeats: int) -> Iterator[tuple[str, int, int, float]]:
        """Interleaved greedy decoding: (arm or "plain", repeat, tokens after the first, seconds).

        Each prompt is decoded by all, one after the other, in an order that turns.
        """
        every: list[tuple[str, str, Any]] = [("plain", DEFAULT, None)]
        every += [(arm.name, arm.policy, make_drafter(arm.drafter, arm.tree)) for arm in arms]

        def decode(prompt: Sequence[int], policy: str, drafter: Any) -> tuple[int, float]:
            (made,) = agreement.record(
                self.model,
                [prompt],
                self.budget,
                policy=policy,
                drafter=drafter,
                implementation=self.implementation,
            )
            return len(made.tokens) - 1, made.stats.decode_s

        for _, policy, drafter in every:  # not counted: the first steps of a program are slow
            decode(self.prompts[0], policy, drafter)
        for repeat in range(repeats):
            for i, prompt in enumerate(self.prompts):
                turn = (repeat + i) % len(every)
                for name, policy, drafter in every[turn:] + every[:turn]:
                    yield name, repeat, *decode(prompt, policy, drafter)


def _sampling(group: Sequence[Case]) -> Sampling:
    """The settings of a mode, or of a batch that mixes modes."""
    modes = [MODES[case.mode] for case in group]
    if len(modes) == 1:
        return modes[0]
    return Sampling(
        temperature=np.array([mode.temperature for mode in modes], np.float32),
        top_p=np.array([mode.top_p or 1.0 for mode in modes], np.float32),
    )


def make_arms(policies: Sequence[str], drafts: Sequence[str]) -> list[Arm]:
    """Every policy with every "drafter:tree".

    Raises:
      ValueError: one line: a form, name or tree that does not exist.
    """
    arms = []
    for policy in policies:
        for draft in drafts:
            name, colon, tree = draft.partition(":")
            if not colon:
                raise ValueError(f"{draft!r} names no tree, expected drafter:tree, as {DRAFTS[0]}")
            if name != "scripted":
                make_drafter(name, tree)
            arms.append(Arm(policy, name, tree))
    return arms


@dataclasses.dataclass(frozen=True)
class Rate:
    """Decoding speed over repeats, each pooled over prompts; ranges, not intervals.

    Attributes:
      tokens_per_s, ratio: medians; the ratio is to plain decoding of the same repeat.
      tokens_per_s_range, ratio_range: least and largest.
    """

    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    ratio: float
    ratio_range: tuple[float, float]


def pool_rates(timings: Sequence[tuple[str, int, int, float]]) -> dict[str, Rate]:
    """Rates by arm from what ``Task.time`` yields: sum of tokens by sum of seconds."""
    sums: dict[tuple[str, int], tuple[int, float]] = {}
    for name, repeat, tokens, seconds in timings:
        before = sums.get((name, repeat), (0, 0.0))
        sums[name, repeat] = before[0] + tokens, before[1] + seconds
    rates = {key: tokens / seconds for key, (tokens, seconds) in sums.items()}
    repeats = sorted({repeat for _, repeat in rates})
    made = {}
    for name in dict.fromkeys(name for name, _ in rates):
        speed = [rates[name, repeat] for repeat in repeats]
        ratio = [rates[name, repeat] / rates["plain", repeat] for repeat in repeats]
        made[name] = Rate(
            statistics.median(speed),
            (min(speed), max(speed)),
            statistics.median(ratio),
            (min(ratio), max(ratio)),
        )
    return made
