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

_PARTS = "name", "implementation", "init", "plan", "scan", "commit", "read", "buffers"


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
    lacking = [part for part in _PARTS if not hasattr(policy, part)]
    if lacking:
        raise ValueError(
            f"{type(policy).__name__} is no policy: it lacks {', '.join(lacking)} (see "
            "treejax.policies.base.Policy)"
        )
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


__all__ = ["REGISTRY", "Path", "Policy", "Scanned", "kernel_problem", "kernel_rows", "make_policy"]
