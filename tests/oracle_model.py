"""A whole hybrid model in float64 NumPy, read straight from a Hugging Face folder.

Tensors keep their Hugging Face names and layouts: this file knows nothing of the package's
parameters, loader or state, so it checks all of them. A tree is evaluated path by path, each
root-to-node path run on its own from the prefix, which is what "a node continues its parent" means.
"""

import dataclasses
import json
from pathlib import Path

import ml_dtypes  # noqa: F401  makes bfloat16 known to safetensors.numpy
import numpy as np
from oracle import attend_tree, chain, convolve_tree, delta_rule, path_to, sigmoid, silu, softmax
from oracle import unit as l2_unit
from safetensors.numpy import load_file


@dataclasses.dataclass(frozen=True)
class Cache:
    """The three surfaces after ``length`` tokens; layer index -> array. Never changed in place."""

    length: int
    R: dict[int, np.ndarray]  # [Hv, dv, dk]
    C: dict[int, np.ndarray]  # [K - 1, channels], raw inputs, oldest first
    K: dict[int, np.ndarray]  # [length, Hkv, D], after norm and rotary
    V: dict[int, np.ndarray]  # [length, Hkv, D]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a forward over T tokens gives: logits [T, V], hidden [T, H] after the final norm."""

    logits: np.ndarray
    hidden: np.ndarray
    cache: Cache
    inputs: list[np.ndarray]  # per layer, the residual stream that enters it [T, H]
    traces: dict[int, dict[str, np.ndarray]]  # recurrent layer -> query, key, value, g, beta, out


class OracleModel:
    """Forward passes of one checkpoint folder, in float64."""

    def __init__(self, folder):
        folder = Path(folder)
        raw = {}
        for shard in sorted(folder.glob("*.safetensors")):
            raw |= load_file(shard)
        self.tensors = {name: array.astype(np.float64) for name, array in raw.items()}
        top = json.loads((folder / "config.json").read_text())
        self.config = config = top.get("text_config", top)
        wrapped = any(name.startswith("model.language_model.") for name in self.tensors)
        self.prefix = "model.language_model." if wrapped else "model."
        self.layers = config["num_hidden_layers"]
        self.is_linear = [self._name(i, "linear_attn.A_log") in raw for i in range(self.layers)]
        self.Hk, self.Hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.dk, self.dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.width = config["linear_conv_kernel_dim"]
        self.Hq, self.Hkv = config["num_attention_heads"], config["num_key_value_heads"]
        self.D = config["head_dim"]
        rope = config.get("rope_parameters") or {}
        self.theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
        self.rotary = int(self.D * factor)
        self.eps = config["rms_norm_eps"]
        self.embed = self.tensors[self.prefix + "embed_tokens.weight"]
        self.head = self.tensors.get("lm_head.weight", self.embed)

    def _name(self, layer, rest):
        return f"{self.prefix}layers.{layer}.{rest}"

    def empty(self):
        """The cache before the first token."""
        linear = [i for i in range(self.layers) if self.is_linear[i]]
        full = [i for i in range(self.layers) if not self.is_linear[i]]
        channels = 2 * self.Hk * self.dk + self.Hv * self.dv
        return Cache(
            length=0,
            R={i: np.zeros((self.Hv, self.dv, self.dk)) for i in linear},
            C={i: np.zeros((self.width - 1, channels)) for i in linear},
            K={i: np.zeros((0, self.Hkv, self.D)) for i in full},
            V={i: np.zeros((0, self.Hkv, self.D)) for i in full},
        )

    def forward(self, tokens, cache=None):
        """Run ``tokens`` [T] on top of ``cache`` (empty when None)."""
        cache = self.empty() if cache is None else cache
        tokens = np.asarray(tokens, int)
        x = self.embed[tokens]
        R, C, K, V = dict(cache.R), dict(cache.C), dict(cache.K), dict(cache.V)
        inputs, traces = [], {}
        for i in range(self.layers):
            inputs.append(x)
            normed = self.norm(x, self.tensors[self._name(i, "input_layernorm.weight")])
            if self.is_linear[i]:
                mixed, R[i], C[i], traces[i] = self.delta_net(i, normed, R[i], C[i])
            else:
                mixed, k, v = self.attention(self._name(i, ""), normed, cache.length, K[i], V[i])
                K[i], V[i] = np.concatenate([K[i], k]), np.concatenate([V[i], v])
            x = self.feed_forward(self._name(i, ""), x + mixed)
        hidden = self.norm(x, self.tensors[self.prefix + "norm.weight"])
        after = Cache(cache.length + len(tokens), R, C, K, V)
        return Run(hidden @ self.head.T, hidden, after, inputs, traces)

    def tree(self, cache, tokens, parents):
        """Each root-to-node path on its own: a list with one Run (of the whole path) a node."""
        tokens = np.asarray(tokens)
        return [self.forward(tokens[path_to(parents, n)], cache) for n in range(len(tokens))]

    def greedy(self, cache, token, count):
        """``count`` greedy tokens after ``token``, and the smallest gap of best to second best."""
        out, gap = [], np.inf
        for _ in range(count):
            run = self.forward([token], cache)
            cache, row = run.cache, run.logits[-1]
            token = int(np.argmax(row))
            gap = min(gap, row[token] - np.max(np.delete(row, token)))
            out.append(token)
        return out, gap

    def mtp(self, hidden, next_tokens, keys=None, values=None):
        """The MTP head over pairs (h_t, x_{t+1}); keys, values [S, Hkv, D] of the pairs before.

        Returns hidden [T, H] after ``mtp.norm``, logits [T, V], keys and values with the new rows.
        """
        t = self.tensors
        empty = np.zeros((0, self.Hkv, self.D))
        keys, values = (empty if keys is None else keys), (empty if values is None else values)
        e = self.norm(self.embed[np.asarray(next_tokens)], t["mtp.pre_fc_norm_embedding.weight"])
        m = self.norm(np.asarray(hidden, np.float64), t["mtp.pre_fc_norm_hidden.weight"])
        y = np.concatenate([e, m], -1) @ t["mtp.fc.weight"].T
        normed = self.norm(y, t["mtp.layers.0.input_layernorm.weight"])
        mixed, k, v = self.attention("mtp.layers.0.", normed, len(keys), keys, values)
        y = self.feed_forward("mtp.layers.0.", y + mixed)
        out = self.norm(y, t["mtp.norm.weight"])
        return out, out @ self.head.T, np.concatenate([keys, k]), np.concatenate([values, v])

    def norm(self, x, weight):
        """Zero-centred RMS norm: the stored weight is an offset from one."""
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps) * (1.0 + weight)

    def projections(self, layer, x):
        """Convolution inputs u [T, C], output gate z [T, Hv, dv], b and a [T, Hv]."""
        name = self._name(layer, "linear_attn.")
        t, rows, ratio = self.tensors, len(x), self.Hv // self.Hk
        if name + "in_proj_qkv.weight" in t:
            u, z, b, a = (
                x @ t[f"{name}in_proj_{part}.weight"].T for part in ("qkv", "z", "b", "a")
            )
            return u, z.reshape(rows, self.Hv, self.dv), b, a
        fused = (x @ t[name + "in_proj_qkvz.weight"].T).reshape(rows, self.Hk, -1)
        sizes = np.cumsum([self.dk, self.dk, ratio * self.dv])
        q, k, v, z = np.split(fused, sizes, -1)  # one group a key head
        gates = (x @ t[name + "in_proj_ba.weight"].T).reshape(rows, self.Hk, 2, ratio)
        b, a = gates[:, :, 0].reshape(rows, -1), gates[:, :, 1].reshape(rows, -1)
        u = np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], -1)
        return u, z.reshape(rows, self.Hv, self.dv), b, a

    def delta_net(self, layer, x, R, history):
        """A recurrent layer: output [T, H], the new R and history, and a trace of the operands."""
        name, t, rows = self._name(layer, "linear_attn."), self.tensors, len(x)
        u, z, b, a = self.projections(layer, x)
        taps = t[name + "conv1d.weight"][:, 0, :].T
        mixed = convolve_tree(history, chain(rows), u, taps)
        keys = self.Hk * self.dk
        q = mixed[:, :keys].reshape(rows, self.Hk, self.dk)
        k = mixed[:, keys : 2 * keys].reshape(rows, self.Hk, self.dk)
        v = mixed[:, 2 * keys :].reshape(rows, self.Hv, self.dv)
        beta = sigmoid(b)
        g = -np.exp(t[name + "A_log"]) * np.logaddexp(0.0, a + t[name + "dt_bias"])
        out, after = delta_rule(R, l2_unit(q) * self.dk**-0.5, l2_unit(k), v, g, beta)
        scale = np.sqrt(np.mean(out * out, -1, keepdims=True) + self.eps)
        y = out / scale * t[name + "norm.weight"] * silu(z)  # a plain weight, not 1 + w
        trace = {"query": q, "key": k, "value": v, "g": g, "beta": beta, "out": out}
        recent = np.concatenate([history, u])[-(self.width - 1) :]
        return y.reshape(rows, -1) @ t[name + "out_proj.weight"].T, after, recent, trace

    def attention(self, where, x, position, keys, values):
        """An attention layer; returns output [T, H] and the new rows k, v [T, Hkv, D]."""
        name, t, rows = where + "self_attn.", self.tensors, len(x)
        both = (x @ t[name + "q_proj.weight"].T).reshape(rows, self.Hq, 2 * self.D)
        q, gate = both[..., : self.D], both[..., self.D :]  # interleaved head by head
        k = (x @ t[name + "k_proj.weight"].T).reshape(rows, self.Hkv, self.D)
        v = (x @ t[name + "v_proj.weight"].T).reshape(rows, self.Hkv, self.D)
        positions = position + np.arange(rows)
        q = self.rope(self.norm(q, t[name + "q_norm.weight"]), positions)
        k = self.rope(self.norm(k, t[name + "k_norm.weight"]), positions)
        out = attend_tree(q, k, v, chain(rows), keys, values) * sigmoid(gate)
        return out.reshape(rows, -1) @ t[name + "o_proj.weight"].T, k, v

    def rope(self, x, positions):
        """Rotate the first ``rotary`` channels of x [T, heads, D], pairs half a width apart."""
        half = self.rotary // 2
        frequency = self.theta ** (-2.0 * np.arange(half) / self.rotary)
        angle = (positions[:, None] * frequency)[:, None, :]
        first, second = x[..., :half], x[..., half : self.rotary]
        turned = first * np.cos(angle) - second * np.sin(angle)
        other = second * np.cos(angle) + first * np.sin(angle)
        return np.concatenate([turned, other, x[..., self.rotary :]], -1)

    def feed_forward(self, where, x):
        """The residual MLP half of a layer, dense or with experts by what the checkpoint holds."""
        normed = self.norm(x, self.tensors[where + "post_attention_layernorm.weight"])
        name = where + "mlp."
        if name + "gate.weight" not in self.tensors:
            return x + self.swiglu(name, normed)
        return x + np.stack([self.experts(name, row) for row in normed])

    def swiglu(self, name, x):
        gate, up, down = (
            self.tensors[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(self, name, row):
        """One token [H] through its chosen experts and the shared one."""
        t = self.tensors
        p = softmax(t[name + "gate.weight"] @ row)
        chosen = np.argsort(-p, kind="stable")[: self.config["num_experts_per_tok"]]
        weight = p[chosen]
        if self.config.get("norm_topk_prob", True):
            weight = weight / weight.sum()
        out = sigmoid(t[name + "shared_expert_gate.weight"] @ row) * self.swiglu(
            name + "shared_expert.", row
        )
        for e, s in zip(chosen, weight, strict=True):
            out = out + s * self.one_expert(name, e, row)
        return out

    def one_expert(self, name, e, row):
        t = self.tensors
        if name + "experts.gate_up_proj" not in t:
            return self.swiglu(f"{name}experts.{e}.", row)
        gate, up = np.split(t[name + "experts.gate_up_proj"][e], 2)
        return t[name + "experts.down_proj"][e] @ (silu(gate @ row) * (up @ row))
