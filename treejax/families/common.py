"""What the families share: the record of one family, and the fields of a ``config.json``.

A configuration is read from its text part (the mapping itself, or ``text_config`` of a wrapper)
with the family's defaults. A setting that would change the arithmetic and is not implemented is
refused here, so that no checkpoint loads into a model that computes something else.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from treejax.config import FULL, LINEAR, ModelConfig
from treejax.families.entries import Entry, Path

# Settings with one supported value (null counts as absent, which every published model allows).
_ONLY = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),  # names what every family does to z anyway
    "mtp_use_dedicated_embeddings": (False,),
}
_ROTARY_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",  # for text the three position streams are equal, so these two say nothing
    "mrope_interleaved",
)


class Fields:
    """The fields of one configuration: the text part, then its wrapper, then the defaults."""

    def __init__(self, mapping: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.wrapper = mapping
        self.text = mapping.get("text_config") or mapping
        self.defaults = defaults

    def get(self, name: str) -> Any:
        for level in (self.text, self.wrapper, self.defaults):
            if level.get(name) is not None:
                return level[name]
        return None

    def integer(self, name: str, minimum: int = 1) -> int:
        value = self.get(name)
        if type(value) is not int or value < minimum:
            raise ValueError(f"{name} is {value!r}, expected an integer of at least {minimum}")
        return value

    def number(self, name: str) -> float:
        return _positive(name, self.get(name))

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if type(value) is not bool:
            raise ValueError(f"{name} is {value!r}, expected true or false")
        return value


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family: how its configuration is spelled and its recurrent inputs are stored.

    Attributes:
      name: its key in ``REGISTRY`` and ``ModelConfig.family``.
      model_types: the values of ``model_type`` that mean this family.
      defaults: what an absent field means (the defaults of transformers' configuration class).
      read: the family's own arguments of ``ModelConfig``.
      write: the family's own fields of ``config.json``, with ``model_type`` and ``architectures``.
      projections: the stored input projections of a recurrent layer.
      fused_experts: whether published checkpoints store the experts of a layer as one tensor.
      mtp_in_config: whether ``config.json`` says if there is an MTP head. Where it does not,
        the head exists exactly when ``mtp.*`` tensors do.
    """

    name: str
    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]
    read: Callable[[Fields, int], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    projections: Callable[[ModelConfig, str, Path], list[Entry]]
    fused_experts: bool
    mtp_in_config: bool


def shared_arguments(fields: Fields) -> dict[str, Any]:
    """The arguments of ``ModelConfig`` that every family spells alike."""
    _refuse_unsupported(fields)
    head_dim = fields.integer("head_dim")
    bos = token_ids(fields.get("bos_token_id"), "bos_token_id")
    theta, rotary_dim = _rotary(fields, head_dim)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "layer_types": _layer_types(fields),
        "num_attention_heads": fields.integer("num_attention_heads"),
        "num_key_value_heads": fields.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "linear_num_key_heads": fields.integer("linear_num_key_heads"),
        "linear_num_value_heads": fields.integer("linear_num_value_heads"),
        "linear_key_head_dim": fields.integer("linear_key_head_dim"),
        "linear_value_head_dim": fields.integer("linear_value_head_dim"),
        "linear_conv_kernel_dim": fields.integer("linear_conv_kernel_dim"),
        "rotary_dim": rotary_dim,
        "rope_theta": theta,
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "mtp_num_hidden_layers": fields.integer("mtp_num_hidden_layers", minimum=0),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": token_ids(fields.get("eos_token_id"), "eos_token_id"),
    }


def expert_arguments(fields: Fields) -> dict[str, Any]:
    """The sizes of a mixture of experts, for families and configurations that have one."""
    names = (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )
    sizes = {name: fields.integer(name) for name in names}
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ValueError(
            f"num_experts_per_tok is {sizes['num_experts_per_tok']}, "
            f"expected at most num_experts ({sizes['num_experts']})"
        )
    return sizes


def shared_mapping(config: ModelConfig) -> dict[str, Any]:
    """The fields of ``config.json`` that every family spells alike, in the newest spelling."""
    copied = (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "max_position_embeddings",
        "bos_token_id",
    )
    ends = list(config.eos_token_ids)
    return {name: getattr(config, name) for name in copied} | {
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": _rotary_factor(config.rotary_dim, config.head_dim),
        },
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def expert_mapping(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
    }


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Token ids from an integer, a list of integers or null."""
    ids = () if value is None else value if isinstance(value, list) else (value,)
    if any(type(token) is not int or token < 0 for token in ids):
        raise ValueError(f"{name} is {value!r}, expected a token id or a list of them")
    return tuple(ids)


def _refuse_unsupported(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        if fields.get(name) is not None:
            raise ValueError(
                f"this checkpoint is quantised ({name} is set), which is not supported: "
                "load one in bfloat16, float16 or float32"
            )
    for name, supported in _ONLY.items():
        value = fields.get(name)
        if value is not None and value not in supported:
            raise ValueError(f"{name} is {value!r}, only {supported[0]!r} is supported")


def _rotary(fields: Fields, head_dim: int) -> tuple[float, int]:
    """(theta, rotated channels) from ``rope_parameters``, else from the older top-level fields."""
    new, old = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    for name, group in (("rope_parameters", new), ("rope_scaling", old)):
        kind = group.get("rope_type", group.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rotary type {kind!r} is not supported, expected 'default'")
        unknown = sorted(set(group) - set(_ROTARY_KEYS))
        if unknown:
            raise ValueError(
                f"{name} has an unknown key {unknown[0]!r}, expected: {', '.join(_ROTARY_KEYS)}"
            )
    settings = {**old, **new}
    theta = settings.get("rope_theta", fields.get("rope_theta"))
    factor = settings.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    rotary_dim = int(head_dim * _positive("partial_rotary_factor", factor))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor {factor} of head_dim {head_dim} rotates {rotary_dim} channels, "
            f"expected an even number from 2 to {head_dim}"
        )
    return _positive("rope_theta", theta), rotary_dim


def _rotary_factor(rotary_dim: int, head_dim: int) -> float:
    """The factor that every reader truncates back to ``rotary_dim`` channels."""
    factor = rotary_dim / head_dim
    while int(head_dim * factor) < rotary_dim:  # 49 * (1 / 49) is below 1 in float64
        factor = math.nextafter(factor, 2.0)
    return factor


def _layer_types(fields: Fields) -> tuple[str, ...]:
    count, kinds = fields.integer("num_hidden_layers"), fields.get("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval")
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} entries, expected {count} (one a layer)")
    return tuple(kinds)


def _positive(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a positive number")
    return float(value)
