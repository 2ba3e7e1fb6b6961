"""The same layers through PyTorch and flash-linear-attention (FLA), each under a CUDA graph.

They read the case's arrays in place. FLA knows no trees, so it runs every root-to-leaf path from a
copy of the state; making the copies is timed, gathering the operands into path order is not. FLA
returns outputs in the operands' dtype, and is asked for float32 final states where it publishes.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_kernels.bench.cases import Case
from pallas_kernels.bench.gate import Meter, Verdict
from pallas_kernels.bench.guard import one_line, say
from pallas_kernels.bench.timing import Timed
from pallas_kernels.bench.truth import Truth, exact, recurrence

PER_PATH, PUBLISH = "fla per path", "fla replay"
BOTH = f"{PER_PATH} + replay"
PACKAGES = {"torch": "torch", "fla": "flash-linear-attention"}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A captured peer.

    Attributes:
      operation: the operation whose bytes are its floor.
      layers: how many layers it runs; its time is scaled to all.
    """

    timed: Timed
    operation: str
    implementation: str
    layers: int
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Plan:
    """A peer before its capture; ``check`` compares what its last layer returned."""

    name: str
    operation: str
    layers: int
    run: Callable[[], Any]
    check: Callable[[Any, Meter], None]
    bound: float


def make_peers(case: Case, truth: Truth) -> list[Peer]:
    """Peers that are installed and work; one line says what is missing or fails."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        say(f"peers left out, not installed: {', '.join(missing)} (pip install {packages})")
    if "torch" in missing:
        return []
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        say("peers left out: this PyTorch sees no CUDA device")
        return []
    peers: list[Peer] = []
    try:
        plans = [loop_plan(torch, case, truth)]
        if "fla" not in missing:
            fla = importlib.import_module("fla.ops.gated_delta_rule")
            plans += fla_plans(torch, fla, case, truth)
    except Exception as error:  # whatever a foreign package raises must not end the run
        say(f"peers left out: {one_line(error)}")
        return peers
    for plan in plans:
        try:
            peers.append(_capture(torch, plan, len(case.layers)))
        except Exception as error:  # one peer that fails must not cost the others their rows
            say(f"{plan.name} left out: {one_line(error)}")
    return peers


def release() -> None:
    """Give PyTorch's cached memory back to the device, once its peers are gone."""
    if importlib.util.find_spec("torch") is not None:
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _capture(torch: Any, plan: Plan, layers: int) -> Peer:
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, tunes, and allocates
                plan.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = plan.run()
        graph.replay()
        torch.cuda.synchronize()
    meter = Meter()
    plan.check(result, meter)

    def run(calls: int) -> Callable[[], Any]:
        for _ in range(calls):
            graph.replay()
        return torch.cuda.synchronize

    errors = meter.errors()
    problems = tuple(
        f"{name}: relative RMS {error.rms:.1e}, expected {plan.bound:.0e}"
        for name, error in errors.items()
        if not error.rms <= plan.bound
    )
    return Peer(
        Timed(plan.name, run, share=plan.layers / layers),
        plan.operation,
        plan.name.split()[0],
        plan.layers,
        Verdict(errors, problems),
    )


def _numpy(x: Any) -> np.ndarray:
    return x.float().cpu().numpy()


class _Tensors:
    """The case's operands as tensors that share its memory."""

    def __init__(self, torch: Any, case: Case):
        self.pool = torch.from_dlpack(case.pool)
        self.q, self.k, self.v, self.g, self.beta = (
            [torch.from_dlpack(layer[field]) for layer in case.layers] for field in (0, 1, 2, 3, 5)
        )

    def rows(self, select: Callable[[Any], Any]) -> list[dict[str, Any]]:
        """Keyword arguments of FLA for each layer, with ``select`` applied to every operand."""
        names = ("q", "k", "v", "g", "beta")
        layers = zip(self.q, self.k, self.v, self.g, self.beta, strict=True)
        return [
            {n: select(x).contiguous() for n, x in zip(names, layer, strict=True)}
            for layer in layers
        ]


def fla_plans(torch: Any, fla: Any, case: Case, truth: Truth) -> list[Plan]:
    fused, chunk = fla.fused_recurrent_gated_delta_rule, fla.chunk_gated_delta_rule
    tensors, tree, layers = _Tensors(torch, case), case.tree, len(case.layers)
    device, paths = tensors.pool.device, tree.leaf_paths
    index = torch.tensor(sum(paths, []), device=device)
    lengths = [len(path) for path in paths] * case.batch
    starts = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), device=device)
    by_path = tensors.rows(lambda x: x[:, index].reshape(1, -1, *x.shape[2:]))
    in_order = tensors.rows(lambda x: x[:, : tree.size])
    path_index = torch.tensor(tree.published, device=device)
    published = tensors.rows(lambda x: x[:, path_index])
    last = layers - 1
    ready = tensors.pool[last].repeat_interleave(len(paths), 0)
    loose = 5e-3 if case.settings.dtype == "bfloat16" else 1e-5  # outputs in the operands' dtype

    def per_path(expand: bool) -> Callable[[], Any]:
        def run() -> Any:
            out = None
            for layer, rows in enumerate(by_path):
                states = tensors.pool[layer].repeat_interleave(len(paths), 0) if expand else ready
                out, _ = fused(
                    **rows, scale=1.0, initial_state=states, cu_seqlens=starts, state_v_first=True
                )
            return out

        return run

    def chain(function: Any, rows: list[dict[str, Any]]) -> Callable[[], Any]:
        def run() -> Any:
            made = None
            for layer, operands in enumerate(rows):
                made = function(
                    **operands,
                    scale=1.0,
                    initial_state=tensors.pool[layer],
                    output_final_state=True,
                    state_v_first=True,
                )
            return made

        return run

    def both() -> Any:
        return per_path(True)(), chain(fused, published)()

    def check_paths(out: Any, meter: Meter) -> None:
        expected = truth.tree(last, 0)[0][sum(paths, [])]
        meter.add("outputs", _numpy(out[0, : len(expected)]), expected)

    def check_publish(made: Any, meter: Meter) -> None:
        meter.add("states", _numpy(made[1][0]), truth.tree(last, 0)[1][tree.published[-1]])

    def check_both(made: Any, meter: Meter) -> None:
        check_paths(made[0], meter)
        check_publish(made[1], meter)

    def check_chain(made: Any, meter: Meter) -> None:
        rows = tuple(exact(x[0]) for x in (*case.layers[last][:4], case.layers[last].beta))
        parents = range(-1, tree.size - 1)
        outputs, states = recurrence(exact(case.pool[last, 0]), parents, rows, {tree.size - 1})
        meter.add("outputs", _numpy(made[0][0]), outputs)
        meter.add("states", _numpy(made[1][0]), states[tree.size - 1])

    before = f"{PER_PATH}, states copied before"
    chained = [
        Plan(f"fla {name} of {tree.size}", "chain", layers, chain(f, in_order), check_chain, bound)
        for name, f, bound in (("chain", fused, loose), ("chunk", chunk, 5e-2))
    ]
    return [
        Plan(PER_PATH, "path_scan", layers, per_path(True), check_paths, loose),
        Plan(before, "path_scan", layers, per_path(False), check_paths, loose),
        Plan(PUBLISH, "replay", layers, chain(fused, published), check_publish, 1e-5),
        Plan(BOTH, "path_scan+replay", layers, both, check_both, loose),
        *chained,
    ]


def loop_plan(torch: Any, case: Case, truth: Truth) -> Plan:
    """Node by node in plain PyTorch, batch and heads at once: the last layer only."""
    tree, last = case.tree, len(case.layers) - 1
    layer, ratio = case.layers[last], case.settings.ratio
    R0 = torch.from_dlpack(case.pool)[last]
    q, k, v, alpha, beta = (
        torch.from_dlpack(x) for x in (layer.q, layer.k, layer.v, layer.alpha, layer.beta)
    )
    q, k = q.float().repeat_interleave(ratio, 2), k.float().repeat_interleave(ratio, 2)
    v = v.float()

    def run() -> Any:
        states, outputs = {-1: R0}, []
        for node, parent in enumerate(tree.parents):
            key = k[:, node, :, None, :]
            decayed = alpha[:, node, :, None, None] * states[parent]
            u = beta[:, node, :, None] * (v[:, node] - (decayed * key).sum(-1))
            states[node] = decayed + u[..., None] * key
            outputs.append((states[node] * q[:, node, :, None, :]).sum(-1))
        return torch.stack(outputs, 1)

    def check(out: Any, meter: Meter) -> None:
        meter.add("outputs", _numpy(out[0]), truth.tree(last, 0)[0])

    return Plan("torch loop over nodes", "node_scan", 1, run, check, 1e-5)
