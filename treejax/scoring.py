"""How likely a model finds tokens: texts or token ids by the chunked rule, all rows at once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax import layers
from treejax.model import Model, check_model, prefill
from treejax.shapes import Array
from treejax.state import init_state

_NOTHING = "there is nothing to score, expected at least one text, or tokens [B, T] with lengths"


def score(model: Model, tokens: Any, lengths: Any = None) -> Array:
    """Log-probability of each next token: [B, T-1] float32.

    Entries at or past ``lengths - 1`` are 0, so that sums are over real tokens alone.

    Args:
      tokens: [B, T] token ids, right-padded; or a text, or a list of texts, which the model's
        tokenizer turns into such, nothing added.
      lengths: [B] how many of each sequence's tokens are real; not for texts, which have their own.

    Raises:
      ValueError: one line: texts without a tokenizer, an empty one, none at all, or what is not
        [B, T].
    """
    check_model(model)
    texts = [tokens] if isinstance(tokens, str) else tokens
    if hasattr(texts, "__len__") and len(texts) == 0:
        raise ValueError(_NOTHING)
    if isinstance(texts, Sequence) and any(isinstance(text, str) for text in texts):
        if lengths is not None:
            raise ValueError("lengths were given with texts, which have their own: leave them out")
        tokens, lengths = _tokenized(model, texts)
    tokens = _rows_of_ids(tokens)
    if lengths is None:
        raise ValueError("lengths are missing, expected [B] real tokens of each sequence")
    lengths = np.asarray(lengths, np.int32)
    rows = tokens.shape[1]  # a prompt runs no kernel
    state = init_state(model.config, len(tokens), rows, model.dtype, implementation="xla")
    out, _ = prefill(model, state, tokens, lengths, hidden="all")
    return _score(model.params, out.hidden[:, :-1], tokens[:, 1:], lengths)


def _rows_of_ids(tokens: Any) -> np.ndarray:
    """Token ids [B, T] int32 of at least one row and one column."""
    try:
        made = np.asarray(tokens)
    except ValueError:
        raise ValueError(
            "tokens are rows of different lengths, expected [B, T], right-padded"
        ) from None
    if made.ndim != 2:
        raise ValueError(
            f"tokens have shape {made.shape}, expected [B, T], or a text: put one sequence in a "
            "list"
        )
    if not made.size:
        raise ValueError(_NOTHING)
    if not np.issubdtype(made.dtype, np.integer):
        raise ValueError(f"tokens are of type {made.dtype}, expected integers, or a text")
    return made.astype(np.int32)


def _tokenized(model: Model, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Texts as tokens [B, T], right-padded, and lengths [B]."""
    if model.tokenizer is None:
        raise ValueError(
            "text was given and the model has no tokenizer: pass token ids [B, T] and lengths [B]"
        )
    odd = [text for text in texts if not isinstance(text, str)]
    if odd:
        raise ValueError(f"a text is {type(odd[0]).__name__}, expected texts alone, or token ids")
    made = [model.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    if not all(made):
        raise ValueError(f"text {made.index([])} is empty, expected at least one token")
    tokens = np.zeros((len(made), max(map(len, made))), np.int32)
    for row, ids in zip(tokens, made, strict=True):
        row[: len(ids)] = ids
    return tokens, np.array(list(map(len, made)), np.int32)


@jax.jit
def _score(params: layers.Params, hidden: Array, targets: Array, lengths: Array) -> Array:
    def of_row(both: tuple[Array, Array]) -> Array:  # one sequence at a time: [T, V] is large
        h, target = both
        logp = jax.nn.log_softmax(layers.logits(params, h), axis=-1)
        return jnp.take_along_axis(logp, target[:, None], axis=-1)[:, 0]

    scored = jax.lax.map(of_row, (hidden, targets))
    return jnp.where(jnp.arange(1, targets.shape[1] + 1)[None, :] < lengths[:, None], scored, 0.0)
