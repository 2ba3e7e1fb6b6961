"""Publish: one accepted path becomes durable in all three surfaces.

The recurrent commit, the convolution gather and the attention rows read the same path and the same
length, so they cannot describe different prefixes. A path of length 0 leaves its sequence as it is.
"""

import jax
import jax.numpy as jnp
import numpy as np

from treejax.model import Model
from treejax.policies.base import Path
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch
from treejax.tree import Tree


def publish(model: Model, state: State, tree: Tree, scratch: Scratch, choice: Choice) -> State:
    """The state after the accepted path: [root, ..., last accepted node], the pending token not.

    Raises:
      ValueError: the scratch is of another tree, state or policy, or the path is not one of this
        tree's, or does not fit the state.
    """
    _check_path(state, tree, choice)
    _check_scratch(state, tree, scratch)
    return _publish(state, scratch, choice)


def _check_scratch(state: State, tree: Tree, scratch: Scratch) -> None:
    if scratch.policy != state.policy:
        raise ValueError(
            f"the scratch was made under policy {scratch.policy} and the state has {state.policy}"
        )
    if not np.array_equal(scratch.length, state.length):
        raise ValueError(
            f"the scratch was made on a state of lengths {np.asarray(scratch.length).tolist()} and "
            f"this one has {np.asarray(state.length).tolist()}"
        )
    mine = scratch.tree
    pairs = (mine.tokens, tree.tokens), (mine.parent, tree.parent), (mine.size, tree.size)
    if not all(np.array_equal(a, b) for a, b in pairs):
        raise ValueError("the scratch was made from another tree, expected the one that is given")


def _check_path(state: State, tree: Tree, choice: Choice) -> None:
    path, length = np.asarray(choice.path), np.asarray(choice.length)
    parent, size = np.asarray(tree.parent), np.asarray(tree.size)
    for b in range(state.batch):
        nodes = path[b, : length[b]]
        if len(nodes) and not (0 <= nodes.min() and nodes.max() < size[b] and nodes[0] == 0):
            raise ValueError(f"path {nodes.tolist()} of sequence {b} is not a path from the root")
        if not np.array_equal(parent[b, nodes[1:]], nodes[:-1]):
            raise ValueError(f"path {nodes.tolist()} of sequence {b} does not follow the parents")
    needed = int((np.asarray(state.length) + length).max())
    if needed > state.max_length:
        raise ValueError(f"the path needs {needed} rows and the state holds {state.max_length}")


def publish_path(state: State, scratch: Scratch, choice: Choice) -> State:
    """``publish`` without checks, for use inside jit."""
    path = path_in_scratch(choice.path, choice.length, scratch.place)
    conv = state.conv
    if scratch.conv:  # all layers at once: a GPU would launch a gather for each
        every_layer = jax.vmap(jax.vmap(advance_history), in_axes=(0, 0, None))
        conv = every_layer(conv, jnp.stack(scratch.conv), path)
    return state.replace(
        recurrent=(
            state.policy.commit(scratch.carry, scratch.recurrent, path)
            if scratch.recurrent
            else state.recurrent
        ),
        conv=conv,
        keys=_publish_rows(state, state.keys, scratch.keys, path),
        values=_publish_rows(state, state.values, scratch.values, path),
        length=state.length + path.length,
    )


_publish = jax.jit(publish_path)


def path_in_scratch(nodes: Array, length: Array, place: Array | None) -> Path:
    """The path that nodes [B, P] of the tree, -1 padded, are in the rows of the scratch.

    ``place`` [B, N]: the row of each node; None where rows are as the tree is packed.
    """
    if place is not None:
        rows = jnp.take_along_axis(place, jnp.maximum(nodes, 0), axis=1)
        nodes = jnp.where(nodes >= 0, rows, -1)
    return Path(nodes=nodes, length=length)


def advance_history(history: Array, inputs: Array, path: Path) -> Array:
    """The last K-1 of history [K-1, C] followed by the path's rows of inputs [N, C]."""
    kept = history.shape[0]
    place = path.length + jnp.arange(kept)  # in the sequence history + path
    node = path.nodes[jnp.clip(place - kept, 0, path.nodes.shape[0] - 1)]
    old = history[jnp.minimum(place, kept - 1)]
    return jnp.where((place < kept)[:, None], old, inputs[jnp.maximum(node, 0)])


def _publish_rows(state: State, cache: Array, blocks: tuple[Array, ...], path: Path) -> Array:
    """Move the path's rows behind the prefix; the padding of the path goes to the spare row."""
    if not blocks:
        return cache
    steps = jnp.arange(path.nodes.shape[1])[None, :]
    slots = state.length[:, None] + steps
    inside = (steps < path.length[:, None]) & (slots < state.max_length)
    slots = jnp.where(inside, slots, state.max_length)
    sequence = jnp.arange(path.nodes.shape[0])[:, None]
    rows = jnp.stack(blocks)[:, sequence, jnp.maximum(path.nodes, 0)]
    return cache.at[:, sequence, slots].set(rows, mode="promise_in_bounds")
