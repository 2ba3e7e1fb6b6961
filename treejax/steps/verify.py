"""Verify: one target forward over every node of the trees, the state left as it is.

Each node continues its parent in all three surfaces: the policy's scan for R, the ancestors'
inputs for C, the ancestors' rows for K; its rotary position is length + depth. For policies that
run on kernels the rows are sorted first, parents before children and inactive rows up to a multiple
of 8, and put back afterwards.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from treejax import layers
from treejax.config import ModelConfig
from treejax.delta_rule import HIGHEST, Operands
from treejax.model import Mixing, Model, Output, forward
from treejax.policies import Policy, kernel_rows
from treejax.shapes import Array
from treejax.state import State
from treejax.tree import Topology, Tree, conv_rows, describe, sort_rows, visible


class Scratch(struct.PyTreeNode):
    """What verifying leaves for publishing; valid for that state and tree alone.

    Attributes:
      carry: the policy's carry as the scans left it: the state's own, but for policies that write
        while they verify.
      recurrent: the policy's scratch, a tuple entry a recurrent layer.
      conv: a tuple of convolution inputs [B, N, C].
      keys, values: tuples of [B, N, Hkv, D], an entry an attention layer.
      tree, length, policy: what was verified, and the length and policy of the state.
      place: [B, N] row of each node in all of these, None where that is the node's own.
    """

    carry: Any
    recurrent: tuple[Any, ...]
    conv: tuple[Array, ...]
    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    tree: Tree
    length: Array
    place: Array | None
    policy: Policy = struct.field(pytree_node=False)


def verify(model: Model, state: State, tree: Tree) -> tuple[Output, Scratch]:
    """Run the model over every node of ``tree``: out.logits [B, N, V] and out.hidden [B, N, H].

    Raises:
      ValueError: the tree's batch is not the state's, a token is not in the vocabulary, or the
        deepest path would not fit.
    """
    if tree.batch != state.batch:
        raise ValueError(f"the tree has batch {tree.batch} and the state {state.batch}")
    largest, size = int(np.asarray(tree.tokens).max()), model.config.vocab_size
    if largest >= size:
        raise ValueError(f"the tree holds token {largest}, expected 0..{size - 1}")
    _check_room(state, tree)
    return _verify(model.config, model.params, state, tree)


def _check_room(state: State, tree: Tree) -> None:
    depth = np.asarray(_depths(tree)).max(axis=1)
    needed = int((np.asarray(state.length) + depth + 1).max())
    if needed > state.max_length:
        raise ValueError(
            f"a path of the tree needs {needed} rows and the state holds {state.max_length}; "
            "trim the tree or give init_state a larger max_length"
        )


@jax.jit
def _depths(tree: Tree) -> Array:
    return describe(tree).depth


def verify_trees(
    config: ModelConfig, params: layers.Params, state: State, tree: Tree
) -> tuple[Output, Scratch]:
    """``verify`` without checks, for use inside jit."""
    if state.policy.implementation == "xla":
        topology, tokens, place = describe(tree), tree.tokens, None
    else:
        topology, tokens, place = _sorted(tree)
    positions = state.length[:, None] + topology.depth
    x = layers.embed(params, tokens)
    mixing, carry = _tree_mixing(state, topology)
    hidden, records = forward(config, params, x, positions, mixing)
    if place is not None:
        hidden = jnp.take_along_axis(hidden, place[:, :, None], axis=1)
    scratch = Scratch(
        carry(),
        *map(tuple, (records.delta, records.conv, records.keys, records.values)),
        tree=tree,
        length=state.length,
        place=place,
        policy=state.policy,
    )
    return Output(layers.logits(params, hidden), hidden), scratch


_verify = functools.partial(jax.jit, static_argnames="config")(verify_trees)


def _sorted(tree: Tree) -> tuple[Topology, Array, Array]:
    """The trees as kernels want them, their tokens, and the row there of each node [B, N]."""
    wide = tree.pad(kernel_rows(tree.capacity))
    topology = describe(wide)
    tokens = jnp.take_along_axis(wide.tokens, topology.order, axis=1)
    topology, place = jax.vmap(sort_rows)(topology)
    return topology, tokens, place[:, : tree.capacity]


def _tree_mixing(state: State, topology: Topology) -> tuple[Mixing, Callable[[], Any]]:
    """What mixes rows, and what gives the policy's carry after the last layer."""
    carry = state.recurrent
    width, policy = state.config.linear_conv_kernel_dim, state.policy
    windows = jax.vmap(lambda one: conv_rows(one, width))(topology)  # [B, N, K]
    plan = policy.plan(topology)

    def delta(i: int, operands: Operands) -> tuple[Array, Any]:
        nonlocal carry
        outputs, scratch, carry = policy.scan(carry, i, operands, plan)
        return outputs, scratch

    if policy.implementation == "xla":
        operands = layers.by_convolution(_convolution(state, windows))
        attend = _plain_attention(state, topology)
    else:
        operands = _fused_operands(state, windows)
        attend = _split_attention(state, topology)
    return Mixing(operands, delta, attend), lambda: carry


def _plain_attention(
    state: State, topology: Topology
) -> Callable[[int, Array, Array, Array], Array]:
    """Attention in plain JAX: the scores of the whole cache at once."""
    mask = jax.vmap(visible)(topology)

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        past = state.keys[i], state.values[i], state.length
        return jax.vmap(layers.attend)(q, k, v, mask, *past)

    return attend


def _split_attention(
    state: State, topology: Topology
) -> Callable[[int, Array, Array, Array], Array]:
    """Attention by kernels, split over the context, where they take the shapes and the dtype."""
    from pallas_kernels.implementation import resolve  # imported when first traced
    from pallas_kernels.tree_attention import attention_problem, tree_attention

    plain, implementation = _plain_attention(state, topology), state.policy.implementation

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        problem = attention_problem(q, state.keys)
        if problem is not None:
            resolve("auto", problem)  # says so once
            return plain(i, q, k, v)
        rows = q, k, v, topology.ancestors
        cache = state.keys, state.values, jnp.int32(i), state.length
        return tree_attention(*rows, *cache, implementation=implementation)

    return attend


def _convolution(state: State, windows: Array) -> Callable[[int, Array, Array], Array]:
    """The convolution over ancestors, in plain JAX."""
    width = state.config.linear_conv_kernel_dim
    rows = jnp.arange(width - 1 + windows.shape[1], dtype=jnp.int32)
    # Tap by tap a product with a selection matrix: exact, and on a CPU far cheaper than a gather.
    chosen = (windows[..., None] == rows[None, None, None, :]).astype(jnp.float32)

    def convolve(i: int, inputs: Array, taps: Array) -> Array:
        full = jnp.concatenate([state.conv[i], inputs], axis=1).astype(jnp.float32)
        taps = taps.astype(jnp.float32)
        window = jnp.einsum("bnkm,bmc->kbnc", chosen, full, precision=HIGHEST)
        return functools.reduce(jnp.add, (window[j] * taps[None, None, j] for j in range(width)))

    return convolve


def _fused_operands(state: State, windows: Array) -> Callable[..., Operands]:
    """``Mixing.operands`` as one kernel: convolution, activation, normalisation and gates."""
    from pallas_kernels.tree_conv import tree_conv  # imported when first traced

    def operands(
        i: int, config: ModelConfig, p: layers.Params, made: layers.Projections
    ) -> Operands:
        inputs, a, b, whole = made.inputs, made.a, made.b, made.whole
        a_at = b_at = 0
        if whole is not None:  # columns are read where they lie
            b_at = inputs.shape[-1] + made.z.shape[-1]
            a_at = b_at + b.shape[-1]
            inputs = a = b = whole
        rows = inputs, state.conv, jnp.int32(i), p["conv"], windows, a, b
        out = tree_conv(
            *(*rows, p["A_log"], p["dt_bias"]),
            key_heads=config.linear_num_key_heads,
            key_dim=config.linear_key_head_dim,
            a_at=a_at,
            b_at=b_at,
            implementation=state.policy.implementation,
        )
        return Operands(out.q, out.k, out.v, out.g, out.alpha, out.beta)

    return operands
