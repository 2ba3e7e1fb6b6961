"""The fault matrix: which planted faults of the engine the continuation audit catches."""

from treejax.audit.detection.matrix import Settings, run

__all__ = ["Settings", "run"]
