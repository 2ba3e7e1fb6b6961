"""What a row has seen: which tokens the prompt holds, and how often each was put out since.

Penalties and minimum lengths read it. The context of the row at node v of a tree is the history of
its sequence and the tokens on the path from the root to v, each counted once; the root is the
pending token, which is in no history yet. A row drawn after prefill has the history itself.
"""

import jax
import jax.numpy as jnp
from flax import struct

from treejax.shapes import Array, Bool, Int, typed


class History(struct.PyTreeNode):
    """Token counts of one sequence, or of several with leading axes.

    Attributes:
      prompt: [.., V] bool, the tokens that occur in the prompt.
      output: [.., V] int32, how often each token was put out.
      emitted: [..] int32, how many tokens that is.
    """

    prompt: Array
    output: Array
    emitted: Array


@typed
def begin(tokens: Int[Array, "B T"], lengths: Int[Array, " B"], vocabulary: int) -> History:
    """Histories after prompts of ``lengths`` tokens, before anything is put out."""
    batch, width = tokens.shape
    real = jnp.arange(width)[None, :] < lengths[:, None]
    rows = jnp.arange(batch)[:, None]
    prompt = jnp.zeros((batch, vocabulary), bool)
    return History(
        prompt=prompt.at[rows, _place(tokens, real, vocabulary)].set(True, mode="drop"),
        output=jnp.zeros((batch, vocabulary), jnp.int32),
        emitted=jnp.zeros(batch, jnp.int32),
    )


@typed
def extend(history: History, tokens: Int[Array, "B P"], count: Int[Array, " B"]) -> History:
    """Histories with the first ``count`` of ``tokens`` put out as well."""
    batch, width = tokens.shape
    real = jnp.arange(width)[None, :] < count[:, None]
    rows = jnp.arange(batch)[:, None]
    place = _place(tokens, real, history.output.shape[-1])
    return history.replace(
        output=history.output.at[rows, place].add(1, mode="drop"),
        emitted=history.emitted + real.sum(axis=1, dtype=jnp.int32),
    )


@typed
def after(history: History, token: Int[Array, ""]) -> History:
    """The context of one row, and one token more."""
    place = _place(token, jnp.bool_(True), history.output.shape[-1])
    return history.replace(
        output=history.output.at[place].add(1, mode="drop"), emitted=history.emitted + 1
    )


@typed
def along_paths(
    history: History, tokens: Int[Array, " N"], ancestors: Bool[Array, "N N"]
) -> History:
    """The context of every row of one tree, with a leading axis N.

    ``ancestors[v]`` marks v and the rows above it, the root included, as ``describe`` gives it.
    Inactive rows mark nothing, and get the history itself. Costs N V numbers of memory; a walk
    down one path is cheaper with ``after``.
    """
    rows, vocabulary = tokens.shape[0], history.output.shape[-1]
    place = jax.vmap(lambda marked: _place(tokens, marked, vocabulary))(ancestors)
    spread = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), history)
    return spread.replace(
        output=spread.output.at[jnp.arange(rows)[:, None], place].add(1, mode="drop"),
        emitted=spread.emitted + ancestors.sum(axis=1, dtype=jnp.int32),
    )


def _place(tokens: Array, real: Array, vocabulary: int) -> Array:
    """Where to count: past the end, which ``mode="drop"`` leaves out, if there is nothing to count.

    Fillers are negative, and JAX would read -1 as the last token.
    """
    return jnp.where(real & (tokens >= 0), tokens, vocabulary)
