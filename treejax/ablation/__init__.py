"""Ablations: experiments that compare arms, each described by one TOML file.

``base`` says what an experiment is, ``rows`` keeps what was measured, ``report`` and ``figures``
show it. An experiment is one file and one line here; ``python -m treejax.ablate`` runs them.
"""

from treejax.ablation.atlas import Atlas
from treejax.ablation.base import Cell, Context, Experiment, Row
from treejax.ablation.draft_cost import DraftCost
from treejax.ablation.drafting import Drafting
from treejax.ablation.mechanism import Mechanism
from treejax.ablation.requests import Requests
from treejax.ablation.step_cost import StepCost
from treejax.ablation.width_sweep import WidthSweep
from treejax.ablation.write_timing import WriteTiming

EXPERIMENTS: dict[str, type] = {
    "requests": Requests,
    "drafting": Drafting,
    "draft_cost": DraftCost,
    "mechanism": Mechanism,
    "width_sweep": WidthSweep,
    "atlas": Atlas,
    "write_timing": WriteTiming,
    "step_cost": StepCost,
}

__all__ = ["EXPERIMENTS", "Cell", "Context", "Experiment", "Row"]
