"""What the TOML of a request replay says."""

import dataclasses

from treejax.ablation.recorded import Settings
from treejax.ablation.serving import Arm
from treejax.policies import REGISTRY as POLICIES


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to draw, by name; ``sampling`` absent is greedy."""

    name: str
    sampling: Settings | None = None


@dataclasses.dataclass(frozen=True)
class Others:
    """Further policies, with some of the drafts, on the first ``requests`` requests."""

    policies: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    requests: int = 8


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    """The TOML.

    Attributes:
      policy: of plain decoding and of all ``drafts``, each "drafter:tree", or
        "drafter" with its own tree.
      max_tokens: new tokens of a request at most, as the model's context allows.
      most_prompt_tokens: longer prompts are left out; 0 takes all.
      ignore_eos: generate that many whatever comes.
      modes: every request runs in each, unless it brings its own settings.
      passages: files of passages, relative to the TOML. prompts: texts.
    """

    seed: int
    repeats: int
    policy: str
    drafts: tuple[str, ...]
    max_tokens: int
    modes: tuple[Mode, ...]
    passages: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    others: Others = Others()
    ignore_eos: bool = False
    most_prompt_tokens: int = 0


def check(settings: RequestSettings, where: str) -> None:
    """
    Raises:
      ValueError: one line that names the file: a setting that cannot be.
    """
    s = settings
    for policy in (s.policy, *s.others.policies):
        if policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"{where}: policy {policy!r} is unknown, expected one of: {known}")
    for draft in (*s.drafts, *s.others.drafts):
        try:
            Arm(s.policy, draft).drafter()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if bool(s.others.policies) != bool(s.others.drafts) or s.others.requests < 1:
        raise ValueError(f"{where}: others needs policies, drafts and at least 1 request")
    if s.max_tokens < 1:
        raise ValueError(f"{where}: max_tokens is {s.max_tokens}, expected at least 1")
    names = [mode.name for mode in s.modes]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{where}: modes are {names}, expected at least one, each once")
    for mode in s.modes:
        try:
            (mode.sampling or Settings(0.0)).sampling().prepared()
        except ValueError as error:
            raise ValueError(f"{where}: mode {mode.name!r}: {error}") from None
