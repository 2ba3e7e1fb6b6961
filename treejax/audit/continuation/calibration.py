"""From the controls' distances to an envelope."""

import datetime
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.ablation.report import installed_version
from treejax.audit.continuation.controls import DEPTH, head_drafter, run_controls
from treejax.audit.continuation.long_control import run_long_control
from treejax.audit.continuation.settings import FULL, Settings
from treejax.audit.envelope import Envelope, bounds_from, identity, long_bounds_from
from treejax.audit.prefixes import digest
from treejax.audit.reference import Plain, decode
from treejax.audit.rows import RowLogits
from treejax.audit.surfaces import LAYERED, Measured
from treejax.drafters import Drafter
from treejax.model import Model


def calibrate(model: Model, settings: Settings = FULL) -> Envelope:
    """An envelope from the calibration prefixes. No subject takes part, and no held-out prefix.

    Raises:
      ValueError: the controls differ in what must be equal, or by more than can be rounding.
    """
    texts, drafter = settings.texts(model, "calibration"), head_drafter(model)
    plain = plain_of(model, texts, drafter, settings)
    controls = run_controls(
        *(model, texts, RowLogits(model, plain)),
        cycles=settings.cycles,
        keys=settings.keys(),
        sampling=settings.sampling,
        max_length=settings.rows(model, DEPTH),
        seed=settings.seed,
    )
    dtype, long = jnp.dtype(model.dtype).name, dict[str, tuple[float, ...]]()
    bounds = bounds_from(dtype, worst_of(itertools.chain(*controls.values())), settings.factor)
    provenance: dict[str, Any] = identity(model) | {
        "prefixes": digest(texts),
        "settings": settings.as_dict(),
        "drafter": f"{drafter.name}:{drafter.shape.name}",
        "treejax": installed_version("treejax"),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if settings.long_tokens:
        controls["long"], provenance["long run"] = run_long_control(model, settings)
        long = long_bounds_from(dtype, worst_of(controls["long"]), settings.factor)
    seen = {
        name: {
            surface: float(values.max(initial=0.0)) for surface, values in worst_of(made).items()
        }
        for name, made in controls.items()
    }
    return Envelope(bounds, seen, provenance, long)


def plain_of(
    model: Model, texts: Sequence[Sequence[int]], drafter: Drafter, settings: Settings
) -> Plain:
    """Plain decoding of prefixes, as far as the cycles may need, with this drafter's memory."""
    return decode(
        *(model, texts, settings.tokens(depth_of(drafter))),
        sampling=settings.sampling,
        keys=settings.keys(),
        max_length=settings.rows(model, depth_of(drafter)),
        drafter=drafter,
    )


def depth_of(drafter: Drafter) -> int:
    """The depth of trees that plain decoding must suffice for: the drafter's, or the controls'."""
    return max(drafter.max_depth, DEPTH)


def worst_of(steps: Iterable[Measured]) -> dict[str, np.ndarray]:
    """The largest distances of all steps, by surface and layer."""
    worst: dict[str, np.ndarray] = {}
    for step in steps:
        for surface, values in step.distances.items():
            worst[surface] = np.maximum(worst.get(surface, 0.0), by_layer(surface, values))
    return worst


def by_layer(surface: str, values: np.ndarray) -> np.ndarray:
    """[L] the largest distances [B, L, ...] of a surface; [1] where it has no layers."""
    if surface not in LAYERED:
        return values.max(keepdims=True).reshape(1)
    return np.moveaxis(values, 1, 0).reshape(values.shape[1], -1).max(axis=1)
