"""Ablations: experiments that compare arms, each described by one TOML file.

``base`` says what an experiment is, ``rows`` keeps what was measured, ``report`` and ``figures``
show it. An experiment is one file and one line here; ``python -m treejax.ablate`` runs them.
"""

from treejax.ablation.base import Cell, Context, Experiment, Row

EXPERIMENTS: dict[str, type] = {}

__all__ = ["EXPERIMENTS", "Cell", "Context", "Experiment", "Row"]
