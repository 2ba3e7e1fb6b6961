"""The component audit: recurrent outputs and states of policies and kernels against float64."""

from treejax.audit.component.audit import Settings, run

__all__ = ["Settings", "run"]
