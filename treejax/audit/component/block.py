"""One block of the component audit: one policy, one operand set, every accepted path of hydra27.

The tree is verified in two forms. With all 32 rows active, as LumoTree's kernels compute their
masked rows too: the outputs of 32 rows are compared. With 28 of 32 rows active, as treejax serves
it: the outputs of 28 rows are compared and the states of 28 paths are published; the four inactive
rows have no result that anybody may read, and so are no cells; that they change nothing is one of
the controls. In one commit every sequence accepts another path, and over 28 commits every instance
has published each of them.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from treejax.audit.component.operands import (
    HYDRA,
    MASKED,
    Drawn,
    Shape,
    draw,
    draw_states,
    path_to,
    plant,
)
from treejax.audit.component.rig import Rig, pack
from treejax.audit.component.truth import Nodes, Step, along, exact

WIDE = (*HYDRA, *MASKED)
"""Parents with the four masked rows active too."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An operand set: operands and states, which follow from the shape and the seed."""

    shape: Shape
    seed: tuple[int, ...]
    drawn: Drawn
    R: np.ndarray

    @classmethod
    def of(cls, shape: Shape, *seed: int) -> "Case":
        return cls(shape, seed, draw(shape, seed), draw_states(shape, seed))

    def truth(self) -> Nodes:
        """Float64 outputs and states of all 32 rows."""
        return along(self.R.astype(np.float64), [WIDE] * self.shape.batch, self.drawn, exact)

    def decoded(self, step: Step) -> Nodes:
        """The same by a native single-token step, float32."""
        return along(self.R, [WIDE] * self.shape.batch, self.drawn, step)


class Block(NamedTuple):
    """What a policy gave, float32.

    Attributes:
      wide: outputs [32, L, B, Hv, dv] with all rows active.
      outputs: [28, L, B, Hv, dv] with 28 of 32 rows active.
      states: [28, L, B, Hv, dv, dk] published by the path to each node.
    """

    wide: np.ndarray
    outputs: np.ndarray
    states: np.ndarray

    @property
    def digest(self) -> str:
        """Of every byte."""
        whole = hashlib.sha256()
        for array in self:
            whole.update(np.ascontiguousarray(array).tobytes())
        return whole.hexdigest()


def frontier(batch: int) -> Iterator[list[int]]:
    """The nodes that the sequences accept, commit by commit: after 28 each has had them all."""
    for turn in range(len(HYDRA)):
        yield [(turn + b) % len(HYDRA) for b in range(batch)]


def run_block(rig: Rig, case: Case) -> Block:
    """Verify twice and publish 28 times from the same start."""
    shape, operands = case.shape, case.drawn.layers()
    carry = rig.init(jnp.asarray(case.R), shape.key_heads)
    wide = rig.verify(carry, operands, plant(shape, [WIDE] * shape.batch))
    served = rig.verify(carry, operands, plant(shape, [HYDRA] * shape.batch))
    states, every = np.zeros((len(HYDRA), *case.R.shape), np.float32), np.arange(shape.batch)
    for nodes in frontier(shape.batch):
        path = pack([path_to(HYDRA, node) for node in nodes], shape.depth)
        R = rig.states(rig.publish(served, path))
        states[np.array(nodes), :, every] = R.swapaxes(0, 1)
    return Block(_by_row(wide.outputs), _by_row(served.outputs)[: len(HYDRA)], states)


def _by_row(outputs: object) -> np.ndarray:
    """[L, B, N, ...] as [N, L, B, ...]."""
    return np.moveaxis(np.asarray(outputs), 2, 0)
