"""Model families: configurations and weight names between Hugging Face folders and treejax.

One file a family; ``REGISTRY`` is the whole list. ``config_from_hf`` and ``config_to_hf`` are
inverse on everything that a ``ModelConfig`` holds, and ``config_to_hf`` checks it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from treejax.config import ModelConfig
from treejax.families import qwen3_5, qwen3_5_moe, qwen3_next
from treejax.families.common import Family, Fields, shared_arguments, shared_mapping
from treejax.families.entries import Entry, model_entries

REGISTRY: dict[str, Family] = {
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
}


def config_from_hf(mapping: Mapping[str, Any]) -> ModelConfig:
    """The model described by the content of a ``config.json``, in any published spelling.

    Text-only and wrapped (``text_config``), rotary settings in ``rope_parameters`` or at the top,
    ``layer_types`` or ``full_attention_interval``. Absent fields mean what they mean to
    transformers. ``mtp_num_hidden_layers`` is 0 where a family's configuration has no such field.

    Raises:
      ValueError: an unknown family, or a setting that is malformed or not supported.
    """
    family = _family_of(mapping)
    fields = Fields(mapping, family.defaults)
    shared = shared_arguments(fields)
    own = family.read(fields, len(shared["layer_types"]))
    return ModelConfig(family=family.name, **shared, **own)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The content of a text-only ``config.json`` that transformers and ``config_from_hf`` read.

    Raises:
      ValueError: the family has no way to say what ``config`` says.
    """
    family = get_family(config)
    mapping = shared_mapping(config) | family.write(config)
    back = config_from_hf(mapping)
    if not family.mtp_in_config:
        back = dataclasses.replace(back, mtp_num_hidden_layers=config.mtp_num_hidden_layers)
    for field in dataclasses.fields(config):
        wanted, got = getattr(config, field.name), getattr(back, field.name)
        if wanted != got:
            raise ValueError(
                f"a {family.name} configuration cannot say {field.name} = {wanted!r}, "
                f"it would be read as {got!r}"
            )
    return mapping


def entries_of(config: ModelConfig, prefix: str, fused: Callable[[str], bool]) -> list[Entry]:
    """The stored tensors of a model (see ``entries.model_entries``)."""
    return model_entries(config, prefix, get_family(config).projections, fused)


def get_family(config: ModelConfig) -> Family:
    if config.family not in REGISTRY:
        known = ", ".join(REGISTRY)
        raise ValueError(f"family {config.family!r} is unknown, expected one of: {known}")
    return REGISTRY[config.family]


def _family_of(mapping: Mapping[str, Any]) -> Family:
    text = mapping.get("text_config") or {}
    named = text.get("model_type") or mapping.get("model_type")
    for family in REGISTRY.values():
        if named in family.model_types:
            return family
    known = ", ".join(kind for family in REGISTRY.values() for kind in family.model_types)
    raise ValueError(f"model_type {named!r} is not supported, expected one of: {known}")
