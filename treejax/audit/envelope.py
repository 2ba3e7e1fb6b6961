"""Bounds for an engine's distances from plain decoding: calibrated, written down, then frozen.

Controls are plain decoding done otherwise (``audit.continuation.controls``): what separates them
from plain is rounding and nothing else. A bound is ``floor + factor x`` the controls' largest
distance, by surface and layer. Long runs, over which rounding adds up, have bounds of their own
from a control of their length (``audit.continuation.long_control``). An envelope names what it was
made of and carries a digest of all it says, so that neither a change of its numbers nor its use for
another model goes unnoticed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.surfaces import SURFACES
from treejax.model import Model

FLOORS = {
    "float32": {"relative": 2e-5, "nats": 1e-9, "margin": 1e-5},
    "bfloat16": {"relative": 2**-7, "nats": 1e-3, "margin": 2**-3},
}
"""The least that a bound may be: relative distances, nats of divergence, and nats between two
tokens that may be exchanged. In float32 2e-5 is some 170 units in the last place, room for policies
that sum in another order than any control (a solve in place of single updates: up to 1e-5 was
seen); in bfloat16 two units of a stored row."""

CEILINGS = {
    "float32": {"relative": 2e-3, "nats": 1.5e-2},
    "bfloat16": {"relative": 0.4, "nats": 0.5},
}
"""Controls that need wider bounds than these prove nothing, and calibrating says so. In float32
they are a tenth of the smallest bounds of LumoTree's audit: 0.02 and 0.15 nats."""

LONG_CEILING = 9e-5
"""In float32 relative bounds of long runs are no larger, so that an error of 1e-4 in one head is
caught after thousands of tokens as well; or twice the control's distance where that is more."""

LUMOTREE = {"relative": 0.02, "nats": 0.15}
"""The floors of LumoTree's bounds, each candidate being allowed twice its bound."""


@dataclasses.dataclass(frozen=True)
class Envelope:
    """What distances may be.

    Attributes:
      bounds: by surface, a number a layer of that surface (one for ``divergence``, ``drafter`` and
        ``margin``): the largest distance that passes.
      controls: by control and surface, the largest distance seen, over layers.
      provenance: what it was calibrated on: model, config, device, versions, prefixes, settings;
        under "long run" texts, tokens and prefixes of its control.
      long: as ``bounds``, for long runs; empty if it was calibrated without one.
    """

    bounds: Mapping[str, tuple[float, ...]]
    controls: Mapping[str, Mapping[str, float]]
    provenance: Mapping[str, Any]
    long: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of everything it says."""
        said = json.dumps(self._content(), sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def margin(self) -> float:
        """Nats between plain's two best tokens below which rounding may exchange them."""
        return self.bounds["margin"][0]

    def widest(self, surface: str) -> float:
        """The bound of the layer that has the largest."""
        return max(self.bounds[surface], default=0.0)

    def over_long_runs(self) -> "Envelope":
        """The envelope that holds in a long run: its own bounds in place of the others."""
        return dataclasses.replace(self, bounds=self.long, long={})

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with its digest."""
        text = json.dumps({**self._content(), "digest": self.digest}, indent=1, sort_keys=True)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Envelope":
        """Read what ``save`` wrote.

        Raises:
          ValueError: one line: no such file, not an envelope, or its content was changed.
        """
        try:
            said = json.loads(Path(path).read_text(encoding="utf-8"))
            digest = said.pop("digest")
            bounds, long = (
                {name: tuple(values) for name, values in part.items()}
                for part in (said.pop("bounds"), said.pop("long", {}))
            )
            made = cls(bounds, said.pop("controls"), said.pop("provenance"), long)
        except FileNotFoundError:
            raise ValueError(f"no such envelope: {path}") from None
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{path} is no envelope, expected what Envelope.save wrote") from None
        if said or made.digest != digest:
            raise ValueError(
                f"{path} was changed after it was calibrated (its digest does not fit), "
                "expected an untouched file: calibrate again"
            )
        return made

    def check_use(self, model: Model, long_tokens: int = 0) -> None:
        """Refuse another model, dtype, config or kind of device than it was calibrated for, and
        one that has no bounds for what is measured today: ``long_tokens`` of a long run, say.

        Raises:
          ValueError: one line.
        """
        made_for = int(self.provenance.get("long run", {}).get("tokens", 0))
        if made_for < long_tokens:
            raise ValueError(
                f"the envelope has bounds for a long run of {made_for:,} tokens, expected "
                f"{long_tokens:,}: calibrate again with one, or audit without one (quick)"
            )
        for bounds in (self.bounds, self.long) if long_tokens else (self.bounds,):
            lacking = [name for name in (*SURFACES, "margin") if name not in bounds]
            if lacking:
                raise ValueError(
                    f"the envelope has no bounds for {', '.join(lacking)}, expected all of what is "
                    "measured: calibrate again"
                )
        mine = identity(model)
        for name, value in mine.items():
            if self.provenance.get(name) != value:
                raise ValueError(
                    f"the envelope was calibrated for another {name} "
                    f"({self.provenance.get(name)}), expected {value}: calibrate for this one"
                )

    def _content(self) -> dict[str, Any]:
        long = {name: list(values) for name, values in self.long.items()}
        return {
            **({"long": long} if long else {}),  # files from before there were any say nothing
            "bounds": {name: list(values) for name, values in self.bounds.items()},
            "controls": {name: dict(values) for name, values in self.controls.items()},
            "provenance": dict(self.provenance),
        }


def bounds_from(
    dtype: str, worst: Mapping[str, np.ndarray], factor: float
) -> dict[str, tuple[float, ...]]:
    """Bounds from the controls' largest distances by surface and layer.

    ``worst["logits"]`` is the largest change of one logit: two may move against each other by twice
    that, which is the margin, without a factor: it excuses tokens, and must not grow lenient.

    Raises:
      ValueError: the controls lie too far apart to prove anything, or are not finite.
    """
    floors, ceilings, bounds = FLOORS[dtype], CEILINGS[dtype], {}
    for name, values in worst.items():
        if name == "logits":
            continue
        unit = "nats" if name == "divergence" else "relative"
        made = floors[unit] + factor * np.ravel(values)
        if made.size and not made.max() <= ceilings[unit]:
            raise ValueError(
                f"plain decoding done otherwise differs in {name} by {np.max(values):.2g}, "
                f"expected at most {(ceilings[unit] - floors[unit]) / factor:.2g}: no envelope of "
                f"{dtype} can be calibrated on this model and device"
            )
        bounds[name] = tuple(made.tolist())
    margin = max(floors["margin"], 2.0 * float(np.max(worst["logits"])))
    return bounds | {"margin": (margin,)}


def long_bounds_from(
    dtype: str, worst: Mapping[str, np.ndarray], factor: float
) -> dict[str, tuple[float, ...]]:
    """``bounds_from`` what the control of a long run showed, held down to ``LONG_CEILING``."""
    made = bounds_from(dtype, worst, factor)
    if dtype != "float32":
        return made
    for name in set(made) - {"divergence", "margin"}:
        most = np.maximum(LONG_CEILING, 2.0 * np.ravel(worst[name]))
        made[name] = tuple(np.minimum(made[name], most).tolist())
    return made


def identity(model: Model) -> dict[str, str]:
    """What an envelope is bound to: parameters, config, dtype, and the kind of device."""
    config = json.dumps(dataclasses.asdict(model.config), sort_keys=True)
    return {
        "dtype": jnp.dtype(model.dtype).name,
        "config": hashlib.sha256(config.encode()).hexdigest()[:16],
        "model": _fingerprint(model),
        "device": jax.devices()[0].device_kind,
    }


def _fingerprint(model: Model) -> str:
    """16 hexadecimal digits over name, shape, dtype and evenly spread values of every parameter."""
    made = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(model.params)[0]:
        made.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        flat = np.ravel(np.asarray(leaf))
        made.update(flat[:: max(1, flat.size // _SAMPLED)].tobytes())
    return made.hexdigest()[:16]


_SAMPLED = 4096  # values of a parameter, at least, if it has as many
