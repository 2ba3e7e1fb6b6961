"""State policies: one file each, one line each in ``REGISTRY``."""

import dataclasses
from typing import Any

from pallas_kernels.implementation import IMPLEMENTATIONS, resolve
from treejax.policies.base import Path, Policy, Scanned, kernel_problem, kernel_rows
from treejax.policies.fused import Fused
from treejax.policies.neumann import Neumann
from treejax.policies.per_path import PerPath
from treejax.policies.replay import Replay
from treejax.policies.ring import Ring
from treejax.policies.snapshot import Snapshot
from treejax.policies.solve_replay import SolveReplay
from treejax.policies.wy import WY

REGISTRY: dict[str, Any] = {
    "snapshot": Snapshot,
    "replay": Replay,
    "wy": WY,
    "solve_replay": SolveReplay,
    "fused": Fused,
    "ring": Ring,
    "neumann": Neumann,
    "per_path": PerPath,
}

_FUNCTIONS = "init", "plan", "scan", "commit", "read", "buffers"


def check_policy(policy: Any) -> None:
    """Refuse what is no policy object; a name is one of ``make_policy``'s.

    Raises:
      ValueError: one line: a class, parts that are lacking, or an object that jit cannot take.
    """
    if isinstance(policy, type):
        raise ValueError(
            f"{policy.__name__} (a class) is no policy: it must be an object, call it with its "
            "settings"
        )
    what = type(policy).__name__
    lacking = [name for name in ("name", "implementation") if not hasattr(policy, name)]
    lacking += [f"{name}()" for name in _FUNCTIONS if not callable(getattr(policy, name, None))]
    if lacking:
        raise ValueError(
            f"{what} is no policy: it lacks {', '.join(lacking)}; treejax.policies.Policy says "
            "what one is"
        )
    try:
        hash(policy)
    except TypeError:
        raise ValueError(
            f"policy {policy.name!r} cannot be hashed, and jit keys its programs by it: make its "
            "class a frozen dataclass"
        ) from None


def policy_title(policy: Policy) -> str:
    """What reports call a policy: its name, and its class in brackets where the name is another's.

    "wy (Mine)" is an object of a class Mine that inherits its name, or takes one of ``REGISTRY``.
    """
    kind = type(policy)
    own = "name" in vars(kind) or "name" in getattr(policy, "__dict__", ())
    if own and REGISTRY.get(policy.name, kind) is kind:
        return policy.name
    return f"{policy.name} ({kind.__name__})"


def make_policy(
    policy: str | Policy, implementation: str = "auto", unsupported: str | None = None
) -> Policy:
    """A policy from its name, or the object itself with its settings, on one implementation.

    Args:
      implementation: "auto" (the kernels where they can run), "xla", "mosaic_gpu" or "interpret",
        for a name or for an object that says "auto"; others keep their own.
      unsupported: why the kernels cannot serve what the policy is for (``kernel_problem``).

    Raises:
      ValueError: an unknown name, an object that is no policy or of another implementation, or
        kernels that cannot run.
    """
    if isinstance(policy, str):
        if policy == "auto":
            raise ValueError(
                "policy 'auto' depends on batch and tree: complete and stream take it, elsewhere "
                "choose_policy(config, batch, nodes).policy names one"
            )
        if policy not in REGISTRY:
            raise ValueError(f"unknown policy {policy!r}, expected one of: {', '.join(REGISTRY)}")
        return REGISTRY[policy](implementation=resolve(implementation, unsupported))
    check_policy(policy)
    settings: Any = policy
    own = policy.implementation
    if own == "auto":
        chosen = resolve(implementation, unsupported)
        return dataclasses.replace(settings, implementation=chosen)
    if own not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"unknown implementation {own!r}, expected one of: {known}")
    if implementation not in ("auto", own):
        raise ValueError(
            f"the policy's implementation is {own!r} and {implementation!r} was asked for: "
            "give it implementation='auto', or leave one out"
        )
    return policy


__all__ = [
    "REGISTRY",
    "Path",
    "Policy",
    "Scanned",
    "check_policy",
    "kernel_problem",
    "kernel_rows",
    "make_policy",
    "policy_title",
]
