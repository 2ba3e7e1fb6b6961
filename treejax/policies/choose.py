"""Which policy is fastest: looked up in a table of measurements, never guessed.

``measured.json`` holds step times (verify and publish of all recurrent layers) by device,
implementation, shape, batch and tree size; the experiments ``atlas`` and ``write_timing`` of
``python -m treejax.ablate`` write such files. A place that was not measured takes the nearest that
was, and says so; a device that was not gets the default.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from importlib import resources
from numbers import Integral
from typing import Any, NamedTuple

import jax

from pallas_kernels.implementation import resolve
from treejax.config import ModelConfig, from_mapping
from treejax.policies.base import kernel_problem

DEFAULT = "wy"
"""Where nothing was measured: small memory whatever the tree, and a solve on any device."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One place of the table.

    Attributes:
      device: its kind, as JAX names it. implementation: "xla" or "mosaic_gpu".
      heads: key and value heads. widths: dk and dv. dtype: of q, k and v.
      nodes: of the tree, the root included.
      names, ms: policies and their step times in milliseconds.
    """

    device: str
    implementation: str
    layers: int
    heads: tuple[int, ...]
    widths: tuple[int, ...]
    dtype: str
    batch: int
    nodes: int
    names: tuple[str, ...]
    ms: tuple[float, ...]

    @property
    def place(self) -> str:
        return (
            f"{self.layers} layers of {self.heads[1]}/{self.heads[0]} heads x {self.widths[0]} x "
            f"{self.widths[1]}, {self.dtype} rows, batch {self.batch}, {self.nodes} nodes"
        )


class Pick(NamedTuple):
    """A policy's name, and a line that says why it is this one."""

    policy: str
    why: str


def choose_policy(
    config: ModelConfig,
    batch: int = 1,
    nodes: int = 28,
    implementation: str = "auto",
    table: Sequence[Measured] | None = None,
) -> Pick:
    """The policy that was measured fastest for a model, a batch and trees of ``nodes`` rows.

    Args:
      implementation: as for ``init_state``.
      table: measurements; by default those that ship.

    Raises:
      ValueError: no such batch or tree, or kernels that cannot run.
    """
    for name, count in (("batch", batch), ("nodes", nodes)):
        whole = isinstance(count, Integral) and not isinstance(count, bool)
        if not whole or count < 1:
            raise ValueError(f"{name} is {count!r}, expected an integer of at least 1")
    how = resolve(implementation, kernel_problem(config, nodes))
    device = jax.devices()[0].device_kind
    table = read_table() if table is None else table
    known = [place for place in table if (place.device, place.implementation) == (device, how)]
    if not config.linear_layers:
        return Pick(DEFAULT, "the default: the model has no recurrent layers")
    if not known:
        return Pick(DEFAULT, f"the default: nothing was measured on {device} with {how}")
    here = Measured(
        device=device,
        implementation=how,
        layers=len(config.linear_layers),
        heads=(config.linear_num_key_heads, config.linear_num_value_heads),
        widths=(config.linear_key_head_dim, config.linear_value_head_dim),
        dtype="float32",  # what a model's convolution makes, whatever its weights are
        batch=batch,
        nodes=nodes,
        names=(),
        ms=(),
    )
    nearest = min(known, key=lambda place: _distance(place, here))
    ranked = sorted(zip(nearest.ms, nearest.names, strict=True))
    ms, name = ranked[0]
    others = ", ".join(f"{other} {time:.3g}" for time, other in ranked[1:3])
    why = f"{ms:.3g} ms a step ({others or 'alone'}) on {device} at {nearest.place}"
    if nearest.place != here.place:
        why += f", the nearest measured to {here.place}"
    return Pick(name, why)


def _distance(a: Measured, b: Measured) -> tuple[float, int]:
    """How far two places lie apart, in doublings of what their time grows with; more nodes win."""

    def apart(x: int, y: int) -> float:
        return abs(math.log2(x / y))

    sizes = [place.heads[1] * math.prod(place.widths) for place in (a, b)]
    far = apart(a.batch, b.batch) + apart(a.nodes, b.nodes) + apart(*sizes)
    return far + 0.25 * apart(a.layers, b.layers) + (a.dtype != b.dtype), -a.nodes


@functools.cache
def read_table() -> tuple[Measured, ...]:
    """The measurements that ship."""
    text = resources.files("treejax.policies").joinpath("measured.json").read_text("utf-8")
    return parse_table(json.loads(text))


def parse_table(rows: list[dict[str, Any]]) -> tuple[Measured, ...]:
    """Places from JSON; unknown keys, or policies without a time, are errors."""
    places = tuple(from_mapping(Measured, row, f"place {i}") for i, row in enumerate(rows))
    for place in places:
        if not place.names or len(place.names) != len(place.ms):
            raise ValueError(f"{place.place}: {len(place.names)} policies, {len(place.ms)} times")
    return places
