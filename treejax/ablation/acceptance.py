"""Acceptance length by the width of the tree, with a model and its own MTP head.

Greedy, over prompts cut from a package. Every text must be plain decoding's; a figure is pooled
over prompts as vLLM defines it, one plus accepted candidates by drafts.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from treejax.ablation.base import GREEN, NEAR_TIE, RED, Cell, Context, Row
from treejax.agreement import Agreement, Recording, compare, record
from treejax.checkpoint import load_model
from treejax.cli.passages import read_passages
from treejax.model import Model
from treejax.stats import Stats


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What to draft.

    Attributes:
      prompts: TOML file of passages, relative to the experiment's.
      widths: trees by their children by depth.
      most_prompts: the first so many of them; tokens: generated after each.
    """

    prompts: str
    widths: tuple[str, ...]
    most_prompts: int = 4
    tokens: int = 128
    policy: str = "wy"


def acceptance_rows(settings: Acceptance, context: Context, cells: Sequence[Cell]) -> Iterator[Row]:
    """A row a width; plain decoding runs once."""
    model = load_model(context.checkpoint, dtype=context.dtype or "float32", fused=True)
    texts = list(read_passages(settings.prompts, context.wheel).values())
    if model.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer: prompts cannot be read")
    prompts = [model.tokenizer.encode(text).ids for text in texts[: settings.most_prompts]]
    plain = _record(model, settings, context, prompts, None)
    for at, cell in enumerate(cells):
        context.advance("acceptance", at, len(cells))
        width = str(cell.key["widths"])
        drafted = _record(model, settings, context, prompts, width)
        pairs = zip(prompts, drafted, plain, strict=True)
        found = [compare(model, prompt, mine, other) for prompt, mine, other in pairs]
        yield _row(cell, found, [recording.stats for recording in drafted])


def _record(
    model: Model,
    settings: Acceptance,
    context: Context,
    prompts: Sequence[Sequence[int]],
    width: str | None,
) -> list[Recording]:
    return record(
        model,
        prompts,
        settings.tokens,
        policy=settings.policy,
        drafter=None if width is None else "mtp",
        tree=width,
        implementation=context.implementation,
    )


def _row(cell: Cell, found: Sequence[Agreement], stats: Sequence[Stats]) -> Row:
    wrong = [agreement for agreement in found if not agreement.ok]
    if wrong:
        return cell.row(RED, str(wrong[0]))
    drafts = sum(each.num_drafts for each in stats)
    accepted = sum(each.num_accepted_tokens for each in stats)
    measures = {
        "acceptance_length": 1.0 + accepted / drafts if drafts else 1.0,
        "drafts": drafts,
        "prompts": len(stats),
    }
    tied = any(agreement.near_tie for agreement in found)
    return cell.row(NEAR_TIE if tied else GREEN, None, measures)
