"""Prefixes to audit with: Python source that every installation has, read when it is needed.

Calibration and held-out prefixes come from different modules of the standard library, so that an
envelope never sees what it is applied to. A model without a tokenizer gets random tokens.
"""

import hashlib
import importlib
import inspect
import json
from collections.abc import Sequence
from typing import Literal

import numpy as np

from treejax.model import Model

Split = Literal["calibration", "held-out"]

MODULES = {
    "calibration": ("argparse", "difflib", "calendar", "csv", "fractions", "statistics"),
    "held-out": ("dataclasses", "configparser", "textwrap", "gettext", "heapq", "tokenize"),
}
"""Modules of the standard library that are written in Python and do nothing when imported."""


def prefixes(model: Model, split: Split, count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` prefixes of ``length`` tokens each, no two alike.

    Raises:
      ValueError: an unknown split, a count or length below 1, or a length that no module has.
    """
    if split not in MODULES:
        raise ValueError(f"split is {split!r}, expected one of: {', '.join(MODULES)}")
    if count < 1 or length < 1:
        raise ValueError(f"count is {count} and length {length}, expected both to be 1 or more")
    random = np.random.default_rng([list(MODULES).index(split), seed])
    if model.tokenizer is None:
        return random.integers(0, model.config.vocab_size, (count, length)).tolist()
    made: list[list[int]] = []
    texts = {name: _lines(name) for name in MODULES[split]}
    offset = int(random.integers(len(texts)))
    for i in range(20 * count):
        name = MODULES[split][(offset + i) % len(texts)]
        tokens = _cut(model, texts[name], length, random)
        if tokens is not None and tokens not in made:
            made.append(tokens)
        if len(made) == count:
            return made
    raise ValueError(f"no {count} prefixes of {length} tokens were found, ask for shorter ones")


def digest(texts: Sequence[Sequence[int]]) -> str:
    """A name for these tokens: 16 hexadecimal digits."""
    plain = json.dumps([list(map(int, text)) for text in texts])
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _lines(module: str) -> list[str]:
    return inspect.getsource(importlib.import_module(module)).splitlines(keepends=True)


def _cut(
    model: Model, lines: list[str], length: int, random: np.random.Generator
) -> list[int] | None:
    """So many tokens from a random line on; None if the text ends before."""
    start = int(random.integers(len(lines)))
    width = 64
    while True:  # tokens are of unknown length: take more lines until there are enough
        text = "".join(lines[start : start + width])
        tokens = model.tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) >= length:
            return tokens[:length]
        if start + width >= len(lines):
            return None
        width *= 2
