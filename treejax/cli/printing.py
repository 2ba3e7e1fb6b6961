"""What ``generate`` shows: text to stdout while it comes, statistics as text.

Nothing but the text goes to stdout. On a terminal accepted candidates and the model's own tokens
have two tones; elsewhere the text is written as it is.
"""

import os
import sys
from typing import Any, TextIO

from treejax.drafters import Best, Drafter
from treejax.requests import Piece
from treejax.stats import Stats

_ACCEPTED, _PLAIN = "\x1b[32m", "\x1b[0m"


class TextPrinter:
    """Write pieces to a stream as they arrive."""

    def __init__(self, out: TextIO):
        self._out = out
        self._terminal = out.isatty()
        self._tones = (
            self._terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        )
        self._last = "\n"

    def show(self, piece: Piece) -> None:
        for text, drafted in zip(piece.texts, piece.drafted, strict=True):
            if text:
                self._out.write(f"{_ACCEPTED}{text}{_PLAIN}" if drafted and self._tones else text)
                self._last = text
        self._out.flush()

    def close(self) -> None:
        """On a terminal, end the last line; a file gets the text and nothing else."""
        if self._terminal and not self._last.endswith("\n"):
            self._out.write("\n")
        self._out.flush()


def utf8_output() -> None:
    """Write text as UTF-8 whatever the locale says, and never fail on a character."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]


def stats_text(
    stats: Stats,
    prompt_tokens: int,
    drafter: Drafter,
    dtype: str,
    check: Any = None,
    notice: str | None = None,
    why: str | None = None,
) -> str:
    """The statistics as an aligned block of lines. ``notice``: why no kernels ran, if so; ``why``:
    how the policy was picked, if it was."""
    lines = [
        (
            "prompt",
            f"{prompt_tokens} tok",
            f"prefill {_rate(prompt_tokens, stats.prefill_s)}",
            f"first token {1e3 * stats.prefill_s:.0f} ms",
            f"compile {stats.compile_s:.1f} s (not in rates)",
        ),
        (
            "generated",
            f"{stats.tokens} tok",
            f"decode {stats.decode_tokens_per_s:.1f} tok/s",
            f"{stats.steps} steps",
            f"end: {stats.finish_reason}",
            f"[{' | '.join(_setting(stats, dtype))}]",
        ),
        ("tree", *_tree_parts(drafter)),
    ]
    if stats.num_drafts:
        accepted, drafts = stats.num_accepted_tokens, stats.num_drafts
        lines.append(
            (
                "drafted",
                f"{stats.num_draft_tokens} nodes in {drafts} drafts",
                f"accepted {accepted}",
                f"node use {100 * stats.node_use:.1f} %",
            )
        )
        shares = " ".join(f"{count / drafts:.2f}" for count in stats.accepted_per_pos)
        lines.append(
            (
                "acceptance",
                f"{stats.acceptance_length:.2f} tok/draft = 1 + {accepted}/{drafts}",
                f"by depth {shares or '0.00'}",
            )
        )
    elif stats.steps and stats.drafter != "plain":
        why = "none paid" if stats.drafter == "budget" else "the drafter found no candidate"
        lines.append(("drafted", f"nothing: {why} in any step"))
    if stats.visits:
        lines.append(("visits", *_visit_parts(stats)))
    memory = f"scratch {_mebibytes(stats.scratch_bytes)}", f"state {_mebibytes(stats.state_bytes)}"
    lines.append(("memory", *memory))
    if stats.rule != "match":
        keeps = "keeps plain decoding's distribution" if stats.lossless else "LOSSY: another one"
        lines.append(("rule", stats.rule, keeps))
    if why is not None:
        lines.append(("policy", f"{stats.policy}: {why}"))
    if notice is not None:
        lines.append(("kernels", f"none: {notice}"))
    if check is not None:
        lines.append(("check", str(check)))
    return "".join(f"{name:<12}{'   '.join(parts)}\n" for name, *parts in lines)


def _setting(stats: Stats, dtype: str) -> tuple[str, ...]:
    return stats.policy, stats.drafter, stats.tree, stats.implementation, dtype, stats.device


def _tree_parts(drafter: Drafter) -> tuple[str, ...]:
    shape = drafter.shape
    nodes = drafter.capacity - 1
    if nodes == 0:
        return ("none: plain decoding",)
    if isinstance(shape, Best):
        return (f"at most {nodes} nodes", f"depth {shape.max_depth}")
    leaves = sum(not shape.children(row) for row in range(shape.capacity))
    return f"{nodes} nodes", f"depth {shape.max_depth}", f"{leaves} path{'s' * (leaves > 1)}"


def _visit_parts(stats: Stats) -> tuple[str, ...]:
    """How the host and the device took turns, and what that cost."""
    most = stats.steps_per_visit
    parts = (
        f"{stats.visits} of at most {most} step{'s' * (most > 1)}",
        f"host waited {stats.wait_s:.2f} s",
        f"device idle at most {stats.idle_s:.2f} s",
    )
    if not stats.wasted_steps:
        return parts
    return (*parts, f"{stats.wasted_steps} wasted after the stop string")


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tok/s" if seconds else "-"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
