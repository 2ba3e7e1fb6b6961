"""Drafters: what proposes the trees that the model verifies.

``base`` says what a drafter is, ``topologies`` names tree shapes. ``mtp``, ``suffix`` and their mix
``mtp+suffix`` draft for use, ``scripted`` for tests and controlled ablations, ``plain`` proposes
nothing. ``head`` and ``lookup`` hold what the first three share; a ``ResponseStore`` keeps finished
responses for later requests.
"""

import dataclasses

from treejax.drafters.base import Draft, Drafter, Shaped
from treejax.drafters.lookup import Lookup
from treejax.drafters.mtp import MTP
from treejax.drafters.mtp_suffix import MTPSuffix
from treejax.drafters.mtp_tree import MTPTree
from treejax.drafters.plain import Plain
from treejax.drafters.scripted import Scripted
from treejax.drafters.store import ResponseStore
from treejax.drafters.suffix import Suffix
from treejax.drafters.topologies import Best, Hydra, StaticTree, parse

__all__ = [
    "MTP",
    "REGISTRY",
    "Best",
    "Draft",
    "Drafter",
    "Hydra",
    "Lookup",
    "MTPSuffix",
    "MTPTree",
    "Plain",
    "ResponseStore",
    "Scripted",
    "StaticTree",
    "Suffix",
    "make_drafter",
    "parse",
]

REGISTRY = {
    "mtp": MTP,
    "mtp_tree": MTPTree,
    "suffix": Suffix,
    "mtp+suffix": MTPSuffix,
    "scripted": Scripted,
}


def make_drafter(
    drafter: str | Drafter | None, tree: str | StaticTree | Best | None = None
) -> Drafter:
    """The drafter that ``REGISTRY`` names, or the object itself; ``tree`` replaces its own.

    None is ``Plain``, which proposes nothing.

    Raises:
      ValueError: one line: an unknown name or tree, or a tree that this drafter cannot fill.
    """
    if drafter is None:
        if tree is not None:
            raise ValueError(f"tree {tree!r} has no drafter to fill it, leave it out or name one")
        return Plain()
    if isinstance(drafter, str):
        if drafter not in REGISTRY:
            raise ValueError(
                f"drafter {drafter!r} is unknown, expected one of: {', '.join(REGISTRY)}"
            )
        kind = REGISTRY[drafter]
        return kind() if tree is None else kind(tree=tree)
    if tree is None:
        return drafter
    if not isinstance(drafter, Shaped):
        raise ValueError(f"drafter {drafter.name!r} brings its own tree, leave out {tree!r}")
    return dataclasses.replace(drafter, tree=tree)
