"""Measure a model on the source of a package that it never saw.

    python -m treejax.evaluate --wheel FILE.whl [--checkpoint DIR] [--limit-mb MB] [--json FILE]

Reads the package's non-test modules from its wheel and reports bits per byte (windows of 2,048
tokens every 1,024, every token of a file scored once) beside ``xz -9e`` on the concatenation, and
the mean number of drafts accepted from a greedy MTP chain of 3, after true prefixes of 512 tokens
and after 32 more tokens of the model's own. The table goes to stdout.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from treejax.checkpoint import load_model
from treejax.cli.cache import use_compilation_cache
from treejax.cli.guard import Parser, run_command
from treejax.delta_rule import CHUNK
from treejax.model import Model
from treejax.training import measures
from treejax.training.loss import attention_kernel
from treejax.training.wheels import read_modules

NAME = "treejax.evaluate"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(f"python -m {NAME}", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheel", required=True, help="wheel whose non-test modules are scored")
    parser.add_argument("--checkpoint", help="model folder; default: the model that ships")
    parser.add_argument("--limit-mb", type=float, help="score random files up to so many MB")
    parser.add_argument("--prefixes", type=int, default=1024, help="chains to draft; 0 for none")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--stride", type=int, default=1024)
    parser.add_argument("--batch", type=int, help="windows at once; default 32 on a GPU, else 1")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    options = parser.parse_args(arguments)
    if options.window % CHUNK or not 0 < options.stride <= options.window:
        parser.error(f"--window must be a multiple of {CHUNK}, and --stride at most --window")
    if options.prefixes < 0:
        parser.error("--prefixes must be 0 or more")
    for name in ("batch", "limit_mb"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return options


def choose_files(texts: dict[str, str], limit_mb: float | None) -> dict[str, str]:
    """All files, or whole files in a fixed random order until the limit is reached."""
    if limit_mb is None:
        return texts
    names = sorted(texts)
    np.random.default_rng(1).shuffle(names)
    chosen: dict[str, str] = {}
    size = 0
    for name in names:
        if size >= limit_mb * 1e6:
            break
        chosen[name] = texts[name]
        size += len(texts[name].encode("utf-8"))
    return chosen


def encode_files(model: Model, texts: list[str]) -> list[np.ndarray]:
    """Token ids of each text behind the token that starts a file."""
    first = model.config.bos_token_id
    if model.tokenizer is None or first is None:
        raise ValueError("the checkpoint has no tokenizer or no bos_token_id, expected both")
    encoded = model.tokenizer.encode_batch(texts)
    return [np.array([first, *e.ids], np.int32) for e in encoded]


def evaluate(model: Model, texts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of the table, as a JSON-ready mapping."""
    began = time.perf_counter()
    config, params = model.config, model.params
    kernel = attention_kernel(model.dtype)
    batch = options.batch or (32 if jax.default_backend() == "gpu" else 1)
    sizes = np.array([len(text.encode("utf-8")) for text in texts.values()])
    with ThreadPoolExecutor(1) as thread:
        packing = thread.submit(measures.xz_bits, texts.values())
        files = encode_files(model, list(texts.values()))
        prefixes = None
        if options.prefixes and config.mtp_num_hidden_layers:
            prefixes = measures.true_prefixes(files, options.prefixes, seed=0)
        bits = measures.bits_by_file(
            config,
            params,
            files,
            window=options.window,
            stride=options.stride,
            batch=batch,
            kernel=kernel,
        )
        packed = packing.result()
    tokens = sum(len(ids) - 1 for ids in files)
    result: dict[str, Any] = {
        "files": len(files),
        "bytes": int(sizes.sum()),
        "tokens": tokens,
        "bytes_per_token": float(sizes.sum() / tokens),
        "bits_per_byte": float(bits.sum() / sizes.sum()),
        "bits_per_byte_quartiles": np.quantile(
            bits[sizes > 0] / sizes[sizes > 0], [0.25, 0.5, 0.75]
        ).tolist(),
        "xz_bits_per_byte": float(packed / sizes.sum()),
        "window": options.window,
        "stride": options.stride,
        "dtype": str(model.dtype),
        "device": jax.devices()[0].device_kind,
    }
    if prefixes is not None:
        batch = min(len(prefixes), 4 * batch)
        after, generating = measures.chain_acceptance(
            config, params, prefixes, batch=batch, kernel=kernel
        )
        result["prefixes"] = len(prefixes)
        result["accepted_after_true_prefix"] = after._asdict()
        result["accepted_while_generating"] = generating._asdict()
    result["seconds"] = time.perf_counter() - began
    return result


def show(result: dict[str, Any], wheel: str) -> None:
    package = " ".join(Path(wheel).name.split("-")[:2])
    title = f"{package}: {result['files']} files, {result['bytes'] / 1e6:.2f} MB"
    table = Table(title=title)
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("bits per byte", f"{result['bits_per_byte']:.4f}")
    table.add_row("  xz -9e, one stream", f"{result['xz_bits_per_byte']:.4f}")
    low, middle, high = result["bits_per_byte_quartiles"]
    table.add_row("  quartiles of files", f"{low:.2f} / {middle:.2f} / {high:.2f}")
    table.add_row("bytes per token", f"{result['bytes_per_token']:.3f}")
    for key, name in (
        ("accepted_after_true_prefix", "accepted of 3, after 512 true tokens"),
        ("accepted_while_generating", "accepted of 3, after 32 own tokens"),
    ):
        if key in result:
            value = result[key]
            table.add_row(name, f"{value['mean']:.3f} ± {value['error']:.3f}")
            chances = ", ".join(f"{p:.3f}" for p in value["by_position"])
            table.add_row("  draft 1, 2, 3 right, earlier ones right", chances)
    table.add_row("seconds", f"{result['seconds']:.0f}")
    Console().print(table)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    use_compilation_cache()
    with ExitStack() as files:
        report = None
        if options.json is not None:  # opened first: a wrong path costs no evaluation
            report = files.enter_context(open(options.json, "w", encoding="utf-8"))
        texts = choose_files(read_modules(options.wheel), options.limit_mb)
        model = load_model(options.checkpoint, dtype=options.dtype)
        result = evaluate(model, texts, options)
        show(result, options.wheel)
        if report is not None:
            report.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(NAME, main, sys.argv[1:]))
