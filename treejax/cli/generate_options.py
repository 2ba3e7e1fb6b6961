"""Options of ``python -m treejax.generate``, and what they mean.

Every option acts or is refused: one that could have no effect beside the others is a mistake.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.implementation import resolve
from treejax.cli.guard import Parser
from treejax.cli.kernels import CHOICES
from treejax.drafters import REGISTRY as DRAFTERS
from treejax.drafters import make_drafter
from treejax.engine import DEFAULT_POLICY
from treejax.loop import DEFAULT_DRAFTER, DEFAULT_TREE, VISIT_SECONDS, check_steps
from treejax.policies import REGISTRY as POLICIES
from treejax.policies import make_policy
from treejax.sampling import Sampling
from treejax.steps.many import MOST_STEPS
from treejax.steps.rules import REGISTRY as RULES
from treejax.steps.rules import rule_for

_FILTERS = ("top_k", "top_p", "min_p")
_PENALTIES = {
    "repetition_penalty": "of tokens in prompt and text: z / X or z * X, 1 changes nothing",
    "presence_penalty": "taken from tokens in the text, 0 changes nothing",
    "frequency_penalty": "taken once for each occurrence in the text, 0 changes nothing",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Validated options of one generation.

    Attributes:
      drafter: None decodes plainly; "auto" depends on the model.
      stats: "text", "json" or "none", what is printed to stderr.
      idle_seed: a seed was given and changes nothing, since the text is greedy.
    """

    checkpoint: str | None
    prompt: str
    max_tokens: int
    sampling: Sampling
    rule: str
    stop: tuple[str, ...]
    seed: int
    idle_seed: bool
    policy: str
    implementation: str
    drafter: str | None
    tree: str | None
    steps_per_visit: int | str
    dtype: str
    check: bool
    stats: str
    stats_file: Path | None
    profile: Path | None


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m treejax.generate",
        description="Continue a prompt. The text goes to stdout, statistics go to stderr.",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to continue")
    what.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="model folder, or the name of a shipped "
        "model; default: the small trained model that ships",
    )
    source = what.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the prompt; - reads it from stdin")
    source.add_argument("--prompt-file", metavar="F", type=Path, help="a file with the prompt")
    what.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    what.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    what.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")

    draw = parser.add_argument_group("how to draw")
    draw.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy"
    )
    draw.add_argument("--top-k", type=int, metavar="K")
    draw.add_argument("--top-p", type=float, metavar="P")
    draw.add_argument("--min-p", type=float, metavar="P")
    draw.add_argument(
        "--exact-top-k", action="store_true", help="exactly K tokens; otherwise ties are kept"
    )
    for name, meaning in _PENALTIES.items():
        draw.add_argument("--" + name.replace("_", "-"), type=float, metavar="X", help=meaning)
    draw.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=X",
        help="added to a token's logit; may be given several times",
    )
    for name, meaning in (("allow", "draw only these tokens"), ("ban", "never draw these tokens")):
        draw.add_argument(f"--{name}-tokens", metavar="ID,ID", help=meaning)
    draw.add_argument(
        "--min-tokens", type=int, metavar="N", help="no end token before so many tokens"
    )
    draw.add_argument("--seed", type=int, metavar="N", help="default 0; of no effect when greedy")

    how = parser.add_argument_group("how to decode")
    how.add_argument(
        "--policy",
        default=DEFAULT_POLICY,
        help=f"{', '.join(POLICIES)}; auto, the default, is the fastest that was measured",
    )
    how.add_argument(
        "--drafter",
        help=f"{', '.join(DRAFTERS)}; default {DEFAULT_DRAFTER} where "
        "the model has an MTP head, else suffix",
    )
    how.add_argument(
        "--rule",
        choices=tuple(RULES),
        default="match",
        help="which candidates are accepted; match, the default, emits plain decoding's own text",
    )
    how.add_argument("--tree", metavar="SHAPE", help=f"default {DEFAULT_TREE}; see --list")
    how.add_argument("--plain", action="store_true", help="draft nothing: one token a step")
    how.add_argument(
        "--implementation",
        choices=CHOICES,
        default="auto",
        help="of the recurrent layers: auto, the default, is the GPU kernels where they can run",
    )
    how.add_argument(
        "--steps-per-visit",
        type=_steps,
        default="auto",
        metavar="N",
        help="steps that the device makes before text is fetched and shown, 1 to "
        f"{MOST_STEPS}; auto, the default, is what fits into {VISIT_SECONDS} s, or 1 with --stop",
    )

    tell = parser.add_argument_group("what to tell")
    tell.add_argument(
        "--check",
        action="store_true",
        help="decode plainly too, and compare the "
        "streams and the final states; exit status 1 if they differ",
    )
    tell.add_argument("--stats", choices=("text", "json", "none"), default="text")
    tell.add_argument("--stats-file", type=Path, metavar="F", help="write statistics as JSON too")
    tell.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="write a trace of the decode steps for XProf or TensorBoard",
    )
    tell.add_argument(
        "--list",
        action="store_true",
        help="list policies, drafters, trees, families, models and devices, and do nothing else",
    )
    return parser


def read_options(arguments: Sequence[str]) -> Options | None:
    """The options, or None if ``--list`` is among them.

    Raises:
      ValueError: one line: what is wrong and what was expected.
    """
    given = make_parser().parse_args(arguments)
    if given.list:
        return None
    _check_together(given)
    if given.policy != "auto":
        make_policy(given.policy, "xla")
    if given.profile is not None:
        given.profile.mkdir(parents=True, exist_ok=True)
    drafter = None if given.plain else given.drafter or "auto"
    if drafter != "auto":
        made = make_drafter(drafter, given.tree)
        rule_for(given.rule, made.proposals, made.shape)
    return Options(
        checkpoint=given.checkpoint,
        prompt=_read_prompt(given.prompt, given.prompt_file),
        max_tokens=given.max_tokens,
        sampling=_sampling(given),
        rule=given.rule,
        stop=tuple(given.stop),
        seed=given.seed or 0,
        idle_seed=given.seed is not None and not given.temperature and RULES[given.rule].lossless,
        policy=given.policy,
        implementation=given.implementation,
        drafter=drafter,
        tree=given.tree,
        steps_per_visit=given.steps_per_visit,
        dtype=given.dtype,
        check=given.check,
        stats=given.stats,
        stats_file=given.stats_file,
        profile=given.profile,
    )


def _check_together(given: argparse.Namespace) -> None:
    """Refuse options that cannot act."""
    if given.prompt is None and given.prompt_file is None:
        raise ValueError("no prompt: give --prompt TEXT, --prompt - or --prompt-file F")
    if given.implementation == "mosaic_gpu":
        resolve("mosaic_gpu")
    for name in ("drafter", "tree"):
        if given.plain and getattr(given, name) is not None:
            raise ValueError(f"--plain drafts nothing: leave out --{name}, or --plain")
    if given.check and given.max_tokens == 0:
        raise ValueError("--check has nothing to compare: --max-tokens is 0, expected 1 or more")
    if given.check and given.rule != "match":
        raise ValueError("--check compares texts, and only rule match keeps plain's: leave it out")
    if given.plain and given.rule != "match":
        raise ValueError("--plain has no candidates to accept: leave out --rule, or --plain")
    if given.plain and given.check:
        raise ValueError("--check compares with plain decoding: leave out --plain, or --check")


def _sampling(given: argparse.Namespace) -> Sampling:
    if given.exact_top_k and given.top_k is None:
        raise ValueError("--exact-top-k has no effect without --top-k: add it, or leave it out")
    numbers = ("temperature", *_FILTERS, *_PENALTIES, "min_tokens")
    sampling = Sampling(
        **{name: getattr(given, name) for name in numbers},
        exact_top_k=given.exact_top_k,
        logit_bias=_biases(given.logit_bias),
        allowed_tokens=_ids("--allow-tokens", given.allow_tokens),
        banned_tokens=_ids("--ban-tokens", given.ban_tokens),
    )
    tokens = {"logit_bias": None, "allowed_tokens": None, "banned_tokens": None}
    sampling.replace(**tokens, min_tokens=None).prepared()  # tokens wait for the vocabulary
    for name in _FILTERS:
        if given.temperature == 0 and getattr(given, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} has no effect at temperature 0 (greedy): add --temperature")
    return sampling


def _biases(texts: Sequence[str]) -> dict[int, float] | None:
    made: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            number, bias = int(token), float(value)
        except ValueError:
            raise ValueError(f"--logit-bias {text!r} is malformed, expected ID=NUMBER") from None
        if number in made:
            raise ValueError(f"--logit-bias gives token {number} twice, expected it once")
        made[number] = bias
    return made or None


def _steps(text: str) -> int | str:
    """A number of steps or "auto", as argparse takes it."""
    try:
        count = text if text == "auto" else int(text)
        check_steps(count)
    except ValueError:
        expected = f"expected an integer in 1..{MOST_STEPS}, or auto"
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps, {expected}") from None
    return count


def _ids(option: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"{option} {text!r} is malformed, expected token ids: 5,17") from None


def _read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt, exactly as given: nothing is added or stripped."""
    if text is not None and text != "-":
        raw, where = os.fsencode(text), "the prompt"
    elif file is not None:
        raw, where = file.read_bytes(), str(file)
    else:
        raw, where = sys.stdin.buffer.read(), "stdin"
    try:
        prompt = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not valid UTF-8 at byte {error.start}") from None
    if not prompt:
        raise ValueError(f"{where} is empty, expected at least one character to continue")
    return prompt
