"""The bounds that planted faults are judged by: the continuation audit's own, or closer ones.

Both come from controls, plain decoding done otherwise, on calibration texts; no fault and no
subject under audit takes part. The closer ones' control is native decoding's verify of the trees
that the faults strike.
"""

import jax.numpy as jnp
import numpy as np

from treejax.audit.continuation.calibration import by_layer, calibrate
from treejax.audit.continuation.settings import Settings
from treejax.audit.detection.bench import Bench
from treejax.audit.detection.run import Judge, one_step
from treejax.audit.envelope import bounds_from
from treejax.audit.intake import NATIVE, engine_of
from treejax.audit.step import Subject, never
from treejax.audit.surfaces import LAYERED, measure
from treejax.steps.rules import REGISTRY as RULES

CLOSE = (*LAYERED, "row logits")
"""Surfaces for which the bench itself is a closer control than longer texts and other trees: the
smaller of the two bounds holds."""

FLOOR = 2**-18
"""Under the bounds that come from the bench, in float32: 32 units in the last place. The envelope's
own floor leaves room for longer texts and deeper trees than there are here."""


def judge_of(bench: Bench, factor: float, controls: Settings | None) -> Judge:
    """Bounds for faults, from a bench of calibration texts.

    Args:
      factor: of the bounds that come from the bench, over what its control showed.
      controls: of the continuation audit, whose envelope is then calibrated; None takes native
        decoding's verify of the bench's trees for the only control of all surfaces.
    """
    worst = _native(bench)
    dtype = jnp.dtype(bench.model.dtype).name
    near = bounds_from(dtype, worst, factor)
    if dtype == "float32":
        for name in CLOSE:
            near[name] = tuple((FLOOR + factor * np.ravel(worst[name])).tolist())
    if controls is None:
        return Judge(near)
    bounds = dict(calibrate(bench.model, controls).bounds)
    for name in CLOSE:
        bounds[name] = tuple(np.minimum(bounds[name], near[name]).tolist())
    return Judge(bounds)


def _native(bench: Bench) -> dict[str, np.ndarray]:
    """The largest distances of native decoding's own verify, by surface and layer."""
    subject = Subject(NATIVE, bench.drafter, RULES["match"])
    engine = engine_of(subject, bench.start, bench.plain.tokens[:, 0])
    worst: dict[str, np.ndarray] = {}
    for t in range(bench.steps):
        before = engine
        engine, shown = one_step(bench, subject, before, never(bench.batch), t)
        measured = measure(
            *(bench.model, subject, bench.weights, before, engine, shown, bench.expected),
            *(bench.offsets[t],),
            keys=bench.keys,
            sampling=bench.sampling,
        )
        for name, values in measured.distances.items():
            worst[name] = np.maximum(worst.get(name, 0.0), by_layer(name, values))
    return worst
