"""The control of the long run: as many tokens of plain decoding, taken in as a prompt.

Plain decoding adds thousands of single updates to a recurrent matrix; a head that hardly decays
keeps the rounding of all of them. Chunked prefill of the same tokens rounds once a chunk, and its
products have other shapes. What separates the two after so many tokens is rounding and nothing
else, and no short control shows it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.continuation.controls import DEPTH, follow_plain, head_drafter, refuse_wrong
from treejax.audit.continuation.native import ahead, begin
from treejax.audit.continuation.settings import Settings
from treejax.audit.intake import take_in
from treejax.audit.prefixes import digest, prefixes
from treejax.audit.reference import decode_from
from treejax.audit.rows import RowLogits
from treejax.audit.surfaces import Measured
from treejax.model import Model

PIECE = 256
"""Tokens after which the two are compared, in one step of several of plain's tokens."""


def run_long_control(model: Model, settings: Settings) -> tuple[list[Measured], dict[str, Any]]:
    """Steps measured on the way through as many tokens as the long run has, in as many texts.

    Returns them, and what they were measured on: what an envelope's provenance says of it.

    Raises:
      ValueError: prefill and plain decoding differ in what must be equal.
    """
    drafter, size = head_drafter(model), settings.long_run(model, DEPTH)
    texts = prefixes(model, "calibration", size.texts, size.prompt, settings.seed + 1)
    keys = jax.vmap(jax.random.key)(settings.seed + jnp.arange(size.texts))
    how: Any = {"keys": keys, "sampling": settings.sampling}
    prompted = take_in(*(model, texts, drafter), max_length=size.rows, sampling=settings.sampling)
    native, pieces = begin(model, prompted, **how), prompted
    made: list[Measured] = []
    for done in range(0, size.each, PIECE):
        more = min(PIECE, size.each - done)
        pending = np.asarray(native.pending)
        native, drawn = ahead(model, drafter, native, np.full(size.texts, more), **how)
        taken = np.column_stack([pending, drawn.tokens[:, : more - 1]])
        pieces = take_in(model, taken.tolist(), drafter, max_length=size.rows, onto=pieces)
        plain = decode_from(model, native.start, DEPTH + 1, by=drafter, **how)
        expected = RowLogits(model, plain)
        made += follow_plain(model, expected, pieces, drafter, 1, True, settings.seed, **how)
    refuse_wrong("long", made)
    where = {"texts": size.texts, "tokens": settings.long_tokens, "prefixes": digest(texts)}
    return made, where
