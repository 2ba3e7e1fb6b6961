"""The continuation audit: an engine's steps through the whole model against plain decoding."""

from treejax.audit.continuation.audit import SCHEDULES, Envelope, Settings, calibrate, run

__all__ = ["SCHEDULES", "Envelope", "Settings", "calibrate", "run"]
