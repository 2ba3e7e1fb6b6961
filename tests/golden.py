"""Where the golden numbers are, and how their layouts map onto ours."""

import functools
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent / "data" / "golden"
PRESETS = ("qwen3_next", "qwen3_5", "qwen3_5_wrapped", "qwen3_5_moe")

# transformers differs from itself by up to 4.0e-5 (prompt at once, token by token, in blocks); a
# wrong formula moves some value by more than 0.3. Ten times the former leaves room for another
# summation order.
TOLERANCE = 5e-4


@functools.cache
def arrays(preset, name):
    """All arrays of one npz file, read once."""
    with np.load(ROOT / preset / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def checkpoint(preset):
    return ROOT / preset / "checkpoint"


def recurrent(state):
    """[.., Hv, dk, dv] as transformers keeps it -> [.., Hv, dv, dk]."""
    return np.swapaxes(state, -1, -2)


def history(state):
    """[.., C, K] -> [.., K - 1, C]: the oldest of K columns never matters again."""
    return np.swapaxes(state[..., 1:], -1, -2)


def rows(cache):
    """[.., Hkv, S, D] -> [.., S, Hkv, D]."""
    return np.swapaxes(cache, -2, -3)
