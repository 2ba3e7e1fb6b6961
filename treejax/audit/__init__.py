"""The audit kit: proof that a policy, drafter, rule, checkpoint or kernel is right, and that the
proof would notice if it were not.

``run`` is everything in one call. ``component``, ``continuation`` and ``sampler`` are the audits,
each with a function ``run`` that takes objects, yours too; ``detection`` plants the ``faults`` of
engines, ``sampler.detect`` those of samplers. ``step`` is the engine that is audited,
``envelope`` what its errors are held against, ``raised`` what becomes of an object that raises and
``elsewhere`` of one in a fresh process; ``report``, ``text``, ``page`` and ``figures`` show what
came out.
"""

from treejax.audit.base import Check, Report
from treejax.audit.whole import run

__all__ = ["Check", "Report", "run"]
