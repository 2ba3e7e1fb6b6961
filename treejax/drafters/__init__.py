"""Drafters: what proposes the trees that the model verifies.

``base`` says what a drafter is, ``topologies`` names tree shapes. ``mtp``, ``mtp_tree``, ``suffix``
and the mix ``mtp+suffix`` draft for use, ``scripted`` for tests and controlled ablations, ``plain``
proposes nothing. ``budget`` and ``dcut`` decide how much of what others propose is verified.
``head`` and ``lookup`` hold what several share; a ``ResponseStore`` keeps finished responses for
later requests.
"""

import dataclasses
from typing import Any

from treejax.drafters.adaptive import Mix
from treejax.drafters.base import Draft, Drafter, Shaped
from treejax.drafters.budget import Budget
from treejax.drafters.dcut import DCut
from treejax.drafters.lookup import Lookup
from treejax.drafters.mtp import MTP
from treejax.drafters.mtp_suffix import MTPSuffix
from treejax.drafters.mtp_tree import MTPTree
from treejax.drafters.plain import Plain
from treejax.drafters.resting import Resting
from treejax.drafters.scripted import Scripted
from treejax.drafters.spec import convert, read_spec
from treejax.drafters.store import ResponseStore
from treejax.drafters.suffix import Suffix
from treejax.drafters.topologies import Best, Hydra, StaticTree, parse

__all__ = [
    "MTP",
    "REGISTRY",
    "Best",
    "Budget",
    "DCut",
    "Draft",
    "Drafter",
    "Hydra",
    "Lookup",
    "MTPSuffix",
    "Mix",
    "MTPTree",
    "Plain",
    "ResponseStore",
    "Resting",
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
    "budget": Budget,
    "scripted": Scripted,
}


_PARTS = "name", "proposals", "shape", "capacity", "max_depth", "forms"
_FUNCTIONS = "init", "prime", "propose", "observe", "rest", "learn", "pace"


def check_drafter(drafter: Any) -> None:
    """Refuse what is no drafter object; a name is one of ``make_drafter``'s.

    Raises:
      ValueError: one line: a class, or parts that are lacking.
    """
    if isinstance(drafter, type):
        raise ValueError(
            f"{drafter.__name__} (a class) is no drafter: it must be an object, call it with its "
            "tree"
        )
    lacking = [name for name in _PARTS if not hasattr(drafter, name)]
    lacking += [f"{name}()" for name in _FUNCTIONS if not callable(getattr(drafter, name, None))]
    if lacking:
        raise ValueError(
            f"{type(drafter).__name__} is no drafter: it lacks {', '.join(lacking)}; "
            "treejax.drafters.Drafter says what one is"
        )


def make_drafter(
    drafter: str | Drafter | None, tree: str | StaticTree | Best | None = None
) -> Drafter:
    """The drafter that ``REGISTRY`` names, or the object itself; ``tree`` replaces its own.

    A name may bring settings: ``mtp@draws=coupled``. None is ``Plain``, which proposes nothing.

    Raises:
      ValueError: one line: an unknown name, setting or tree, a tree that cannot be filled, or an
        object that is no drafter.
    """
    if tree is not None and not isinstance(tree, str | StaticTree | Best):
        raise ValueError(f"tree is {tree!r}, expected a name such as 'chain5', or a tree object")
    if drafter is None:
        if tree is not None:
            raise ValueError(f"tree {tree!r} has no drafter to fill it, leave it out or name one")
        return Plain()
    if isinstance(drafter, str):
        name, settings = read_spec(drafter)
        if name not in REGISTRY:
            raise ValueError(f"drafter {name!r} is unknown, expected one of: {', '.join(REGISTRY)}")
        kind: Any = REGISTRY[name]
        values = convert(kind, drafter, settings)
        if tree is not None:
            if not issubclass(kind, Shaped):
                raise ValueError(f"drafter {name!r} brings its own trees, leave out {tree!r}")
            values["tree"] = tree
        made: Any = kind(**values)
        return made
    check_drafter(drafter)
    if tree is None:
        return drafter
    if isinstance(drafter, Plain | Resting) or not isinstance(drafter, Shaped):
        raise ValueError(f"drafter {drafter.name!r} brings its own tree, leave out {tree!r}")
    filled: Any = dataclasses.replace(drafter, tree=tree)
    return filled
