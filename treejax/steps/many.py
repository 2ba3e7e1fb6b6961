"""Many steps in one program: what the device does between two visits of the host.

``steps`` is a loop around the very step of ``steps.together``. Between two steps it does what the
host would do: count down what each sequence may still emit, and end a sequence that emitted one of
its end tokens. The emissions are kept, a row a step, until the host fetches them. How many steps
are made is data: one program serves all. What needs text, a stop string, only the host can see;
until it has, the device goes on.

A GPU asks the host before every turn of a loop, and until the last one the host can hand over
nothing else. Without the loop a visit is one step, and where a step takes longer than handing one
over, visits that were asked for ahead follow each other without a gap.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from treejax import layers
from treejax.config import ModelConfig
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.steps.rules.base import Rule
from treejax.steps.together import Carry, Emission, advance

MOST_STEPS = 32
"""Steps that one visit may make: rows that emissions are kept in."""

_ENDS = 8  # ids are padded to multiples of so many: programs hang on the number, not on the ids


class Visit(struct.PyTreeNode):
    """What the host fetches.

    Attributes:
      emission: the emissions of all steps, with a leading axis of ``MOST_STEPS``, or of 1 without
        the loop; zeros in rows that were not made.
      made: [] int32 how many steps were made.
    """

    emission: Emission
    made: Array


@functools.partial(
    jax.jit,
    static_argnames=("config", "drafter", "rule", "looped"),
    donate_argnames=("carry", "left"),
)
def steps(
    config: ModelConfig,
    drafter: Any,
    rule: Rule,
    looped: bool,
    params: layers.Params,
    weights: Any,
    carry: Carry,
    left: Array,
    keys: Array,
    sampling: Sampling,
    want_logprobs: Array,
    ends: Array,
    ended: Array,
    count: Array,
    rehearse: Array,
) -> tuple[Carry, Array, Visit]:
    """Up to ``count`` steps of every sequence; ``carry`` and ``left`` are donated.

    A sequence takes part as long as it has tokens left; when none does, no further step is made.
    The steps are those of ``together.step`` with limits ``left - 1``, one after the other.

    Args:
      looped: static; without the loop a ``count`` of 1 is the most, and the step runs, without
        effect, even if none is made.
      left: [B] int32 tokens that each sequence may still emit; 0 once it has ended.
      ends: [B, E] int32 tokens that end each sequence, see ``end_tokens``.
      ended: [B] bool, sequences that the host has ended since.
      count: [] int32, 0 to ``MOST_STEPS``.
      rehearse: [] bool, make the steps even if no sequence takes part: a first run without effect.

    Returns:
      The carry, what is left, and the ``Visit``.
    """
    left = jnp.where(ended, 0, left)

    def turn(carry: Carry, left: Array) -> tuple[Carry, Array, Emission]:
        carry, emission = advance(
            *(config, drafter, rule, params, weights, carry, left - 1),
            *(keys, sampling, want_logprobs),
        )
        return carry, _left_after(left, emission, ends), emission

    def wanted(left: Array, made: Array) -> Array:
        return (made < count) & (rehearse | jnp.any(left > 0))

    if not looped:
        made = wanted(left, jnp.int32(0))
        carry, after, emission = turn(carry, jnp.where(made, left, 0))
        emission = jax.tree.map(lambda row: row[None], emission)
        return carry, jnp.where(made, after, left), Visit(emission, made.astype(jnp.int32))

    def advance_once(at: tuple[Carry, Array, Visit]) -> tuple[Carry, Array, Visit]:
        carry, left, visit = at
        carry, left, emission = turn(carry, left)
        kept = jax.tree.map(
            lambda rows, row: lax.dynamic_update_index_in_dim(rows, row, visit.made, 0),
            *(visit.emission, emission),
        )
        return carry, left, Visit(kept, visit.made + 1)

    rows = (MOST_STEPS, left.shape[0])
    wide = (*rows, drafter.max_depth + 1)
    nothing = Emission(
        tokens=jnp.zeros(wide, jnp.int32),
        count=jnp.zeros(rows, jnp.int32),
        proposed=jnp.zeros(rows, jnp.int32),
        logprobs=jnp.zeros(wide),
    )
    begun = carry, left, Visit(nothing, jnp.int32(0))
    return lax.while_loop(lambda at: wanted(at[1], at[2].made), advance_once, begun)


def _left_after(left: Array, emission: Emission, ends: Array) -> Array:
    """What is left [B] after one step: nothing once an end token is among what it emitted."""
    place = lax.broadcasted_iota(jnp.int32, emission.tokens.shape, 1)
    real = place < emission.count[:, None]
    hits = emission.tokens[:, :, None] == ends[:, None, :]
    ended = jnp.any(hits & real[:, :, None], axis=(1, 2))
    return jnp.where(ended, 0, left - emission.count)


def end_tokens(ids: list[set[int]]) -> np.ndarray:
    """``ends`` for ``steps``: [B, E] int32, a row a sequence, padded with -1, which is no token."""
    width = max(1, *map(len, ids))
    ends = np.full((len(ids), -(-width // _ENDS) * _ENDS), -1, np.int32)
    for row, mine in zip(ends, ids, strict=True):
        row[: len(mine)] = sorted(mine)
    return ends
