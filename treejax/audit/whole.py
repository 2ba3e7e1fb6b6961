"""All audits in one call.

report = treejax.audit.run(policy=MyPolicy(), drafter="mtp:chain3", quick=True)
report.save("runs/audit")
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treejax.audit.asked import Asked
from treejax.audit.base import Report
from treejax.audit.work import Work
from treejax.model import Model
from treejax.progress import Advance, silent


def run(
    *audits: str,
    policy: Any = (),
    drafter: Any = (),
    rule: Any = (),
    faults: bool | str | Sequence[str] = False,
    quick: bool = False,
    model: Model | str | Path | None = None,
    dtype: str | None = None,
    implementation: str = "auto",
    envelope: str | Path | None = None,
    calibrate: str | Path | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    advance: Advance = silent,
) -> Report:
    """Audit policies, drafters, acceptance rules and a model; the command is the same.

    Args:
      audits: "component", "continuation", "sampler"; none named means all.
      policy: a name of ``treejax.policies.REGISTRY``, an object of your own, or a list. By default
        all of them, or with ``quick`` the one that generation takes by itself.
      drafter: "drafter:tree", an object, or a list; by default one of each kind, or with ``quick``
        the one that generation takes by itself.
      rule: a name of ``treejax.steps.rules.REGISTRY``, an object, or a list.
      faults: also plant faults, all or those named, and see whether the audits catch them.
      quick: seconds instead of a proof.
      model: a loaded one, a folder or a shipped name; by default the model that ships.
      dtype: of a model that is not loaded yet; "float32" by default.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret", of all policies.
      envelope: file of a calibrated envelope; by default one is calibrated first.
      calibrate: file to write the calibrated envelope to.
      seed, seeds: of what is random, and how many of them where an audit takes several.
      advance: told what is done, and how much of how much.

    Returns:
      The report. ``report.green`` is the verdict; ``report.save(folder)`` writes it as text, JSON
      and one HTML page; a notebook shows a short table.

    Raises:
      ValueError: one line: an unknown name, or an option that could not act.
    """
    asked = Asked(
        audits=audits,
        policy=_several(policy),
        drafter=_several(drafter),
        rule=_several(rule),
        faults=(None, ())[faults] if isinstance(faults, bool) else _several(faults),
        quick=quick,
        model=model,
        dtype=dtype,
        implementation=implementation,
        envelope=envelope,
        calibrate=calibrate,
        seed=seed,
        seeds=seeds,
    )
    work = Work.prepare(asked)
    for _ in work.parts(advance):
        pass
    if work.ended == "interrupted":
        raise KeyboardInterrupt
    return work.report()


def _several(value: Any) -> tuple[Any, ...]:
    """One thing or several, as several."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)
