"""``tree_conv``: a recurrent layer's operands from its projections, in one launch.

Each node convolves its own input with those of its K - 1 nearest ancestors, continued into the
committed history; then come the activation, the split into heads, the norms of q and k, and the
gates. Which rows a node reads is data, so one program serves every tree.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import resolve
from pallas_kernels.tree_conv import mosaic_gpu, reference


class TreeConv(NamedTuple):
    """Operands of the delta rule, all float32.

    Attributes:
      q: [B, N, Hk, dk] normalised and scaled by dk**-0.5.
      k: [B, N, Hk, dk] normalised.
      v: [B, N, Hv, dv].
      g: [B, N, Hv] log decay; where alpha is above 1/2, the logarithm of the rounded alpha: what
        sums g then agrees with what multiplies by alpha, however long the text.
      alpha: [B, N, Hv] exp(g).
      beta: [B, N, Hv] write strength.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    alpha: jax.Array
    beta: jax.Array


def tree_conv(
    inputs: jax.Array,
    history: jax.Array,
    layer: jax.Array | int,
    taps: jax.Array,
    rows: jax.Array,
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    *,
    key_heads: int,
    key_dim: int,
    a_at: int = 0,
    b_at: int = 0,
    implementation: str = "auto",
) -> TreeConv:
    """Convolve, activate and split the projections of every node of the trees.

    With x_i the sum over taps of taps[t] * concat(history[layer, b], inputs[b])[rows[b, i, t]],
    oldest tap first and float32: y = silu(x), rounded to the dtype of ``inputs``; its channels are
    q, k and v; q and k are divided by sqrt(sum y^2 + 1e-6). The gates are
    g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b). Inactive rows come out finite as
    long as their ``rows`` point at finite inputs.

    Args:
      inputs: [B, N, C or more] projections, C = 2 Hk dk + Hv dv; bfloat16 or float32. Further
        columns are not read.
      history: [L, B, K - 1, C] inputs before the root, oldest first, of every recurrent layer.
      layer: which of the L layers this is; may be traced.
      taps: [K, C]; the last one meets the node's own input.
      rows: [B, N, K] int32, each in 0 .. K - 2 + N.
      a, b: [B, N, Hv or more] gate inputs, the columns from ``a_at`` and ``b_at`` on.
      A_log, dt_bias: [Hv] float32.
      key_heads, key_dim: Hk and dk.
      a_at, b_at: with these one product that holds all projections serves as ``inputs``, ``a`` and
        ``b``, and nothing is copied.
      implementation: "auto", "xla", "mosaic_gpu" or "interpret".

    Raises:
      ValueError: shapes that do not fit together, or a kernel that cannot run was asked for.
    """
    _check(inputs, history, taps, rows, A_log, dt_bias, key_heads, key_dim)
    for name, gates, at in (("a", a, a_at), ("b", b, b_at)):
        _check_gates(name, gates, at, inputs, A_log.shape[0])
    chosen = resolve(implementation, _unsupported(inputs, taps, A_log, key_heads, key_dim))
    return _run(
        inputs,
        history,
        jnp.asarray(layer, jnp.int32),
        taps,
        rows,
        a,
        b,
        A_log,
        dt_bias,
        key_heads=key_heads,
        key_dim=key_dim,
        at=(a_at, b_at),
        chosen=chosen,
    )


@functools.partial(jax.jit, static_argnames=("key_heads", "key_dim", "at", "chosen"))
def _run(
    *arrays: jax.Array, key_heads: int, key_dim: int, at: tuple[int, int], chosen: str
) -> TreeConv:
    """Jitted, so that the layers of a model share one trace and one lowering."""
    sizes = {"key_heads": key_heads, "key_dim": key_dim, "at": at}
    if chosen == "xla":
        return TreeConv(*reference.tree_conv(*arrays, **sizes))
    return TreeConv(*mosaic_gpu.tree_conv(*arrays, **sizes, chosen=chosen))


def _check(
    inputs: jax.Array,
    history: jax.Array,
    taps: jax.Array,
    rows: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    key_heads: int,
    key_dim: int,
) -> None:
    batch, nodes, given = inputs.shape
    (width, channels), value_heads = taps.shape, A_log.shape[0]
    values = channels - 2 * key_heads * key_dim
    if values <= 0 or values % value_heads:
        raise ValueError(
            f"taps have {channels} channels: {key_heads} key heads of {key_dim} twice leave "
            f"{values}, expected a positive multiple of the {value_heads} value heads"
        )
    if given < channels:
        raise ValueError(f"inputs have {given} channels, expected at least the {channels} of taps")
    expected: dict[str, tuple[Any, tuple[int, ...]]] = {
        "history": (history, (history.shape[0], batch, width - 1, channels)),
        "rows": (rows, (batch, nodes, width)),
        "dt_bias": (dt_bias, (value_heads,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if history.dtype != inputs.dtype:
        raise ValueError(f"history is {history.dtype} and inputs are {inputs.dtype}, expected one")


def _check_gates(name: str, gates: jax.Array, at: int, inputs: jax.Array, heads: int) -> None:
    if gates.shape[:2] != inputs.shape[:2] or not 0 <= at <= gates.shape[2] - heads:
        raise ValueError(
            f"{name} has shape {gates.shape}, expected {inputs.shape[:2]} and {heads} columns "
            f"from {at} on"
        )


def _unsupported(
    inputs: jax.Array, taps: jax.Array, A_log: jax.Array, key_heads: int, key_dim: int
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    nodes, channels = inputs.shape[1], taps.shape[1]
    value_dim = (channels - 2 * key_heads * key_dim) // A_log.shape[0]
    if inputs.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the kernel takes float32 or bfloat16 inputs, got {inputs.dtype}"
    if taps.shape[0] < 2:
        return "the kernel needs at least two taps"
    if nodes > 128:
        return f"the kernel takes at most 128 nodes, got {nodes}"
    for name, width in (("key_dim", key_dim), ("the value width", value_dim)):
        if width % 8 or width > 256:
            return f"the kernel takes multiples of 8 up to 256 as {name}, got {width}"
    if inputs.shape[2] % 8:  # rows are copied in bulk, from addresses that 16 bytes divide
        return f"the kernel takes multiples of 8 columns as inputs, got {inputs.shape[2]}"
    return None
