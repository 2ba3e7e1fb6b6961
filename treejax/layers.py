"""The layers of the hybrid: norms, rotary, attention, Gated DeltaNet, MLP and experts.

Each function computes rows alone; how rows see one another (a causal prompt, a tree, a training
window) comes in as a function: ``operands``, ``delta`` and ``attend``. Float32 models multiply at
full precision on every device; gates, decays and the recurrence are float32 whatever the model is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from treejax.config import ModelConfig
from treejax.delta_rule import Operands
from treejax.shapes import Array, Bool, Float, Int, Shaped, typed

Params = dict[str, Any]


def precision_of(dtype: Any) -> lax.Precision:
    """IEEE products for float32 (a GPU would use tf32), the native ones for bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def trailing(w: Array, x: Array) -> Array:
    """w with leading axes of size 1, so that it meets the last axes of x."""
    return w.reshape((1,) * (x.ndim - w.ndim) + w.shape)


def linear(x: Array, w: Array) -> Array:
    """x [..., in] times w [in, out]."""
    return jnp.matmul(x, w, precision=precision_of(x.dtype))


def project(
    p: Params, x: Array, *names: str, product: Callable[[Array, Array], Array] = linear
) -> tuple[Array, ...]:
    """x times each of the named matrices: one product where ``parameters.fuse`` joined them."""
    fused = p.get("+".join(names))
    if fused is None:
        return tuple(product(x, p[name]) for name in names)
    return fused.split(product(x, fused.matrix))


@typed
def rms_norm(x: Shaped[Array, "*b H"], w: Shaped[Array, " H"], eps: float) -> Shaped[Array, "*b H"]:
    """Zero-centred RMSNorm: the stored weight is an offset from one; float32, rounded once."""
    y = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale * trailing(1.0 + w.astype(jnp.float32), y)).astype(x.dtype)


@typed
def gated_norm(
    o: Float[Array, "*b dv"], w: Float[Array, " dv"], z: Shaped[Array, "*b dv"], eps: float
) -> Shaped[Array, "*b dv"]:
    """RMSNorm of the recurrent output with a plain weight, then the gate silu(z)."""
    scale = lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps)
    return (o * scale * trailing(w, o) * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


@typed
def rotary(
    x: Shaped[Array, "*b T heads D"], positions: Int[Array, "*b T"], config: ModelConfig
) -> Shaped[Array, "*b T heads D"]:
    """Rotate the first ``rotary_dim`` channels, pairing each half; angles in float32."""
    half = config.rotary_dim // 2
    exponent = -2.0 / config.rotary_dim * jnp.arange(half, dtype=jnp.float32)
    frequency = trailing(config.rope_theta**exponent, x)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y = x.astype(jnp.float32)
    first, second, rest = y[..., :half], y[..., half : 2 * half], x[..., 2 * half :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


@typed
def attend(
    q: Shaped[Array, "T Hq D"],
    k: Shaped[Array, "M Hkv D"],
    v: Shaped[Array, "M Hkv D"],
    mask: Bool[Array, "T M"],
    keys: Shaped[Array, "S Hkv D"],
    values: Shaped[Array, "S Hkv D"],
    length: Int[Array, ""],
) -> Shaped[Array, "T Hq D"]:
    """Attention of one sequence over ``length`` cached rows and, by ``mask``, over its own block.

    The two parts share one softmax but are never concatenated: the cache is read in place.
    """
    rows, heads, width = q.shape
    grouped = q.reshape(rows, k.shape[1], heads // k.shape[1], width)
    precision = precision_of(q.dtype)

    def scores(against: Array, allowed: Array) -> Array:
        s = jnp.einsum(
            "tgrd,sgd->grts",
            grouped,
            against,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return jnp.where(allowed, s * width**-0.5, -jnp.inf)

    past = scores(keys, jnp.arange(keys.shape[0]) < length)
    block = scores(k, mask)
    top = jnp.maximum(past.max(axis=-1, initial=-jnp.inf), block.max(axis=-1))[..., None]
    past, block = jnp.exp(past - top), jnp.exp(block - top)
    total = past.sum(axis=-1) + block.sum(axis=-1)

    def weigh(p: Array, against: Array) -> Array:
        return jnp.einsum(
            "grts,sgd->tgrd",
            p.astype(q.dtype),
            against,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    out = weigh(past, values) + weigh(block, v)
    out = out / jnp.moveaxis(total, -1, 0)[..., None]
    return out.reshape(rows, heads, width).astype(q.dtype)


def attention(
    config: ModelConfig, p: Params, x: Array, positions: Array, attend: Callable[..., Any]
) -> tuple[Array, tuple[Array, Array]]:
    """Gated attention over x [..., T, H]: the output and this block's (keys, values).

    ``attend(q, k, v)`` sees normalised, rotated queries and keys with a head axis.
    """
    eps, width = config.rms_norm_eps, config.head_dim
    both, k, v = project(p, x, "q", "k", "v")
    both = both.reshape(*x.shape[:-1], config.num_attention_heads, 2 * width)
    q, gate = both[..., :width], both[..., width:]
    shape = (*x.shape[:-1], config.num_key_value_heads, width)
    q = rotary(rms_norm(q, p["norm_q"], eps), positions, config)
    k = rotary(rms_norm(k.reshape(shape), p["norm_k"], eps), positions, config)
    v = v.reshape(shape)
    out = attend(q, k, v) * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)
    return linear(out.reshape(*x.shape[:-1], -1), p["o"]), (k, v)


class Projections(NamedTuple):
    """What a recurrent layer makes of its rows [..., T, H] before they meet one another.

    Attributes:
      inputs: [..., T, C] of the convolution. z: [..., T, Hv dv] of the output's gate.
      b, a: [..., T, Hv] of write strengths and decays.
      whole: all four side by side in this order, if they are one product. A kernel reads its
        columns where they lie; the other attributes are then made for those who ask.
    """

    inputs: Array
    z: Array
    b: Array
    a: Array
    whole: Array | None


def delta_net(
    config: ModelConfig,
    p: Params,
    x: Array,
    operands: Callable[[ModelConfig, Params, Projections], Operands],
    delta: Callable[[Operands], tuple[Array, Any]],
) -> tuple[Array, tuple[Array, Any]]:
    """Gated DeltaNet over x [..., T, H]: the output and (convolution inputs, what delta recorded).

    ``delta(operands)`` gives outputs [..., T, Hv, dv] float32 and a record.
    """
    made = projections(p, x)
    out, record = delta(operands(config, p, made))
    y = gated_norm(out, p["norm_gated"], made.z.reshape(out.shape), config.rms_norm_eps)
    return linear(y.reshape(*x.shape[:-1], -1), p["out"]), (made.inputs, record)


def projections(p: Params, x: Array) -> Projections:
    """x [..., T, H] times the input matrices of a recurrent layer."""
    names = "qkv", "z", "b", "a"
    fused = p.get("+".join(names))
    if fused is None:
        inputs, z, b, a = project(p, x, *names)
        return Projections(inputs, z, b, a, whole=None)
    whole = linear(x, fused.matrix)
    return Projections(*fused.split(whole), whole=whole)


def by_convolution(
    convolve: Callable[[int, Array, Array], Array],
) -> Callable[[int, ModelConfig, Params, Projections], Operands]:
    """``Mixing.operands`` from ``convolve(i, inputs, taps)``, float32 and not yet activated."""

    def operands(i: int, config: ModelConfig, p: Params, made: Projections) -> Operands:
        mixed = jax.nn.silu(convolve(i, made.inputs, p["conv"])).astype(made.inputs.dtype)
        return delta_operands(config, p, mixed, made.a, made.b)

    return operands


def delta_operands(config: ModelConfig, p: Params, mixed: Array, a: Array, b: Array) -> Operands:
    """Operands of the rule from the activated convolution [..., T, C] and the gate inputs."""
    heads, width = config.linear_num_key_heads, config.linear_key_head_dim
    keys = heads * width
    mixed = mixed.astype(jnp.float32)
    q = mixed[..., :keys].reshape(*mixed.shape[:-1], heads, width)
    k = mixed[..., keys : 2 * keys].reshape(*mixed.shape[:-1], heads, width)
    v = mixed[..., 2 * keys :].reshape(*mixed.shape[:-1], config.linear_num_value_heads, -1)
    alpha, g = decays(log_decay(a, p["A_log"], p["dt_bias"]))
    return Operands(
        q=l2_normalise(q) * width**-0.5,
        k=l2_normalise(k),
        v=v,
        g=g,
        alpha=alpha,
        beta=jax.nn.sigmoid(b.astype(jnp.float32)),
    )


@typed
def log_decay(
    a: Shaped[Array, "*b Hv"], A_log: Float[Array, " Hv"], dt_bias: Float[Array, " Hv"]
) -> Float[Array, "*b Hv"]:
    """g = -exp(A_log) softplus(a + dt_bias), float32."""
    A_log, dt_bias = trailing(A_log, a), trailing(dt_bias, a)
    return -jnp.exp(A_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)


def decays(g: Array) -> tuple[Array, Array]:
    """The decay alpha = exp(g) in float32, and *its* logarithm: one number for every policy.

    Near 1 a float32 is half a unit, 3e-8, away from exp(g), and a head that forgets slowly has
    about the same g at every token: what multiplies by alpha and what sums g would drift apart by
    1e-5 in a thousand tokens. Below 1/2 a state forgets faster than that could show.
    """
    alpha = lax.optimization_barrier(jnp.exp(g))  # or the compiler takes the exp and log away
    return alpha, jnp.where(alpha > 0.5, jnp.log1p(jnp.minimum(alpha - 1.0, 0.0)), g)


def l2_normalise(x: Array) -> Array:
    """x / sqrt(sum x^2 + 1e-6): the epsilon is inside the root and not ``rms_norm_eps``."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def mlp(p: Params, x: Array) -> Array:
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    gate, up = project(p, x, "gate", "up")
    return linear(jax.nn.silu(gate) * up, p["down"])


def experts(config: ModelConfig, p: Params, x: Array) -> Array:
    """Mixture of experts over x [..., H]: routed experts plus the gated shared one.

    Rows are sorted by expert and multiplied group by group, so each expert's weights are read
    once and only the chosen experts compute.
    """
    rows = x.reshape(-1, x.shape[-1])
    chosen = config.num_experts_per_tok
    weight = jax.nn.softmax(linear(rows, p["router"]).astype(jnp.float32), axis=-1)
    weight, expert = lax.top_k(weight, chosen)
    if config.norm_topk_prob:
        weight = weight / weight.sum(axis=-1, keepdims=True)

    flat = expert.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=config.num_experts).astype(jnp.int32)

    def grouped(inputs: Array, weights: Array) -> Array:
        return lax.ragged_dot(inputs, weights, sizes, precision=precision_of(x.dtype))

    sent = rows[order // chosen]
    gates, ups = project(p["experts"], sent, "gate", "up", product=grouped)
    back = grouped(jax.nn.silu(gates) * ups, p["experts"]["down"])[jnp.argsort(order)]
    back = back.reshape(-1, chosen, x.shape[-1]).astype(jnp.float32)
    routed = jnp.einsum("rkh,rk->rh", back, weight, precision=lax.Precision.HIGHEST)
    gate = jax.nn.sigmoid(linear(rows, p["shared_gate"]).astype(jnp.float32))
    shared = gate * mlp(p["shared"], rows).astype(jnp.float32)
    return (routed + shared).astype(x.dtype).reshape(x.shape)


def feed_forward(config: ModelConfig, p: Params, x: Array) -> Array:
    return experts(config, p, x) if "router" in p else mlp(p, x)


def embed(params: Params, tokens: Array) -> Array:
    """Rows of the embedding; inactive rows (token -1) read row 0, whose value nobody uses."""
    return look_up(params["embed"], jnp.maximum(tokens, 0))


@jax.custom_vjp
def look_up(table: Array, tokens: Array) -> Array:
    """Rows [..., H] of table [V, H]. Its gradient is a product with the one-hot rows.

    The scatter-add that indexing would give serialises on frequent tokens: on a GPU it took as
    long as the rest of a small model's backward pass.
    """
    return table[tokens]


def _look_up_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, int]]:
    return table[tokens], (tokens, table.shape[0])


def _look_up_backward(saved: tuple[Array, int], cotangent: Array) -> tuple[Array, None]:
    tokens, entries = saved
    rows = cotangent.reshape(-1, cotangent.shape[-1])
    one_hot = jax.nn.one_hot(tokens.reshape(-1), entries, dtype=rows.dtype)
    precision = precision_of(rows.dtype)
    table = jnp.einsum(
        "nv,nh->vh", one_hot, rows, precision=precision, preferred_element_type=jnp.float32
    )
    return table.astype(rows.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def logits(params: Params, hidden: Array) -> Array:
    """Scores over the vocabulary in float32: hidden [..., H] to [..., V]."""
    head = params.get("lm_head", params["embed"])
    return jnp.einsum(
        "...h,vh->...v",
        hidden,
        head,
        precision=precision_of(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
