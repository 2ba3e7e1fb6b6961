"""What a policy says of its memory: ``buffers()``, which plans and statistics add up."""

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from treejax.audit.component.operands import Shape
from treejax.config import LINEAR, ModelConfig
from treejax.policies import Policy


def wrong_buffers(policy: Policy, shape: Shape) -> list[str]:
    """Each entry of ``buffers()`` that is no number of bytes, at one row and at the shape's.

    Raises:
      Exception: whatever the policy raises.
    """
    config = _config(shape)
    places = [(1, 1), (1, shape.batch), (shape.rows, 1), (shape.rows, shape.batch)]
    wrong: dict[str, None] = {}
    for rows, batch in places:
        wrong |= dict.fromkeys(_wrong(policy.buffers(config, rows, batch)))
    return list(wrong)


def _wrong(given: Any) -> Iterator[str]:
    if not isinstance(given, Mapping):
        yield f"{type(given).__name__} instead of a dict"
        return
    for name, size in given.items():
        whole = isinstance(size, Integral) and not isinstance(size, bool)
        if not isinstance(name, str) or not whole or int(size) < 0:
            yield f"{name}: {size!r}"


def _config(shape: Shape) -> ModelConfig:
    """A model of nothing but the shape's recurrent layers."""
    return ModelConfig(
        family="qwen3_5",
        vocab_size=1,
        hidden_size=1,
        layer_types=(LINEAR,) * shape.layers,
        intermediate_size=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads,
        linear_key_head_dim=shape.key_dim,
        linear_value_head_dim=shape.value_dim,
    )
