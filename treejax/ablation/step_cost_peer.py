"""The peer of ``step_cost``: plain greedy decoding by transformers' ``generate``, random weights.

A process of its own, so that nothing of it stays on the device:

    python -m treejax.ablation.step_cost_peer '{"layers": 64, ...}'

prints one JSON object: seconds a token, or why it could not run. The experiment runs it before any
of its own arrays are made. JAX takes most of a GPU's memory when it starts, unless told not to
(``XLA_PYTHON_CLIENT_PREALLOCATE=false``): a peer that finds too little says so in its row.
"""

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from treejax.ablation.step_cost_model import ModelSizes

PEER = "transformers"
FAST = ("fla", "causal_conv1d")
"""Packages whose kernels transformers takes for the recurrent layers, where they are there."""


def run_peer(
    sizes: ModelSizes, batch: int, context: int, tokens: int, rounds: int, limit: float
) -> dict[str, Any]:
    """What the process found: ``ms`` a step and more, or ``problem``."""
    asked = {
        "layers": sizes.layers,
        "layer_types": list(sizes.config.layer_types),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_value_heads,
        "head_dim": sizes.head_dim,
        "linear_num_value_heads": sizes.value_heads,
        "linear_num_key_heads": sizes.key_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.conv,
        "vocab_size": sizes.vocabulary,
        "dtype": sizes.dtype,
        "batch": batch,
        "context": context,
        "tokens": tokens,
        "rounds": rounds,
    }
    missing = [name for name in ("torch", PEER) if importlib.util.find_spec(name) is None]
    if missing:
        return {"problem": f"{' and '.join(missing)} not installed: pip install 'treejax[parity]'"}
    command = [sys.executable, "-m", __name__, json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"it took more than {limit:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"problem": f"it ended with status {done.returncode}: {last}"[:300]}
    return json.loads(lines[-1])


def generate(asked: dict[str, Any]) -> dict[str, Any]:
    """Build the model on the device and time ``generate``, in this process."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module(PEER)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, context, tokens, rounds = (
        asked.pop(name) for name in ("batch", "context", "tokens", "rounds")
    )
    layers, dtype = asked.pop("layers"), getattr(torch, asked.pop("dtype"))
    settings: Any = transformers.Qwen3_5TextConfig(
        num_hidden_layers=layers,
        max_position_embeddings=1 << 18,
        **asked,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    started = time.perf_counter()
    with torch.device(device):
        model: Any = transformers.Qwen3_5ForCausalLM(settings)
    model.eval()
    _wait(torch, device)
    built = time.perf_counter() - started
    prompt = torch.randint(0, asked["vocab_size"], (batch, context), device=device)

    def timed(count: int) -> float:
        _wait(torch, device)
        begun = time.perf_counter()
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )
        _wait(torch, device)
        assert made.shape[1] == context + count
        return time.perf_counter() - begun

    with torch.inference_mode():
        timed(2)  # kernels are compiled and chosen
        samples = [(timed(tokens) - timed(1)) / (tokens - 1) for _ in range(rounds)]
    samples.sort()
    return {
        "ms": 1e3 * samples[len(samples) // 2],
        "ms_min": 1e3 * samples[0],
        "ms_max": 1e3 * samples[-1],
        "build_s": built,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "fast_path": _fast_path(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def _fast_path() -> str:
    """The packages of kernels that can be imported, with their versions: transformers takes a
    function of theirs wherever it finds it, and its own in torch elsewhere."""
    there = []
    for name in FAST:
        try:
            module = importlib.import_module(name)
        except Exception:  # whatever keeps it from being imported keeps transformers from it too
            continue
        there.append(f"{name} {getattr(module, '__version__', '')}".strip())
    return ", ".join(there) or f"torch's own: neither {' nor '.join(FAST)} can be imported"


def _wait(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> int:
    print(json.dumps(generate(json.loads(arguments[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
