"""What a generation reports: vLLM's acceptance figures, times, and memory.

``acceptance_length = 1 + num_accepted_tokens / num_drafts``, where only steps that proposed
something count as drafts. Accepted tokens exclude the bonus token. Rates leave compilation out.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Stats:
    """Figures of one sequence; times are those of the call that it was part of.

    Attributes:
      num_drafts: steps that proposed at least one candidate.
      num_draft_tokens: candidates proposed.
      num_accepted_tokens: candidates emitted; neither the root nor the bonus token.
      accepted_per_pos: how many drafts had a candidate accepted at depth d + 1.
      tokens: tokens delivered. steps: verify calls.
      prefill_s, decode_s, compile_s: seconds; the first two leave compilation out. Decoding is
        from the first visit asked for to the last one fetched, the caller's time between pieces
        included.
      steps_per_visit: the most steps that the device made between two visits of the host.
      visits: how often the host fetched what the steps had emitted, until the text had ended.
      wait_s: seconds of ``decode_s`` in which the host did nothing but wait for the device.
      idle_s: seconds in which the device may have had nothing to do, at most: from when the host
        fetched a visit until it asked for the next, its caller's time included, unless one was
        still running.
      wasted_steps: verify calls that the device made after a stop string had ended the text and
        before the host had seen it; in none of the other counts.
      state_bytes, scratch_bytes: durable state, and the policy's buffers while it verifies.
      rule, lossless: the acceptance rule, and whether it keeps plain decoding's distribution.
      finish_reason: "stop", "length" or "interrupted".
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = dataclasses.field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0
    steps_per_visit: int = 0
    visits: int = 0
    wait_s: float = 0.0
    idle_s: float = 0.0
    wasted_steps: int = 0
    state_bytes: int = 0
    scratch_bytes: int = 0
    policy: str = ""
    drafter: str = ""
    tree: str = ""
    rule: str = "match"
    lossless: bool = True
    implementation: str = "xla"
    device: str = ""
    finish_reason: str = "length"

    @property
    def acceptance_length(self) -> float:
        """Tokens a drafting step emits on average, the bonus token included (vLLM's definition)."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def node_use(self) -> float:
        """Accepted candidates by proposed ones; low by nature for wide trees."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first by the seconds after it."""
        return max(self.tokens - 1, 0) / self.decode_s if self.decode_s else 0.0

    def count_step(self, proposed: int, accepted: int) -> None:
        """Record one verify call: candidates proposed and candidates delivered."""
        self.steps += 1
        if proposed:
            self.num_drafts += 1
            self.num_draft_tokens += proposed
            self.num_accepted_tokens += accepted
            missing = accepted - len(self.accepted_per_pos)
            self.accepted_per_pos += [0] * max(missing, 0)
            for depth in range(accepted):
                self.accepted_per_pos[depth] += 1

    def count_visit(self, steps: int, seconds: float, wait: float, idle: float) -> None:
        """Record one visit: the steps made since the one before it, and its times."""
        self.visits += 1
        self.steps_per_visit = max(self.steps_per_visit, steps)
        self.decode_s += seconds
        self.wait_s += wait
        self.idle_s += idle

    def as_dict(self) -> dict[str, Any]:
        """All figures, the derived ones too, ready for JSON."""
        return dataclasses.asdict(self) | {
            "acceptance_length": self.acceptance_length,
            "node_use": self.node_use,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }
