"""Fingerprints of a text's long passages: keep copies of held-out files out of a training set.

A passage is ``WINDOW`` consecutive lines, compared without indentation, blank lines and comment
lines (so a shared licence header is no match). The fingerprint of the held-out files is a sorted
array of 64-bit hashes, thinned by winnowing (Schleimer, Wilkerson and Aiken, 2003): of any
``THIN`` consecutive passages at least one is kept. Invariant: a file that holds
``WINDOW + THIN - 1`` such lines of a held-out file verbatim is always found, unless their passages
are shorter than ``LEAST_CHARACTERS``. The fingerprint file
carries hashes alone, none of the text.

How ``configs/train/astropy_passages.npz`` was made, from the wheel of astropy 8.0.2::

    from treejax.training.passages import write_fingerprint
    from treejax.training.wheels import read_modules
    texts = read_modules("astropy-8.0.2-....whl").values()
    write_fingerprint(texts, "configs/train/astropy_passages.npz")
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

WINDOW = 8  # lines of a passage
THIN = 16  # of so many consecutive passages, one hash is kept
LEAST_CHARACTERS = 160  # shorter passages (closing brackets, bare returns) are common property
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def passage_hashes(text: str) -> np.ndarray:
    """Hashes uint64 [number of passages] of every long enough passage of ``text``, in order."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    count = len(lines) - WINDOW + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    digests = b"".join(hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines)
    values = np.frombuffer(digests, "<u8").astype(np.uint64)
    lengths = np.cumsum([0, *map(len, lines)])
    hashes = np.zeros(count, np.uint64)
    for offset in range(WINDOW):  # a polynomial in the line hashes, modulo 2^64
        hashes = hashes * _MULTIPLIER + values[offset : offset + count]
    hashes ^= hashes >> np.uint64(29)  # the low bits of a product mix less well than the high ones
    return hashes[lengths[WINDOW:] - lengths[:-WINDOW] >= LEAST_CHARACTERS]


def fingerprint(texts: Iterable[str]) -> np.ndarray:
    """Sorted unique hashes that stand for the passages of ``texts``, thinned by winnowing."""
    kept = [np.zeros(0, np.uint64)]
    for text in texts:
        hashes = passage_hashes(text)
        if len(hashes):
            width = min(THIN, len(hashes))
            kept.append(np.lib.stride_tricks.sliding_window_view(hashes, width).min(axis=1))
    return np.unique(np.concatenate(kept))


def shares_passage(text: str, known: np.ndarray) -> bool:
    """Whether any passage of ``text`` is among the sorted hashes ``known``."""
    hashes = passage_hashes(text)
    if not len(hashes) or not len(known):
        return False
    at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return bool((known[at] == hashes).any())


def write_fingerprint(texts: Iterable[str], path: str | Path) -> np.ndarray:
    """Write the fingerprint of ``texts`` as an ``.npz`` file, and return it."""
    hashes = fingerprint(texts)
    np.savez(path, hashes=hashes, window=WINDOW, thin=THIN)
    return hashes


def read_fingerprint(path: str | Path) -> np.ndarray:
    """Read what ``write_fingerprint`` wrote; one made with other settings is a ``ValueError``."""
    try:
        with np.load(path) as stored:
            hashes, window, thin = stored["hashes"], int(stored["window"]), int(stored["thin"])
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no passage fingerprint file: {error}") from None
    if (window, thin) != (WINDOW, THIN):
        raise ValueError(
            f"{path} was made with passages of {window} lines thinned by {thin}, expected "
            f"{WINDOW} and {THIN}: make it again"
        )
    return hashes
