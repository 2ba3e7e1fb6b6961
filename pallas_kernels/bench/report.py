"""What a run reports: a row a program, tables on stdout, and one JSON document.

Same numbers in both. A row whose gate is red shows its error and no rate.
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from pallas_kernels.bench.gate import Verdict
from pallas_kernels.bench.kernels import Kernel
from pallas_kernels.bench.peers import BOTH, PER_PATH, PUBLISH
from pallas_kernels.bench.programs import POLICIES
from pallas_kernels.bench.settings import Settings
from pallas_kernels.bench.state_error import StateError
from pallas_kernels.bench.timing import CLOCK, QUEUED, Summary

RIVALS = {
    "path_scan": PER_PATH,
    "wy_solve": PER_PATH,
    "replay": PUBLISH,
    "wy_commit": PUBLISH,
    "wy_commit_solve": BOTH,
    "path_scan+replay": BOTH,
    "wy_solve+wy_commit": BOTH,
    "wy_solve+replay": BOTH,
}
"""The peer that does the same work as an operation."""


@dataclasses.dataclass
class Row:
    """One program or peer at one batch size.

    Attributes:
      implementation: "mosaic_gpu" if the lowered program holds a kernel, "xla", "fla" or "torch".
      layers: that were run; ``time`` is scaled to all.
      bytes: the floor, for all layers.
      scratch_bytes: what XLA allocates beside arguments and results.
      kernels: what CUPTI saw, for the layers that were run; None if it was not asked.
    """

    batch: int
    name: str
    implementation: str
    layers: int
    bytes: int
    verdict: Verdict
    scratch_bytes: int | None = None
    time: Summary | None = None
    kernels: list[Kernel] | None = None

    @property
    def policy(self) -> str:
        return POLICIES.get(self.name, "")


class Report:
    """All that a run found so far, written to a file whenever something is added."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.environment = environment()
        self.bandwidth: dict[int, float] = {}  # bytes a second of the copy, by batch
        self.rows: list[Row] = []
        self.errors: list[StateError] = []
        self.complete = False

    @property
    def clock(self) -> str:
        return QUEUED if self.environment["platform"] == "gpu" else CLOCK

    @property
    def green(self) -> bool:
        return all(row.verdict.green for row in self.rows) and all(e.ok for e in self.errors)

    def ratio(self, row: Row) -> float | None:
        """How many times faster the row is than the peer that does the same work."""
        for other in self.rows:
            if other.batch == row.batch and other.name == RIVALS.get(row.name):
                if other.time and row.time:
                    return other.time.median / row.time.median
        return None

    def floor_ms(self, row: Row) -> float | None:
        bandwidth = self.bandwidth.get(row.batch)
        return 1e3 * row.bytes / bandwidth if bandwidth else None

    def document(self) -> dict[str, Any]:
        settings = dataclasses.asdict(self.settings)
        settings["json"] = str(self.settings.json) if self.settings.json else None
        return {
            "environment": self.environment,
            "settings": settings,
            "clock": self.clock,
            "complete": self.complete,
            "copy_bytes_per_s": {str(batch): value for batch, value in self.bandwidth.items()},
            "rows": [self._flat(row) for row in self.rows],
            "state_errors": [dataclasses.asdict(e) | {"ok": e.ok} for e in self.errors],
        }

    def write(self) -> None:
        """Replace the file as a whole, so that an interrupt leaves a readable one."""
        path = self.settings.json
        if path is None:
            return
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _flat(self, row: Row) -> dict[str, Any]:
        time, floor = row.time, self.floor_ms(row)
        return {
            "batch": row.batch,
            "name": row.name,
            "policy": row.policy or None,
            "implementation": row.implementation,
            "layers_run": row.layers,
            "gate": "green" if row.verdict.green else "red",
            "problems": list(row.verdict.problems),
            "errors": {
                name: {key: x if math.isfinite(x) else None for key, x in error._asdict().items()}
                for name, error in row.verdict.errors.items()
            },
            "bitwise": row.verdict.bitwise,
            "bytes": row.bytes,
            "scratch_bytes": row.scratch_bytes,
            "median_ms": time.median if time else None,
            "p10_ms": time.low if time else None,
            "p90_ms": time.high if time else None,
            "host_ms": time.host if time else None,
            "unqueued_ms": time.unqueued if time else None,
            "rounds": time.rounds if time else 0,
            "calls_per_sample": time.calls if time else None,
            "kernels": None if row.kernels is None else [k._asdict() for k in row.kernels],
            "floor_ms": floor,
            "bandwidth_share": floor / time.median if time and floor else None,
            "peer": RIVALS.get(row.name),
            "times_faster_than_peer": self.ratio(row),
        }

    def table(self, batch: int) -> Table:
        rows = [row for row in self.rows if row.batch == batch]
        s = self.settings
        bandwidth = self.bandwidth.get(batch)
        copied = f"copy {bandwidth / 1e9:.0f} GB/s" if bandwidth else "not timed"
        table = Table(
            title=f"B={batch}, {s.layers} layers of {s.value_heads}/{s.key_heads} heads x "
            f"{s.value_dim} x {s.key_dim}, {s.tree}, {s.dtype}, {s.precision}; "
            f"{self.environment['device']}, {copied}",
            caption=f"clock: {self.clock}. error: relative RMS against float64. MB, floor: bytes "
            "that cannot be avoided, and their time at the copy's bandwidth.",
        )
        table.add_column("operation")
        table.add_column("policy")
        table.add_column("by")
        names = ("error", "bits", "ms", "10-90 %", "MB", "floor", "of copy", "vs FLA")
        for name in (*names, *(["kernels, ms"] if s.cupti else [])):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*self._cells(row))
        return table

    def _cells(self, row: Row) -> list[str]:
        verdict, time, floor, ratio = row.verdict, row.time, self.floor_ms(row), self.ratio(row)
        worst = max((e.rms for e in verdict.errors.values()), default=None)
        scaled = "" if row.layers == self.settings.layers else f" ({row.layers} layers, scaled)"
        return [
            row.name + scaled + ("" if verdict.green else " RED"),
            row.policy,
            row.implementation,
            "–" if worst is None else f"{worst:.1e}",
            {None: "", True: "equal", False: "differ"}[verdict.bitwise],
            f"{time.median:.3f}" if time else "–",
            f"{time.low:.3f}-{time.high:.3f}" if time else "–",
            f"{row.bytes / 1e6:.1f}",
            f"{floor:.3f}" if floor else "–",
            f"{100 * floor / time.median:.0f} %" if time and floor else "–",
            f"{ratio:.2f}x" if ratio else "",
            *([_kernel_cell(row)] if self.settings.cupti else []),
        ]

    def error_table(self) -> Table:
        table = Table(title=f"State error against float64, {self.settings.dtype} operands")
        for name in ("operands", "tree", "nodes", "method", "outputs", "states", "allowed", ""):
            table.add_column(name)
        for e in self.errors:
            table.add_row(
                e.kind,
                e.tree,
                str(e.nodes),
                e.method,
                *("–" if x is None else f"{x:.1e}" for x in (e.outputs, e.states)),
                f"{e.bound:.1e}" if e.bound else "",
                "FAILED" if e.problem else "" if e.bound is None else "ok" if e.ok else "EXCEEDED",
            )
        return table


def _kernel_cell(row: Row) -> str:
    if not row.kernels:
        return ""
    return f"{sum(k.count for k in row.kernels)}, {sum(k.ms for k in row.kernels):.3f}"


def environment() -> dict[str, Any]:
    """What the numbers were made with; None where it cannot be read."""
    device = jax.devices()[0]
    folder = Path(__file__).parent
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    status = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "commit": commit,
        "dirty": None if commit is None else bool(status),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str | None:
    """The first line that a command prints, None if it fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        return None
    return lines[0] if lines else ""
