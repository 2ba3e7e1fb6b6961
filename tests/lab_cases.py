"""What the laboratory's tests share: small sizes, a context that collects, planted faults."""

import dataclasses
from typing import ClassVar

from treejax.ablation.base import Context
from treejax.policies import WY

SIZES = {
    "layers": 2,
    "value_heads": 2,
    "key_heads": 1,
    "key_dim": 16,
    "value_dim": 16,
    "dtype": "float32",
}


def context(tmp_path, lines=None, implementation="xla"):
    lines = [] if lines is None else lines
    return Context(
        out=tmp_path,
        advance=lambda description, done, total: None,
        say=lines.append,
        implementation=implementation,
    )


def rows_of(experiment, context, cells=None):
    """All rows of a run."""
    cells = experiment.cells(context) if cells is None else cells
    return list(experiment.run(context, cells, []))


@dataclasses.dataclass(frozen=True)
class Sibling(WY):
    """Commits one node less than was accepted: a state that is nearly right."""

    name: ClassVar[str] = "sibling"

    def commit(self, carry, scratch, path):
        return super().commit(carry, scratch, path.replace(length=path.length - 1))


@dataclasses.dataclass(frozen=True)
class Swapped(WY):
    """Reads the other layer's state while verifying."""

    name: ClassVar[str] = "swapped"

    def scan(self, carry, layer, operands, plan):
        other = carry.shape[0] - 1 - layer
        return super().scan(carry, other, operands, plan)._replace(carry=carry)


@dataclasses.dataclass(frozen=True)
class Broken(WY):
    """Cannot be traced at all."""

    name: ClassVar[str] = "broken"

    def plan(self, topology):
        raise NotImplementedError("planted")


FAULTS = {"sibling": Sibling, "swapped": Swapped, "broken": Broken}
