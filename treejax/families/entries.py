"""How stored tensors and parameters correspond: one ``Entry`` per tensor or group of tensors.

An entry names the stored tensors with their shapes, the parameters they hold, and the two
directions between them. Loading and saving walk the same list, so they cannot disagree. All
functions work on NumPy arrays of any dtype and never do arithmetic: a round trip is bitwise.

Hugging Face stores matrices [out, in], treejax [in, out]. Norm weights are stored as offsets from
one (gain 1 + w) by both, the gated norm's plainly by both, so no value changes on the way.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from treejax.config import LINEAR, ModelConfig

Path = tuple[str | int, ...]
Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Stored tensors that together hold some parameters.

    Attributes:
      stored: (name, shape) of each stored tensor.
      paths: where their content goes in the parameter tree.
      unpack: stored tensors to parameters, in the order of ``paths``.
      pack: parameters to stored tensors, in the order of ``stored``.
    """

    stored: tuple[tuple[str, tuple[int, ...]], ...]
    paths: tuple[Path, ...]
    unpack: Callable[..., Arrays]
    pack: Callable[..., Arrays]


def leaves_by_path(params: Any) -> dict[Path, Any]:
    """The leaves of a parameter tree by their paths, in the tree's order."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {
        tuple(k.key if hasattr(k, "key") else k.idx for k in path): leaf for path, leaf in leaves
    }


def plain(name: str, path: Path, *shape: int) -> Entry:
    """One tensor, kept as it is."""
    return Entry(((name, shape),), (path,), lambda x: (x,), lambda x: (x,))


def matrix(name: str, path: Path, rows: int, columns: int) -> Entry:
    """A linear layer's weight, stored [out, in]."""
    return Entry(((name, (rows, columns)),), (path,), lambda x: (x.T,), lambda x: (x.T,))


def model_entries(
    config: ModelConfig,
    prefix: str,
    projections: Callable[[ModelConfig, str, Path], list[Entry]],
    fused: Callable[[str], bool],
) -> list[Entry]:
    """Every stored tensor of a model, the MTP head included when the configuration has one.

    Args:
      prefix: ``"model."``, or ``"model.language_model."`` in wrapped checkpoints.
      projections: the family's input projections of a recurrent layer.
      fused: whether the experts of the layer with this name prefix are stored as one tensor.
    """
    H, V = config.hidden_size, config.vocab_size
    entries = [plain(f"{prefix}embed_tokens.weight", ("embed",), V, H)]
    for i, kind in enumerate(config.layer_types):
        name, path = f"{prefix}layers.{i}", ("layers", i)
        if kind == LINEAR:
            entries += projections(config, f"{name}.linear_attn", (*path, "mixer"))
            entries += _delta_net(config, f"{name}.linear_attn", (*path, "mixer"))
        else:
            entries += _attention(config, f"{name}.self_attn", (*path, "mixer"))
        entries += _around(config, name, path, config.is_moe(i), fused(name))
    entries.append(plain(f"{prefix}norm.weight", ("norm",), H))
    if not config.tie_word_embeddings:
        entries.append(plain("lm_head.weight", ("lm_head",), V, H))
    if config.mtp_num_hidden_layers:
        entries += _mtp(config, fused("mtp.layers.0"))
    return entries


def separate_projections(config: ModelConfig, name: str, path: Path) -> list[Entry]:
    """Qwen3.5: q | k | v in plain blocks, and z, b, a each alone (hybrid-model 4.1)."""
    H, Hv = config.hidden_size, config.linear_num_value_heads
    return [
        matrix(f"{name}.in_proj_qkv.weight", (*path, "qkv"), config.conv_channels, H),
        matrix(f"{name}.in_proj_z.weight", (*path, "z"), Hv * config.linear_value_head_dim, H),
        matrix(f"{name}.in_proj_b.weight", (*path, "b"), Hv, H),
        matrix(f"{name}.in_proj_a.weight", (*path, "a"), Hv, H),
    ]


def _delta_net(config: ModelConfig, name: str, path: Path) -> list[Entry]:
    Hv, dv = config.linear_num_value_heads, config.linear_value_head_dim
    conv = (config.conv_channels, 1, config.linear_conv_kernel_dim)
    return [
        Entry(
            ((f"{name}.conv1d.weight", conv),),
            ((*path, "conv"),),
            lambda x: (x[:, 0, :].T,),
            lambda x: (x.T[:, None, :],),
        ),
        plain(f"{name}.A_log", (*path, "A_log"), Hv),
        plain(f"{name}.dt_bias", (*path, "dt_bias"), Hv),
        plain(f"{name}.norm.weight", (*path, "norm_gated"), dv),
        matrix(f"{name}.out_proj.weight", (*path, "out"), config.hidden_size, Hv * dv),
    ]


def _attention(config: ModelConfig, name: str, path: Path) -> list[Entry]:
    H, D = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
    return [
        # Rows are per head D of query and then D of gate, which is the parameter's layout too.
        matrix(f"{name}.q_proj.weight", (*path, "q"), 2 * queries, H),
        matrix(f"{name}.k_proj.weight", (*path, "k"), keys, H),
        matrix(f"{name}.v_proj.weight", (*path, "v"), keys, H),
        matrix(f"{name}.o_proj.weight", (*path, "o"), H, queries),
        plain(f"{name}.q_norm.weight", (*path, "norm_q"), D),
        plain(f"{name}.k_norm.weight", (*path, "norm_k"), D),
    ]


def _around(config: ModelConfig, name: str, path: Path, moe: bool, fused: bool) -> list[Entry]:
    """What a layer has beside its mixer: two norms and the MLP or the experts."""
    H = config.hidden_size
    mlp = _experts(config, f"{name}.mlp", (*path, "mlp"), fused) if moe else None
    return [
        plain(f"{name}.input_layernorm.weight", (*path, "norm_input"), H),
        plain(f"{name}.post_attention_layernorm.weight", (*path, "norm_post"), H),
        *(mlp or _mlp(f"{name}.mlp", (*path, "mlp"), H, config.intermediate_size)),
    ]


def _mlp(name: str, path: Path, hidden: int, width: int) -> list[Entry]:
    return [
        matrix(f"{name}.gate_proj.weight", (*path, "gate"), width, hidden),
        matrix(f"{name}.up_proj.weight", (*path, "up"), width, hidden),
        matrix(f"{name}.down_proj.weight", (*path, "down"), hidden, width),
    ]


def _experts(config: ModelConfig, name: str, path: Path, fused: bool) -> list[Entry]:
    H, E, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    stored = _fused_experts if fused else _split_experts
    shared = config.shared_expert_intermediate_size
    return [
        matrix(f"{name}.gate.weight", (*path, "router"), E, H),
        *stored(f"{name}.experts", (*path, "experts"), E, H, width),
        *_mlp(f"{name}.shared_expert", (*path, "shared"), H, shared),
        matrix(f"{name}.shared_expert_gate.weight", (*path, "shared_gate"), 1, H),
    ]


def _fused_experts(name: str, path: Path, count: int, hidden: int, width: int) -> list[Entry]:
    """All experts in two tensors; gate rows come before up rows."""

    def unpack(gate_up: np.ndarray) -> Arrays:
        return gate_up[:, :width].swapaxes(1, 2), gate_up[:, width:].swapaxes(1, 2)

    def pack(gate: np.ndarray, up: np.ndarray) -> Arrays:
        return (np.concatenate([gate.swapaxes(1, 2), up.swapaxes(1, 2)], axis=1),)

    def swap(down: np.ndarray) -> Arrays:
        return (down.swapaxes(1, 2),)

    both = ((*path, "gate"), (*path, "up"))
    return [
        Entry(((f"{name}.gate_up_proj", (count, 2 * width, hidden)),), both, unpack, pack),
        Entry(((f"{name}.down_proj", (count, hidden, width)),), ((*path, "down"),), swap, swap),
    ]


def _split_experts(name: str, path: Path, count: int, hidden: int, width: int) -> list[Entry]:
    """Three tensors an expert, stacked over the experts."""

    def unpack(*stored: np.ndarray) -> Arrays:
        return (np.stack([x.T for x in stored]),)

    def pack(parameter: np.ndarray) -> Arrays:
        return tuple(x.T for x in parameter)

    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return [
        Entry(
            tuple((f"{name}.{e}.{part}_proj.weight", shape) for e in range(count)),
            ((*path, part),),
            unpack,
            pack,
        )
        for part, shape in shapes.items()
    ]


def _mtp(config: ModelConfig, fused: bool) -> list[Entry]:
    """The head's tensors never carry the model's prefix (hybrid-model 8)."""
    H, name, path = config.hidden_size, "mtp.layers.0", ("mtp", "layer")
    return [
        plain("mtp.pre_fc_norm_embedding.weight", ("mtp", "norm_embedding"), H),
        plain("mtp.pre_fc_norm_hidden.weight", ("mtp", "norm_hidden"), H),
        matrix("mtp.fc.weight", ("mtp", "fc"), H, 2 * H),  # columns: embedding half first
        *_attention(config, f"{name}.self_attn", (*path, "mixer")),
        *_around(config, name, path, config.mtp_moe, fused),
        plain("mtp.norm.weight", ("mtp", "norm"), H),
    ]
