"""Measured step times as the places of ``treejax.policies.choose``: what policy ``auto`` reads."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from treejax.ablation.base import GREEN, Row
from treejax.ablation.lab_operands import Sizes
from treejax.ablation.lab_run import hide_red
from treejax.policies import REGISTRY


def places(rows: Sequence[Row], sizes: Sizes, device: str, nodes: int = 0) -> list[dict[str, Any]]:
    """One place a batch and tree size, each policy's time the median of its green rows.

    A policy that has a red row anywhere has no time.

    Arms with settings of their own are left out: a place says what a policy's name gives.

    Args:
      nodes: of the tree, where rows do not say.
    """
    times: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for row in hide_red(rows):
        if row["gate"] == GREEN and row["arm"] in REGISTRY:
            where = row["implementation"], row["batch"], row.get("nodes", nodes)
            times.setdefault(where, {}).setdefault(row["arm"], []).append(row["step_ms"])
    return [
        {
            "device": device,
            "implementation": implementation,
            "layers": sizes.layers,
            "heads": [sizes.key_heads, sizes.value_heads],
            "widths": [sizes.key_dim, sizes.value_dim],
            # Plain JAX holds every row in float32.
            "dtype": "float32" if implementation == "xla" else sizes.dtype,
            "batch": batch,
            "nodes": size,
            "names": list(arms),
            "ms": [float(f"{statistics.median(ms):.4g}") for ms in arms.values()],
        }
        for (implementation, batch, size), arms in times.items()
    ]


def write_places(rows: Sequence[Row], sizes: Sizes, out: Path, nodes: int = 0) -> None:
    """``measured.json`` of this device: its places may be added to ``treejax/policies``' own."""
    made = places(rows, sizes, jax.devices()[0].device_kind, nodes)
    lines = ",\n".join(json.dumps(place) for place in made)
    (out / "measured.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
