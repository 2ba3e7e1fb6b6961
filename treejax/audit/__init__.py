"""The audit kit: proof that a policy, drafter, rule, checkpoint or kernel is right, and that the
proof would notice if it were not."""

from treejax.audit.base import Check, Report

__all__ = ["Check", "Report"]
