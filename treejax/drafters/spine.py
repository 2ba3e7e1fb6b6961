"""The MTP head's spine with runners-up beside it, and how likely the head finds each.

One chain of head passes. With a least number of passes the rest hangs on a condition that is known
only while drafting: passes that are not made cost nothing.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax import layers
from treejax.drafters.base import Draft
from treejax.drafters.candidates import head_sampling, log_weights, top
from treejax.drafters.head_cache import Passes
from treejax.drafters.vocabulary import to_tokens
from treejax.shapes import Array


class Spine(struct.PyTreeNode):
    """Candidates at every depth, the likeliest first: the next depth continues that one.

    Attributes:
      tokens: [B, D, W] int32, -1 where no pass was made.
      chances: [B, D, W] float32 probability given the path down to there, 0 for banned tokens, -1
        where no pass was.
      passes: [] int32, passes that were made.
    """

    tokens: Array
    chances: Array
    passes: Array


def draft_spine(
    draft: Draft,
    passes: Passes,
    pending: Array,
    width: int,
    most: int,
    least: int,
    deep: Array,
) -> Spine:
    """``most`` passes if ``deep`` [] bool holds, and ``least`` of them in any case."""
    sampling = head_sampling(draft.weights, draft.sampling)

    def run(first: int, last: int, hidden: Array, token: Array) -> tuple[Array, ...]:
        tokens, chances = [], []
        for depth in range(first, last):
            seen = jnp.ones((1, depth + 1), bool)
            hidden = passes.level(hidden, token, depth, seen)
            z, _ = log_weights(layers.logits(draft.weights, hidden), sampling)
            best, columns = top(z, width)
            total = jax.nn.logsumexp(z, axis=-1, keepdims=True)
            chosen = to_tokens(draft.weights, columns)
            tokens.append(chosen)
            chances.append(jnp.exp(best - total))
            token = chosen[:, :, 0]
        return (*(jnp.concatenate(each, axis=1) for each in (tokens, chances)), hidden, token)

    tokens, chances, hidden, token = run(0, least, passes.newest[:, None], pending[:, None])
    made = jnp.int32(least)
    if least < most:
        shape = (len(pending), most - least, width)

        def none(hidden: Array, token: Array) -> tuple[Array, ...]:
            return jnp.full(shape, -1, jnp.int32), jnp.full(shape, -1.0)

        def rest(hidden: Array, token: Array) -> tuple[Array, ...]:
            return run(least, most, hidden, token)[:2]

        more = lax.cond(deep, rest, none, hidden, token)
        tokens, chances = (
            jnp.concatenate(pair, axis=1) for pair in zip((tokens, chances), more, strict=True)
        )
        made = jnp.where(deep, jnp.int32(most), jnp.int32(least))
    return Spine(tokens=tokens, chances=chances, passes=made)
