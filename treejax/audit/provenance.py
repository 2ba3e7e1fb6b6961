"""Who was audited, on what, and what the numbers were made with."""

from collections.abc import Iterable
from typing import Any

import jax

from treejax.ablation.report import environment
from treejax.audit.asked import Asked
from treejax.audit.envelope import identity
from treejax.audit.plan import Plan
from treejax.checkpoint import find_folder
from treejax.drafters import Drafter
from treejax.drafters.spec import spec_of
from treejax.model import Model
from treejax.policies import policy_title


def audited(asked: Asked, plan: Plan, model: Model | None) -> dict[str, Any]:
    """What a reader wants to know first: name and value."""
    chosen = set(asked.chosen)
    planted = "" if asked.faults is None else ", planted faults"
    profile = "quick" if asked.quick else "full"
    facts: dict[str, Any] = {"audits": f"{', '.join(asked.chosen)}{planted}: {profile} profile"}
    if chosen & {"component", "continuation"}:
        facts["policies"] = _list(map(policy_title, plan.policies))
    if plan.subjects:
        facts["drafters"] = _list(_draft(subject.drafter) for subject in plan.subjects)
    rules = [subject.rule.name for subject in plan.subjects]
    rules += [rule.name for rule in plan.rules] if "sampler" in chosen else []
    if rules:
        facts["rules"] = _list(rules)
    if model is not None:
        known = identity(model)
        facts["model"] = f"{_model_name(asked)}, {known['dtype']}, fingerprint {known['model']}"
    device = jax.devices()[0]
    kernels = _list(policy.implementation for policy in plan.policies)
    facts["runs on"] = f"{device.platform}: {device.device_kind}, {kernels}"
    return facts


def made_with(asked: Asked, model: Model | None) -> dict[str, Any]:
    """Commit, versions, device and settings, as JSON takes them."""
    facts = environment("", asked.seed or 0, ())
    for name in ("config", "arguments", "seed"):  # of an experiment's; the parts have their own
        del facts[name]
    if model is not None:
        facts |= {f"model's {name}": value for name, value in identity(model).items()}
        facts["model"] = _model_name(asked)
        facts["family"] = model.config.family
    return facts


def _model_name(asked: Asked) -> str:
    if isinstance(asked.model, Model):
        return "a loaded model"
    return find_folder(asked.model).name


def _draft(drafter: Drafter) -> str:
    return f"{spec_of(drafter)}:{drafter.shape.name}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
