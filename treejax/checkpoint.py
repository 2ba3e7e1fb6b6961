"""Models from Hugging Face folders: ``load_model``; its inverse ``save_model`` is in export.py.

Every stored tensor is used or deliberately skipped (the vision part), and every parameter comes
from the folder: a model never runs on half of its weights. Loading changes layout and dtype, never
a value beyond the rounding to the dtype asked for; saving and loading again is bitwise.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from treejax.config import ModelConfig
from treejax.export import save_model
from treejax.families import config_from_hf, entries_of, get_family
from treejax.families.common import token_ids
from treejax.families.entries import leaves_by_path
from treejax.model import Model
from treejax.parameters import abstract, fuse
from treejax.tensors import StoredTensors, read_json

__all__ = ["SHIPPED", "LoadSummary", "load_model", "save_model"]

SHIPPED = {"python-11m": Path(__file__).parent / "models" / "python-11m"}
"""The models that come with the package, by name; the first is what no name means."""

_VISION = ("model.visual.", "visual.")
_DTYPES = ("float32", "bfloat16")
_LARGEST_EXPONENT = 88.0  # exp of more overflows float32


@dataclasses.dataclass(frozen=True)
class LoadSummary:
    """What loading found.

    Attributes:
      parameters: numbers in all parameters together.
      tensors: stored tensors used.
      mtp_tensors: those of them that belong to the MTP head.
      skipped: names of stored tensors that were deliberately not used.
      bytes: memory of the parameters.
    """

    parameters: int
    tensors: int
    mtp_tensors: int
    skipped: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        text = f"{self.parameters:,} parameters, {self.bytes / 2**20:,.1f} MiB, "
        text += f"{self.tensors} tensors, {self.mtp_tensors} of the MTP head"
        return text + (f", {len(self.skipped)} vision tensors skipped" if self.skipped else "")


def load_model(
    path_or_name: str | Path | None = None, dtype: str = "float32", fused: bool = False
) -> Model:
    """Load a model from a Hugging Face folder, or one that ships with the package.

    Args:
      path_or_name: a folder with ``config.json``, ``model.safetensors`` or shards with an index,
        and perhaps ``tokenizer.json``; or a name of ``SHIPPED``; None for the first of these.
      dtype: ``"float32"`` or ``"bfloat16"``. ``A_log``, ``dt_bias`` and the gated norm are float32
        always.
      fused: lay projections that share an input side by side (``treejax.parameters.fuse``), which
        decodes faster on a GPU. Not for training.

    Returns:
      The model, its parameters on the default device. ``model.summary`` is a ``LoadSummary``.
      Without ``mtp.*`` tensors the configuration says ``mtp_num_hidden_layers`` 0.

    Raises:
      ValueError: a file, shard or tensor is missing, damaged, of the wrong shape or not part of
        the model; the configuration is not supported; ``A_log`` is not finite.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected {' or '.join(_DTYPES)}")
    folder = find_folder(path_or_name)
    stored = StoredTensors(folder)
    config = _settle_mtp(_read_config(folder), stored)
    params, used, skipped = _read_parameters(config, stored, dtype)
    leaves = jax.tree.leaves(params)  # those of the file: fusing may add columns of zeros
    summary = LoadSummary(
        parameters=sum(leaf.size for leaf in leaves),
        tensors=len(used),
        mtp_tensors=sum(name.startswith("mtp.") for name in used),
        skipped=skipped,
        bytes=sum(leaf.nbytes for leaf in leaves),
    )
    params = jax.device_put(fuse(params) if fused else params)
    return Model(params, config, _read_tokenizer(folder, config), summary)


def find_folder(path_or_name: str | Path | None) -> Path:
    """The folder that ``load_model`` reads for a path, a name of ``SHIPPED`` or None."""
    name = next(iter(SHIPPED)) if path_or_name is None else path_or_name
    if not isinstance(name, (str, Path)):
        raise ValueError(
            f"model is {name!r:.80}, expected a folder, a name of one that ships, or None"
        )
    folder = SHIPPED.get(name, Path(name)) if isinstance(name, str) else name
    if not folder.is_dir():
        shipped = ", ".join(SHIPPED)
        raise ValueError(f"no model folder {str(folder)!r}; models that ship: {shipped}")
    return folder


def _read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    mapping = read_json(path)
    try:
        config = config_from_hf(mapping)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    generation = folder / "generation_config.json"
    if generation.exists():  # chat models name their end-of-turn token only here
        more = token_ids(read_json(generation).get("eos_token_id"), f"{generation}: eos_token_id")
        ends = tuple(dict.fromkeys((*config.eos_token_ids, *more)))
        config = dataclasses.replace(config, eos_token_ids=ends)
    return config


def _settle_mtp(config: ModelConfig, stored: StoredTensors) -> ModelConfig:
    """Tensors decide whether there is an MTP head where the configuration leaves it open."""
    present = any(name.startswith("mtp.") for name in stored.names)
    layers = config.mtp_num_hidden_layers
    if not present:
        layers = 0
    elif not get_family(config).mtp_in_config:
        layers = 1
    return dataclasses.replace(config, mtp_num_hidden_layers=layers)


def _read_parameters(
    config: ModelConfig, stored: StoredTensors, dtype: str
) -> tuple[dict[str, Any], list[str], tuple[str, ...]]:
    """(parameters as NumPy arrays, names used, names skipped)."""
    wrapped = any(name.startswith("model.language_model.") for name in stored.names)
    prefix = "model.language_model." if wrapped else "model."
    values, used = {}, []
    for entry in entries_of(
        config, prefix, lambda layer: f"{layer}.mlp.experts.gate_up_proj" in stored.names
    ):
        arrays = []
        for name, shape in entry.stored:
            hint = " (tie_word_embeddings is false)" if name == "lm_head.weight" else ""
            arrays.append(stored.take(name, shape, hint))
            used.append(name)
        values |= zip(entry.paths, entry.unpack(*arrays), strict=True)
    skipped = _account_for_rest(config, stored, values[("embed",)])

    tree = abstract(config, jnp.dtype(dtype))
    leaves = [
        np.asarray(values[path]).astype(leaf.dtype, order="C", copy=False)
        for path, leaf in leaves_by_path(tree).items()
    ]
    params = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    for i in config.linear_layers:
        A_log = params["layers"][i]["mixer"]["A_log"]
        if not np.all(np.isfinite(A_log) & (A_log < _LARGEST_EXPONENT)):
            raise ValueError(
                f"{stored.folder}: A_log of layer {i} is {A_log.tolist()}, "
                f"expected finite values below {_LARGEST_EXPONENT}"
            )
    return params, used, skipped


def _account_for_rest(
    config: ModelConfig, stored: StoredTensors, embedding: np.ndarray
) -> tuple[str, ...]:
    """Names deliberately skipped; any other tensor that is left is an error."""
    skipped, extra = [], []
    for name in stored.unused:
        (skipped if name.startswith(_VISION) else extra).append(name)
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        head = stored.take("lm_head.weight", embedding.shape)
        if not np.array_equal(head, embedding):
            raise ValueError(
                f"{stored.folder}: lm_head.weight differs from the embedding although "
                "config.json says tie_word_embeddings"
            )
        extra.remove("lm_head.weight")
        skipped.append("lm_head.weight")
    if extra:
        reason = ""
        if extra[0].startswith("mtp.") and not config.mtp_num_hidden_layers:
            reason = ": config.json says mtp_num_hidden_layers 0"
        raise ValueError(
            f"{stored.folder}: {len(extra)} tensors are not part of a {config.family} model "
            f"with this config.json, first {extra[0]!r}{reason}"
        )
    return tuple(skipped)


def _read_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from None
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"{path} has {tokenizer.get_vocab_size()} tokens, "
            f"expected at most vocab_size ({config.vocab_size})"
        )
    return tokenizer
