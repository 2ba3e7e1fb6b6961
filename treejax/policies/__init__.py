"""State policies: one file each, one line each in ``REGISTRY``."""

from treejax.policies.base import Path, Policy
from treejax.policies.replay import Replay
from treejax.policies.snapshot import Snapshot
from treejax.policies.wy import WY

REGISTRY: dict[str, type] = {
    "snapshot": Snapshot,
    "replay": Replay,
    "wy": WY,
}


def make_policy(policy: str | Policy) -> Policy:
    """A policy from its name, or the object itself with its settings."""
    if not isinstance(policy, str):
        return policy
    if policy not in REGISTRY:
        raise ValueError(f"unknown policy {policy!r}, expected one of: {', '.join(REGISTRY)}")
    return REGISTRY[policy]()


__all__ = ["REGISTRY", "Path", "Policy", "make_policy"]
