"""What a model is: one frozen, hashable description, and the strict reader for TOML files.

``ModelConfig`` uses Hugging Face's field names. It is static under ``jax.jit``; every shape of
parameters and state follows from it. Families turn a ``config.json`` into one.
"""

import dataclasses
import tomllib
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

LINEAR, FULL = "linear_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one hybrid model.

    Attributes:
      family: the name of its family in ``treejax.families.REGISTRY``.
      layer_types: one of ``linear_attention`` (Gated DeltaNet) or ``full_attention`` a layer.
      moe_layers: per layer, whether its MLP is a mixture of experts.
      rotary_dim: how many leading channels of an attention head are rotated.
      mtp_num_hidden_layers: layers of the multi-token-prediction head; 0 without one.
      eos_token_ids: tokens that end a text.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rotary_dim: int = 64
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    moe_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    mtp_num_hidden_layers: int = 0
    mtp_moe: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads is {self.linear_num_value_heads}, expected a multiple of "
                f"linear_num_key_heads ({self.linear_num_key_heads})"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        for kind in self.layer_types:
            if kind not in (LINEAR, FULL):
                raise ValueError(f"layer type {kind!r} is unknown, expected {LINEAR} or {FULL}")
        if self.mtp_num_hidden_layers > 1:
            raise ValueError(
                f"mtp_num_hidden_layers is {self.mtp_num_hidden_layers}, at most 1 is supported"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the recurrent layers among all layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the attention layers among all layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def conv_channels(self) -> int:
        keys = 2 * self.linear_num_key_heads * self.linear_key_head_dim
        return keys + self.linear_num_value_heads * self.linear_value_head_dim

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; a syntax error is a ``ValueError`` that names the file."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no such configuration file: {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def from_mapping[T](cls: type[T], values: dict[str, Any], where: str) -> T:
    """Build the dataclass ``cls`` from a TOML table: unknown, missing or mistyped keys are errors.

    Nested dataclass fields take nested tables; lists become tuples.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unset = dataclasses.MISSING
    needed = [n for n, f in fields.items() if f.default is unset and f.default_factory is unset]
    missing = [name for name in needed if name not in values]
    lacking = f"missing key{'s'[: len(missing) - 1]} {', '.join(map(repr, missing))}"
    unknown = sorted(set(values) - set(fields))
    if unknown:  # perhaps a missing one misspelt: both are said
        known, more = ", ".join(sorted(fields)), f"; {lacking}" if missing else ""
        raise ValueError(f"{where}: unknown key {unknown[0]!r}, expected one of: {known}{more}")
    if missing:
        raise ValueError(f"{where}: {lacking}")
    built = {
        name: _convert(fields[name].type, value, f"{where}.{name}")
        for name, value in values.items()
    }
    return cls(**built)


def _convert(kind: Any, value: Any, where: str) -> Any:
    accepted = (kind,)
    if get_origin(kind) is tuple:
        if isinstance(value, list):
            inner = get_args(kind)[0]
            return tuple(_convert(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
        accepted = (list,)
    elif get_args(kind):  # a union
        accepted = get_args(kind)
    nested = next((each for each in accepted if dataclasses.is_dataclass(each)), None)
    if nested is not None and isinstance(value, dict):
        return from_mapping(nested, value, where)  # type: ignore[arg-type]
    if float in accepted and int not in accepted and type(value) is int:
        return float(value)
    if type(value) not in accepted:
        names = [getattr(t, "__name__", str(t)) for t in accepted if t is not NoneType]
        raise ValueError(f"{where} is {value!r}, expected {' or '.join(names)}")
    return value
