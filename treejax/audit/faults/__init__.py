"""Faults of the engine that an audit must catch; one line each."""

from treejax.audit.faults.base import Fault, Hit, Strike

REGISTRY: dict[str, Fault] = {}

__all__ = ["REGISTRY", "Fault", "Hit", "Strike"]
