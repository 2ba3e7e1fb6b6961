"""The objects that an audit looks at, from what was asked for; and what it leaves out."""

import dataclasses
from collections.abc import Iterable

import jax

from pallas_kernels.implementation import device_problem
from treejax.audit.asked import AUDITS, Asked, read_drafter
from treejax.audit.continuation.audit import refuse_lossy
from treejax.audit.step import Subject
from treejax.drafters import REGISTRY as DRAFTERS
from treejax.drafters import Drafter
from treejax.loop import DEFAULT_DRAFTER, DEFAULT_TREE
from treejax.model import Model
from treejax.policies import REGISTRY as POLICIES
from treejax.policies import Policy, kernel_problem, make_policy, policy_title
from treejax.policies.choose import DEFAULT as DEFAULT_POLICY
from treejax.policies.choose import choose_policy
from treejax.steps.rules import REGISTRY as RULES
from treejax.steps.rules import named, rule_for
from treejax.steps.rules.base import Rule

FIRST_DRAFT = f"{DEFAULT_DRAFTER}:{DEFAULT_TREE}"
ALL_DRAFTS = (
    FIRST_DRAFT,
    "mtp@draws=coupled:3,2,1",
    "suffix:best16x8",
    "mtp+suffix:hydra27",
    "budget",
)
"""What the full profile audits under the default policy; every other policy is audited with the
first of them. The sizes of ``budget`` are chains of ``mtp`` and trees of ``mtp_tree``."""

DRAWN_DRAFTS = (
    "mtp@draws=without_replacement:3,2",
    "mtp@draws=iid:3,2",
    "mtp@draws=iid:chain3",
)
"""For rules that need candidates drawn from q: the first that a rule takes."""

DEFAULT_RULES = ("match",)  # generation's

HEADLESS_DRAFT = "suffix:best16x8"  # of a model without an MTP head, as in the loop


@dataclasses.dataclass(frozen=True)
class Plan:
    """Objects to audit.

    Attributes:
      policies: what the component audit takes.
      subjects: what the continuation audit takes.
      rules: what the sampler audit takes.
      missing: what is not audited, each in one line.
    """

    policies: tuple[Policy, ...]
    subjects: tuple[Subject, ...]
    rules: tuple[Rule, ...]
    missing: tuple[str, ...]


def make_plan(asked: Asked, model: Model | None) -> Plan:
    """The plan for a model; None where no chosen audit needs one.

    Raises:
      ValueError: one line: a drafter, rule or kernel that cannot serve.
    """
    named_policies = _policies(asked, model)
    policies = tuple(_on(asked.implementation, policy) for policy in named_policies)
    subjects: tuple[Subject, ...] = ()
    if model is not None and "continuation" in asked.chosen:
        subjects = tuple(dict.fromkeys(_subjects(asked, model, named_policies)))
    lossless = [name for name, rule in RULES.items() if rule.lossless]
    names = asked.rule or (DEFAULT_RULES if asked.quick else lossless)
    rules = tuple(named(rule) for rule in names)
    missing = tuple(_missing(asked, policies, subjects, rules))
    return Plan(policies, subjects, rules, missing)


def _policies(asked: Asked, model: Model | None) -> tuple[str | Policy, ...]:
    """Those asked for; else the loop's own choice, alone if it is to be quick, or before all."""
    if asked.policy:
        return asked.policy
    first = DEFAULT_POLICY
    if model is not None:
        nodes = read_drafter(FIRST_DRAFT).capacity
        kernels = _kernels(asked.implementation, kernel_problem(model.config, nodes))
        first = choose_policy(model.config, 1, nodes, kernels).policy
    return (first,) if asked.quick else tuple(dict.fromkeys((first, *POLICIES)))


def _kernels(implementation: str, unsupported: str | None = None) -> str:
    """What "auto" comes to, without the notice that ``resolve`` gives: the report says it."""
    if implementation != "auto":
        return implementation
    return "mosaic_gpu" if (unsupported or device_problem()) is None else "xla"


def _on(implementation: str, policy: str | Policy, unsupported: str | None = None) -> Policy:
    """The policy on an implementation; an object that names its own keeps it.

    Raises:
      ValueError: kernels were asked for and cannot run.
    """
    if isinstance(policy, str) or policy.implementation == "auto":
        implementation = _kernels(implementation, unsupported)
    return make_policy(policy, implementation, unsupported)


def _subjects(asked: Asked, model: Model, policies: tuple[str | Policy, ...]) -> Iterable[Subject]:
    """Every policy with every drafter where either was asked for; of the defaults, the first of the
    one with all of the other."""
    pairs = list(_drafts(asked, model))
    for at, policy in enumerate(policies):
        some = at == 0 or asked.policy or asked.drafter
        for drafter, rule in pairs if some else pairs[:1]:
            unsupported = kernel_problem(model.config, drafter.capacity)
            yield Subject(_on(asked.implementation, policy, unsupported), drafter, rule)


def _drafts(asked: Asked, model: Model) -> Iterable[tuple[Drafter, Rule]]:
    """What drafts, in each of its forms, and what accepts.

    Raises:
      ValueError: what was asked for cannot serve the model, or does not go together.
    """
    for rule in asked.rule or DEFAULT_RULES:
        for drafter in map(read_drafter, _names(asked, rule, model)):
            _refuse_unfit(drafter, model)
            for form in drafter.forms:
                made = rule_for(rule, form.proposals, form.shape)
                refuse_lossy(made)
                yield form, made


def _refuse_unfit(drafter: Drafter, model: Model) -> None:
    """Refuse a drafter that says that it cannot serve the model."""
    try:
        drafter.init(model, 1, drafter.capacity)
    except ValueError:
        raise
    except Exception:  # no refusal: the audit meets it again, and its report says so
        pass


def _names(asked: Asked, rule: str | Rule, model: Model) -> tuple[str | Drafter, ...]:
    """What drafts for a rule: what was asked for, or what the model has and the rule takes."""
    if asked.drafter:
        return asked.drafter
    if "mtp" not in model.params:
        return (HEADLESS_DRAFT,)
    if not asked.rule:
        return (FIRST_DRAFT,) if asked.quick else ALL_DRAFTS
    for name in (FIRST_DRAFT, *DRAWN_DRAFTS):
        drafter = read_drafter(name)
        try:
            rule_for(rule, drafter.proposals, drafter.shape)
        except ValueError:
            continue
        return (name,)
    return (FIRST_DRAFT,)  # and what rule_for says of it is the user's to read


def _missing(
    asked: Asked,
    policies: tuple[Policy, ...],
    subjects: tuple[Subject, ...],
    rules: tuple[Rule, ...],
) -> Iterable[str]:
    """What a reader might think was audited and was not."""
    chosen = asked.chosen
    out = [name for name in AUDITS if name not in chosen]
    if out:
        yield f"audits {', '.join(out)}: not asked for"
    if {"component", "continuation"} & set(chosen):
        yield from _others("policies", POLICIES, map(policy_title, policies))
        used = {policy.implementation for policy in policies}
        if "mosaic_gpu" not in used:
            yield f"kernels on a GPU: {device_problem() or 'implementation xla was asked for'}"
    if "continuation" in chosen:
        drafters = {subject.drafter.name for subject in subjects}
        if "resting" in drafters:  # one of budget's forms: all of them are subjects
            drafters.add("budget")
        yield from _others("drafters", DRAFTERS, drafters)
        if len(subjects) < len({s.policy for s in subjects}) * len({s.drafter for s in subjects}):
            yield "pairs of policy and drafter that the table of subjects does not name"
        if "budget" in drafters:
            yield "runs that change between the forms of a drafter, as budget does: each is audited"
    if "sampler" in chosen:
        yield from _others("rules", RULES, (rule.name for rule in rules))
    if {"continuation", "sampler"} & set(chosen):
        yield f"models in {'bfloat16' if asked.dtype != 'bfloat16' else 'float32'}"
    if asked.faults is None:
        yield "whether planted faults would be caught (faults)"
    yield f"devices other than {jax.devices()[0].device_kind}; several devices at once"


def _others(kind: str, known: Iterable[str], seen: Iterable[str]) -> Iterable[str]:
    seen = set(seen)
    left = [name for name in known if name not in seen]
    if left:
        yield f"{kind} {', '.join(left)}"
