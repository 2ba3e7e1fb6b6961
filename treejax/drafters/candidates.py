"""How rows of the head's logits become candidates: ranked, ranked with the target's noise, drawn.

``q`` is ``softmax(process(logits))`` under the settings that the target draws with, but without
penalties and a least number of tokens: those need a history that the head has not. That costs
acceptance alone, never correctness. A batch may mix greedy and sampled sequences: in the former
every way to choose comes down to the likeliest tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treejax.drafters.vocabulary import to_columns
from treejax.processing import first_argmax
from treejax.sampling import DRAFT, TARGET, Sampling, adjust, noise, process
from treejax.shapes import Array

type Step = tuple[Array, Array]
"""What a step's noise hangs on: keys [B] and committed length [B]; None where all are greedy."""

DRAWS = ("top", "coupled", "iid", "without_replacement")
_LAST = 1e4  # nats that put a token outside the filters behind all inside
_BLOCK = 256  # columns of which the first stage of a top-k knows only the largest


def head_sampling(weights: dict[str, Any], sampling: Sampling | None) -> Sampling:
    """The settings of every sequence that hold without a history, over the head's columns."""
    if sampling is None:
        return Sampling(temperature=None)
    sampling = sampling.replace(
        repetition_penalty=None,
        presence_penalty=None,
        frequency_penalty=None,
        min_tokens=None,
        end_tokens=None,
    )
    if sampling.logit_bias is None:
        return sampling
    bias = to_columns(weights, sampling.logit_bias)
    # A reduced vocabulary may hold nothing but banned tokens; what is drafted is then no matter.
    some = (bias > -jnp.inf).any(axis=-1, keepdims=True)
    return sampling.replace(logit_bias=jnp.where(some, bias, 0.0))


def log_weights(logits: Array, sampling: Sampling) -> tuple[Array, Array | None]:
    """(z [B, m, V], kept [B, m, V] or None): z before any filter, and what the filters keep.

    z is the logits by the temperature, bias and bans applied, up to a constant a row. Greedy
    sequences keep everything at temperature 1.
    """
    z = jax.vmap(adjust)(logits, sampling)
    if sampling.temperature is None:
        return z, None
    greedy = sampling.temperature == 0
    warm = sampling.replace(temperature=jnp.where(greedy, 1.0, sampling.temperature))
    z = (z - z.max(axis=-1, keepdims=True)) / warm.temperature[:, None, None]
    if sampling.min_p is None and sampling.top_k is None and sampling.top_p is None:
        return z, None
    kept = _process(logits, warm) > -jnp.inf
    return z, kept | greedy[:, None, None]


def target_noise(
    weights: dict[str, Any], sampling: Sampling, step: Step | None, depth: int, size: int
) -> Array | None:
    """[B, 1, V] noise that the target draws with below nodes of ``depth``; 0 where greedy.

    A node of depth d draws the token at absolute position length + 1 + d.
    """
    if step is None or sampling.temperature is None:
        return None
    keys, length = step
    every = jax.vmap(lambda key, at: noise(key, at, size, TARGET))(keys, length + 1 + depth)
    every = jnp.where(sampling.temperature[:, None] > 0, every, 0.0)
    return to_columns(weights, every)[:, None, :]


def ranked(logits: Array, sampling: Sampling, g: Array | None, count: int) -> Array:
    """The ``count`` best columns of each row [B, m, V], best first: [B, m, count].

    By z alone, or by z + g with ``g`` [B, 1, V] the noise that the target draws with, and then
    those that the filters keep before all others.
    """
    z, kept = log_weights(logits, sampling)
    if g is not None:
        z = z + g
        z = z if kept is None else jnp.where(kept, z, z - _LAST)
    return top(z, count)[1]


def drawn(
    logits: Array, sampling: Sampling, step: Step | None, slots: Array, repeat: bool
) -> tuple[Array, Array]:
    """Candidates drawn from q: columns [B, m, count] and q [B, m, V].

    With ``repeat`` each is drawn by itself, from the noise of its own slot: slots [m, count].
    Without, all of a row come from one perturbation of it, slots [m, count] equal along a row: the
    best of log q + noise in order are draws without replacement in that order (Gumbel top-k,
    arXiv 1903.06059). Where q has too few tokens, the likeliest outside it follow.
    """
    (rows, count), columns = slots.shape, logits.shape[-1]
    chosen = _process(logits, sampling)
    q = jax.nn.softmax(chosen, axis=-1)
    if step is None or sampling.temperature is None:
        ordered = ranked(logits, sampling, None, 1 if repeat else count)
        return jnp.broadcast_to(ordered, (*ordered.shape[:2], count)), q

    def noise_of(slot: Array) -> Array:
        one = jax.vmap(lambda key, at: noise(key, at, columns, DRAFT, slot))(*step)
        return jnp.where(sampling.temperature[:, None] > 0, one, 0.0)

    if repeat:
        g = jax.vmap(noise_of)(slots.reshape(-1)).reshape(rows, count, *logits.shape[::2])
        return first_argmax(chosen[:, :, None, :] + jnp.moveaxis(g, 2, 0)), q
    g = jnp.moveaxis(jax.vmap(noise_of)(slots[:, 0]), 1, 0)
    z, _ = log_weights(logits, sampling)
    return top(jnp.where(chosen > -jnp.inf, chosen + g, z - _LAST), count)[1], q


def top(scores: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` best of scores [B, m, V], best first, the lowest id on a tie: values and ids.

    Two stages where rows are long: the best lie in the ``count`` blocks whose largest are best (of
    equal ones the first), so that only those blocks are sorted. Exact, ties too.
    """
    length = scores.shape[-1]
    blocks = -(-length // _BLOCK)
    if blocks <= 2 * count:
        return _sorted(scores, count)
    room = ((0, 0),) * (scores.ndim - 1) + ((0, blocks * _BLOCK - length),)
    parts = jnp.pad(scores, room, constant_values=-jnp.inf)
    parts = parts.reshape(*scores.shape[:-1], blocks, _BLOCK)
    chosen = jnp.sort(_sorted(parts.max(axis=-1), count)[1], axis=-1)  # ids ascend again
    near = jnp.take_along_axis(parts, chosen[..., None], axis=-2)
    values, place = _sorted(near.reshape(*scores.shape[:-1], count * _BLOCK), count)
    block = jnp.take_along_axis(chosen, place // _BLOCK, axis=-1)
    return values, block * _BLOCK + place % _BLOCK


def _sorted(scores: Array, count: int) -> tuple[Array, Array]:
    # XLA on a CPU knows a top-k by the slice behind its sort. Slices taken from the result would
    # merge with that one and leave a sort of the whole row, at every level.
    return lax.optimization_barrier(lax.top_k(scores, count))


def _process(logits: Array, sampling: Sampling) -> Array:
    return jax.vmap(process)(logits, sampling)
