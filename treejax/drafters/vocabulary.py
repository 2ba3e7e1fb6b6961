"""The head's output over few tokens: a reduced draft vocabulary.

The product with ``lm_head`` reads V * H numbers a pass, often more than the head's own layer. Most
tokens of a text come from few ids, so that a head over those alone drafts nearly as well (FR-Spec,
arXiv 2502.14856; EAGLE-3's ``d2t`` map, arXiv 2503.01840). The target still scores every token: a
reduced vocabulary costs acceptance and never correctness.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from treejax.shapes import Array


def frequent_tokens(sequences: Iterable[Sequence[int]], count: int) -> tuple[int, ...]:
    """The ``count`` commonest ids of token sequences, the commonest first, lower ids on a tie.

    Count over text of the kind that will be written, and not over the text to be measured with.

    Raises:
      ValueError: fewer than ``count`` different ids occur.
    """
    arrays = [np.asarray(sequence, np.int64) for sequence in sequences]
    ids, times = np.unique(np.concatenate([np.zeros(0, np.int64), *arrays]), return_counts=True)
    if not 1 <= count <= len(ids):
        raise ValueError(
            f"{count} frequent tokens were asked for and {len(ids)} different ones occur, "
            "expected a number from 1 to that; give more text or ask for fewer"
        )
    order = np.lexsort((ids, -times))[:count]
    return tuple(int(token) for token in ids[order])


def check_vocabulary(drafter: str, vocabulary: tuple[int, ...] | None) -> None:
    """Refuse what cannot be a draft vocabulary.

    Raises:
      ValueError: no ids, equal ids, a negative one, or no tuple, which jit could not tell apart.
    """
    if vocabulary is None:
        return
    if not isinstance(vocabulary, tuple) or not all(
        isinstance(token, int) and token >= 0 for token in vocabulary
    ):
        raise ValueError(
            f"drafter {drafter!r}: vocabulary is no tuple of token ids, expected what "
            "frequent_tokens(sequences, count) returns, or None for all tokens"
        )
    if len(set(vocabulary)) != len(vocabulary) or not vocabulary:
        raise ValueError(
            f"drafter {drafter!r}: vocabulary holds {len(vocabulary)} ids of which "
            f"{len(set(vocabulary))} differ, expected 1 or more different ones"
        )


def head_weights(
    drafter: str, model: Any, vocabulary: tuple[int, ...] | None = None, widest: int = 1
) -> dict[str, Any]:
    """What the head needs of the model's parameters: references, and ``lm_head``'s chosen rows.

    ``draft_ids`` [K] is there with a reduced vocabulary: the token that each row scores, ascending,
    so that ties go to the lowest id as they do over all tokens.

    Args:
      widest: the most children that a node gets, which the vocabulary must hold.

    Raises:
      ValueError: the model has no MTP head, or the vocabulary does not fit.
    """
    if "mtp" not in model.params:
        raise ValueError(
            f"drafter {drafter!r} needs an MTP head, but this model has no mtp.* tensors; "
            "use 'suffix', or no drafter"
        )
    size = model.config.vocab_size
    if widest > (size if vocabulary is None else len(vocabulary)):
        raise ValueError(
            f"drafter {drafter!r} wants {widest} different tokens below one node and has only "
            f"{size if vocabulary is None else len(vocabulary)}, expected a narrower tree"
        )
    weights = {
        name: model.params[name] for name in ("mtp", "embed", "lm_head") if name in model.params
    }
    if vocabulary is None:
        return weights
    ids = np.sort(np.array(vocabulary, np.int32))
    if ids[-1] >= size:
        raise ValueError(
            f"drafter {drafter!r}: vocabulary holds token {ids[-1]}, expected ids below the "
            f"model's {size}"
        )
    rows = weights.get("lm_head", weights["embed"])[ids]
    return weights | {"lm_head": rows, "draft_ids": jnp.asarray(ids)}


def to_tokens(weights: dict[str, Any], columns: Array) -> Array:
    """Token ids of columns of the head's output."""
    ids = weights.get("draft_ids")
    return columns if ids is None else ids[columns]


def to_columns(weights: dict[str, Any], values: Array) -> Array:
    """Columns of the head's output, from values over all tokens [.., V]."""
    ids = weights.get("draft_ids")
    return values if ids is None else values[..., ids]


def to_full(weights: dict[str, Any], values: Array, size: int) -> Array:
    """Values over all ``size`` tokens from those over the head's columns [.., K], 0 elsewhere."""
    ids = weights.get("draft_ids")
    if ids is None:
        return values
    return jnp.zeros((*values.shape[:-1], size), values.dtype).at[..., ids].set(values)
