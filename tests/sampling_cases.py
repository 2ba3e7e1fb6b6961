"""Settings of many rows in one ``Sampling``, and lists of tokens as padded arrays."""

import jax.numpy as jnp
import numpy as np

from treejax.sampling import Sampling


def stacked(options):
    """One ``Sampling`` of all rows' settings, lists as masks; every option present."""
    vocabulary = options[0]["vocabulary"]

    def mask(tokens):
        return np.isin(np.arange(vocabulary), list(tokens))

    numbers = ("temperature", "min_p", "top_k", "top_p", "min_tokens")
    numbers += ("repetition_penalty", "presence_penalty", "frequency_penalty")
    everything = range(vocabulary)
    return Sampling(
        **{name: np.array([o[name] for o in options]) for name in numbers},
        logit_bias=np.array([[o["logit_bias"].get(t, 0.0) for t in everything] for o in options]),
        allowed_tokens=np.array(
            [
                mask(everything if o["allowed_tokens"] is None else o["allowed_tokens"])
                for o in options
            ]
        ),
        banned_tokens=np.array([mask(o["banned_tokens"]) for o in options]),
        end_tokens=np.array([mask(o["end_tokens"]) for o in options]),
        exact_top_k=options[0]["exact_top_k"],
    ).prepared(vocabulary)


def padded(rows):
    width = max(len(row) for row in rows) + 1
    tokens = np.full((len(rows), width), -1, np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return jnp.asarray(tokens), jnp.asarray([len(row) for row in rows], jnp.int32)
