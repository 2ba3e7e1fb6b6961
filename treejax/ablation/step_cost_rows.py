"""What a row of ``step_cost`` says of a green arm: times, rates, bytes and memory."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from treejax.ablation.base import Cell, Row
from treejax.ablation.lab import GIB
from treejax.ablation.lab_run import MIB
from treejax.ablation.lab_timing import Time
from treejax.ablation.step_cost_arms import PLAIN, Arm
from treejax.ablation.step_cost_bench import Bench
from treejax.ablation.step_cost_model import ModelSizes, all_bytes, read_bytes
from treejax.ablation.step_cost_timing import (
    LOOP,
    PHASES,
    STEP,
    VISIT,
    Entry,
    Key,
    typical_length,
)
from treejax.state import abstract_state


def state_memory(arm: Arm, sizes: ModelSizes, batch: int, rows: int) -> dict[str, int]:
    """Bytes of an arm's durable state and of its policy's verify buffers, for the plan."""
    config = sizes.config
    shapes = abstract_state(config, batch, rows, jnp.dtype(sizes.dtype))
    R = shapes.pop("R")
    carry = jax.eval_shape(lambda R: arm.policy.init(R, config.linear_num_key_heads), R)
    logits = 4 * batch * arm.tree.capacity * sizes.vocabulary
    named = {"carry": all_bytes(carry), "conv, keys, values": all_bytes(shapes), "logits": logits}
    buffers = arm.policy.buffers(config, arm.tree.capacity, batch)
    return named | {"verify buffers": sum(buffers.values())}


def memory_of(bench: Bench) -> Row:
    """Memory while this arm runs its whole step alone: in use before, and the process's peak after.

    A peak cannot be reset: it is the arm's own only if no earlier arm went higher, so the rows say
    both. The state is given up again.
    """
    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("bytes_in_use")
    bench.hold()
    bench.rewind(bench.rows // 2)
    for _ in range(2):
        jax.block_until_ready((bench.step(), bench.carry))
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    state = all_bytes(bench.held.state)
    bench.release()
    temporary = bench.temporary_bytes
    return {
        "in_use_gib": None if before is None else before / GIB,
        "peak_gib": None if peak is None else peak / GIB,
        "state_mib": state / MIB,
        "temporary_mib": None if temporary is None else temporary / MIB,
    }


def row_measures(
    bench: Bench,
    cell: Cell,
    times: Mapping[Key, Time],
    entries: Sequence[Entry],
    bandwidth: float,
) -> Row:
    """Times of one arm at one context, beside plain's of the same rounds."""
    context, arm = int(cell.key["context"]), bench.arm
    typical = typical_length(arm.lengths)
    step = times[Key(arm.name, context, STEP, typical)]
    visit = times[Key(arm.name, context, VISIT, typical)]
    plain_step = times[Key(PLAIN, context, STEP, 1)].median
    made: Row = {"nodes": arm.tree.capacity - 1, "depth": arm.tree.max_depth}
    made |= step.measures(STEP) | {"rounds": step.rounds, "calls": step.calls}
    made |= {"typical_length": typical or None}
    made |= {"visit_ms": visit.median, "host_ms": visit.median - step.median}
    for part in PHASES:
        found = times.get(Key(arm.name, context, part))
        made |= {} if found is None else found.measures(part)
    read = read_bytes(bench.model.config, bench.model.params, bench.batch, context)
    made |= {f"{name}_mb": size / 1e6 for name, size in read.items()}
    made |= {
        "plain_step_ms": plain_step,
        "times_plain": step.median / plain_step,
        "weights_ms": 1e3 * read["weights"] / bandwidth,
        "read_ms": 1e3 * sum(read.values()) / bandwidth,
        "copy_gb_per_s": bandwidth / 1e9,
        "compile_s": sum(bench.compile_s.get(name, 0.0) for name in bench.whole.names),
        "loop_compile_s": bench.compile_s.get("loop"),
        "phases_compile_s": sum(bench.compile_s.get(name, 0.0) for name in PHASES),
        "implementation": arm.policy.implementation,
    }
    if bench.looped:
        looped = times[Key(arm.name, context, LOOP, typical)]
        made |= {"loop_ms": looped.median, "decoding": _visits(bench.steps_a_visit)}
    else:
        made["decoding"] = "a step a visit, waited for"
    # Whole decoding: the loop's own program, where it is there for both.
    part = LOOP if bench.looped else VISIT
    plain_rate = bench.batch / times[Key(PLAIN, context, part, 1)].median
    for length in arm.lengths or (0,):
        entry = next(e for e in entries if e.key == Key(arm.name, context, part, length))
        tokens = entry.tokens / max(1, entry.visits)
        own = times[entry.key].median
        name = f"at_{length}" if length else "as_drafted"
        made |= {
            f"step_ms_{name}": times[entry.key._replace(part=STEP)].median,
            f"tokens_per_s_{name}": 1e3 * tokens / own,
            f"speedup_{name}": tokens / own / plain_rate,
        }
    return made


def _visits(count: int) -> str:
    return f"{count} steps a visit, one ahead" if count > 1 else "a step a visit, one ahead"


def medians(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """The median over repeats of each measure that some row has."""
    made = {}
    for name in names:
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        made[name] = statistics.median(values) if values else None
    return made
