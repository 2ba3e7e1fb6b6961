"""From logits to a token: one function for every row that is ever drawn.

The token after prefill goes through ``draw``, and under the acceptance rule ``match`` so do tree
nodes, the bonus token and plain decoding; probabilities of a target or a drafter are
``softmax(process(logits))``, which the other rules decide by, with coins and a last draw of their
own. The Gumbel noise of a draw depends on (sequence key, absolute position, purpose, slot) alone:
a stream is the same alone, in a batch and with padding. Under ``match`` it is the same with any
tree too: drafting decides only how many draws one step reveals, never what they are.

Cost for a row of V logits: greedy is one argmax; bias, bans and penalties are one pass each, where
present. Sampling adds 2 V random numbers; top-k and top-p add 32 passes each over the row on a CPU
(no sort: 10 to 25 times cheaper) and 8 on an accelerator.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treejax import settings
from treejax.history import History
from treejax.processing import (
    add_bias,
    ban_ends,
    first_argmax,
    penalise_frequency,
    penalise_presence,
    penalise_repetition,
    token_ids,
    top_k_set,
    top_p_set,
)
from treejax.shapes import Array, Float, Float32, Int, Int32, Key, typed

TARGET, SCRIPT, DRAFT, COIN, FINAL = range(5)
"""Purposes of noise: the target's own draws, by the position of the token drawn (coupled drafters
rank with them too); what a scripted drafter gets right; a drafter's draws, an acceptance rule's
coins and its last draw, by ``state.length`` and with the tree's row as the slot."""

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class Sampling(struct.PyTreeNode):
    """How to draw: each number is one for all, or an array [B] with one a sequence.

    Values are data; which settings are present (not None) is static. Stages run in this order:
    bias, bans and end tokens; repetition penalty; frequency and presence penalty; temperature;
    min-p; top-k; top-p on what is left, renormalised. Ties are kept by value, so that the order of
    tokens never matters. The stages before the temperature count for greedy rows too.

    Attributes:
      temperature: >= 0; 0 or None is greedy. In an array, rows with 0 are greedy.
      top_k: >= 1; keeps every token whose logit reaches the k-th largest.
      top_p: in (0, 1]; keeps the smallest set of highest values with at least this mass.
      min_p: in [0, 1]; keeps probabilities of at least ``min_p`` times the largest.
      repetition_penalty: r > 0; logits z of tokens in prompt, output or path become z / r, or z * r
        where z is not positive.
      presence_penalty: taken from the logits of tokens in output or path.
      frequency_penalty: the same, once for each time that the token is there.
      logit_bias: added to the logits: a mapping from ids to numbers, or an array [V] or [B, V];
        -inf bans.
      allowed_tokens, banned_tokens: sequences of ids, or masks [V] or [B, V]; no other token, or
        none of them, is ever drawn.
      min_tokens: >= 0; ``end_tokens`` (ids) are banned while fewer tokens have been put out.
      exact_top_k: static; top-k keeps exactly k tokens, lowest ids first among equals.
    """

    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    allowed_tokens: Any = None
    banned_tokens: Any = None
    min_tokens: Any = None
    end_tokens: Any = None
    exact_top_k: bool = struct.field(pytree_node=False, default=False)

    @property
    def needs_history(self) -> bool:
        """Whether a stage reads the history; static. Of prepared settings."""
        return any(getattr(self, name) is not None for name in (*_PENALTIES, "min_tokens"))

    def prepared(self, vocabulary: int | None = None) -> "Sampling":
        """Validate and canonicalise on the host, before settings enter a jitted function.

        Numbers that change nothing (temperature 0, top_p 1, a penalty of 0) become None, others
        arrays; what jit already traces passes unchecked. ``temperature=None`` then means that no
        row samples, and min-p, top-k and top-p are dropped: they do not move an argmax. Allowed
        and banned tokens become part of ``logit_bias`` [V], ``end_tokens`` a mask [V]. Preparing
        twice is preparing once.

        Args:
          vocabulary: its size, which settings that name tokens need.

        Raises:
          ValueError: a setting out of range, one that could not act, or none left to draw; by name.
        """
        numbers = {
            name: stage.prepare(name, getattr(self, name))
            for name, stage in settings.NUMBERS.items()
        }
        if not isinstance(self.exact_top_k, bool):
            raise ValueError(f"exact_top_k is {self.exact_top_k!r}, expected True or False")
        if self.exact_top_k and numbers["top_k"] is None:
            raise ValueError("exact_top_k has no top_k to act on: give top_k, or leave it out")
        if numbers["temperature"] is None:
            numbers |= {"min_p": None, "top_k": None, "top_p": None}
        if self.end_tokens is not None and self.min_tokens is None:
            raise ValueError("end_tokens have no min_tokens to act on: give it, or leave them out")
        tokens = (self.logit_bias, self.allowed_tokens, self.banned_tokens)
        bias, ends = settings.prepare_tokens(*tokens, vocabulary), None
        if numbers["min_tokens"] is not None:
            if self.end_tokens is None or len(self.end_tokens) == 0:
                raise ValueError("min_tokens has no end_tokens to hold back: give their ids")
            vocabulary = settings.vocabulary_of("logit_bias", bias, vocabulary)
            ends = settings.prepare_mask("end_tokens", self.end_tokens, vocabulary)
        settings.check_something_left(bias, ends, numbers["min_tokens"])
        return Sampling(
            **numbers,
            logit_bias=bias,
            end_tokens=ends,
            exact_top_k=self.exact_top_k and numbers["top_k"] is not None,
        )


GREEDY = Sampling()


@typed
def adjust(
    logits: Float[Array, "*rows V"], sampling: Sampling, history: History | None = None
) -> Float32[Array, "*rows V"]:
    """The stages before the temperature: bias and bans, then the penalties; -inf is banned.

    Settings are scalars here, vmap for one a row. ``history`` holds each row's own context, with
    the axes of ``logits``.

    Raises:
      ValueError: no history where a stage needs one, or one of other axes.
    """
    z = logits.astype(jnp.float32)
    if sampling.logit_bias is not None:
        z = add_bias(z, jnp.asarray(sampling.logit_bias, jnp.float32))
    history = needed_history(sampling, history, z.shape)
    if history is None:
        return z
    if sampling.min_tokens is not None:
        least = jnp.asarray(sampling.min_tokens, jnp.int32)
        z = ban_ends(z, jnp.asarray(sampling.end_tokens), history.emitted, least)
    if sampling.repetition_penalty is not None:
        r = jnp.asarray(sampling.repetition_penalty, jnp.float32)
        z = penalise_repetition(z, history, r)
    if sampling.frequency_penalty is not None:
        z = penalise_frequency(z, history, jnp.asarray(sampling.frequency_penalty, jnp.float32))
    if sampling.presence_penalty is not None:
        z = penalise_presence(z, history, jnp.asarray(sampling.presence_penalty, jnp.float32))
    return z


@typed
def process(
    logits: Float[Array, "*rows V"], sampling: Sampling, history: History | None = None
) -> Float32[Array, "*rows V"]:
    """Log-weights of the distribution that is drawn from; -inf outside it.

    ``softmax`` of the result is p (or q). The largest weight is exactly 0. At temperature 0 (or
    None) the result is one-hot: 0 at the largest adjusted logit of lowest id. Settings are scalars
    here; vmap for one a row. ``history`` holds each row's own context, with the axes of ``logits``.
    Min-p: arXiv 2407.01082. Top-p: arXiv 1904.09751, equation 2.

    Raises:
      ValueError: no history where a stage needs one, or one of other axes.
    """
    adjusted = adjust(logits, sampling, history)
    best = first_argmax(adjusted)[..., None]
    one_hot = jnp.where(token_ids(adjusted) == best, 0.0, -jnp.inf)
    if sampling.temperature is None:
        return one_hot
    temperature = jnp.asarray(sampling.temperature, jnp.float32)
    # Shifted before the division: z stays finite at any temperature and g is added near zero.
    top = adjusted.max(axis=-1, keepdims=True)
    z = (adjusted - top) / jnp.where(temperature > 0, temperature, 1.0)
    if sampling.min_p is not None:
        z = jnp.where(jnp.exp(z) >= sampling.min_p, z, -jnp.inf)
    if sampling.top_k is not None:
        kept = top_k_set(adjusted, jnp.asarray(sampling.top_k, jnp.int32), sampling.exact_top_k)
        z = jnp.where(kept, z, -jnp.inf)
    if sampling.top_p is not None:
        # Relative weights: the survivors are renormalised by comparing with their sum.
        kept = top_p_set(adjusted, jnp.exp(z), jnp.asarray(sampling.top_p, jnp.float32))
        z = jnp.where(kept, z, -jnp.inf)
    return jnp.where(temperature > 0, z, one_hot)


def needed_history(
    sampling: Sampling, history: History | None, shape: tuple[int, ...]
) -> History | None:
    """``history`` if prepared settings read it and None if not; ``shape`` is that of the logits.

    Raises:
      ValueError: it is needed and missing, or its axes are not those of the logits.
    """
    if not sampling.needs_history:
        return None
    if history is None:
        raise ValueError(
            "penalties and min_tokens need the history of the sequence: pass history=, from "
            "treejax.history.begin(tokens, lengths, vocabulary)"
        )
    shapes = (history.prompt.shape, history.output.shape, history.emitted.shape)
    if shapes != (shape, shape, shape[:-1]):
        raise ValueError(
            f"history counts have shape {history.output.shape}, expected {shape}, that of the "
            "logits"
        )
    return history


@typed
def noise(
    key: Key[Array, ""],
    position: Int[Array, ""],
    vocab: int,
    purpose: int = TARGET,
    slot: int | Int[Array, ""] = 0,
) -> Float32[Array, " V"]:
    """Standard Gumbel noise for the draw of the token at absolute ``position``.

    ``mode="high"``, since JAX's default ends near 16 and could never draw a token below 1e-7.
    """
    for data in (position, purpose, slot):
        key = jax.random.fold_in(key, data)
    return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")


@typed
def draw(
    logits: Float[Array, " V"],
    sampling: Sampling,
    key: Key[Array, ""] | None,
    position: Int[Array, ""] | None,
    history: History | None = None,
) -> Int32[Array, ""]:
    """The token at absolute ``position``, from one row of logits and prepared, scalar settings.

    argmax(z + g) draws from softmax(z) (Gumbel-max). Ties go to the lowest id. ``key`` and
    ``position`` may be None when greedy (temperature None), which draws no noise. ``history`` is
    the context of the row, needed by penalties and ``min_tokens``.
    """
    if sampling.temperature is None:
        return first_argmax(adjust(logits, sampling, history))
    if key is None or position is None:
        raise ValueError("a key and a position are needed to sample, or temperature=None")
    weights = process(logits, sampling, history)
    return first_argmax(weights + noise(key, position, logits.shape[-1]))


def sample(
    logits: Array,
    *,
    sampling: Sampling = GREEDY,
    key: Array | None = None,
    position: Any = None,
    history: History | None = None,
) -> Array:
    """Draw one token a sequence, by the function that draws at every tree node.

    Args:
      logits: [B, V], any float type; computed with in float32.
      sampling: the settings.
      key: one typed key (folded with the row), or [B] keys; needed when sampling.
      position: absolute position of the token drawn, ``state.length`` after prefill; an integer or
        [B]; needed when sampling.
      history: what the sequences hold before the token drawn; needed by penalties and min_tokens.

    Returns:
      [B] int32 tokens.

    Raises:
      ValueError: wrong shapes, a setting out of range, key, position or history missing.
    """
    logits = jnp.asarray(logits)
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"logits have shape {logits.shape} and type {logits.dtype}, expected floats [B, V]"
        )
    batch, vocabulary = logits.shape
    sampling, keys, position = per_sequence(batch, sampling, key, position, vocabulary)
    history = needed_history(sampling, history, logits.shape)
    return _sample(logits, sampling, keys, position, history)


@jax.jit
def _sample(
    logits: Array,
    sampling: Sampling,
    keys: Array | None,
    position: Array | None,
    history: History | None,
):
    return jax.vmap(draw)(logits, sampling, keys, position, history)


def per_sequence(
    batch: int,
    sampling: Sampling,
    key: Array | None,
    position: Any,
    vocabulary: int | None = None,
) -> tuple[Sampling, Array | None, Array | None]:
    """Validated settings, keys and positions with a leading batch axis; usable inside jit.

    Key and position are None when every row is greedy. ``vocabulary`` as for ``prepared``.
    """
    sampling = sampling.prepared(vocabulary)
    rows = {name: settings.rows(name, getattr(sampling, name), batch) for name in settings.NUMBERS}
    for name in ("logit_bias", "end_tokens"):
        rows[name] = settings.rows(name, getattr(sampling, name), batch, tokens=True)
    sampling = sampling.replace(**rows)
    if sampling.temperature is None:
        return sampling, None, None
    for name, value in (("key", key), ("position", position)):
        if value is None:
            raise ValueError(
                f"sampling needs a {name}: pass {name}=, or temperature=0.0 for greedy decoding"
            )
    position = jnp.asarray(position)
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"position is of type {position.dtype}, expected integers")
    position = settings.rows("position", position.astype(jnp.int32), batch)
    return sampling, settings.row_keys(key, batch), position
