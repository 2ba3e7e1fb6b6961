"""Models to Hugging Face folders: ``save_model``, the inverse of ``load_model``.

The folder is written beside its final place and renamed when it is complete: a kill leaves the
previous folder, or none, never half of one.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from treejax.families import config_to_hf, entries_of, get_family
from treejax.families.entries import leaves_by_path
from treejax.model import Model
from treejax.parameters import abstract, unfuse
from treejax.tensors import WRITTEN, write_json, write_tensors

# A stale generation_config.json would add its end tokens; config.json has those of the model.
_OURS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def save_model(model: Model, directory: str | Path, shard_bytes: int = 5 * 10**9) -> None:
    """Write ``model`` as a Hugging Face folder that ``load_model`` and transformers read.

    Tensors keep their dtypes (``A_log``, ``dt_bias`` and the gated norm are float32); the MTP head
    goes under ``mtp.*``, experts in the form that the family publishes. ``directory`` appears, or
    is replaced, only when all files are written; other files in it stay.

    Args:
      shard_bytes: the largest file of weights; more go into shards with an index.

    Raises:
      ValueError: the parameters do not fit the configuration, or the family cannot express it.
    """
    directory = Path(directory).resolve()  # a link stays a link, its folder is replaced
    mapping = config_to_hf(model.config) | {"dtype": str(model.dtype)}
    tensors = _pack(model)
    with _replacing(directory) as folder:
        write_json(folder / "config.json", mapping)
        write_tensors(folder, tensors, shard_bytes)
        if model.tokenizer is not None:
            model.tokenizer.save(str(folder / "tokenizer.json"))
            write_json(folder / "tokenizer_config.json", _tokenizer_settings(model))


def _tokenizer_settings(model: Model) -> dict[str, Any]:
    """What transformers' ``AutoTokenizer`` needs beside ``tokenizer.json``."""
    ends = model.config.eos_token_ids
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "eos_token": model.tokenizer.id_to_token(ends[0]) if ends else None,
    }


def _pack(model: Model) -> dict[str, np.ndarray]:
    """The stored tensors of a model, by name."""
    config = model.config
    values = _checked_values(model)
    tensors: dict[str, np.ndarray] = {}
    for entry in entries_of(config, "model.", lambda layer: get_family(config).fused_experts):
        packed = entry.pack(*(values[path] for path in entry.paths))
        for (name, _), tensor in zip(entry.stored, packed, strict=True):
            tensors[name] = tensor
    return tensors


def _checked_values(model: Model) -> dict[tuple, np.ndarray]:
    wanted = leaves_by_path(abstract(model.config, model.dtype))
    given = leaves_by_path(unfuse(model.params))
    for path in sorted(wanted.keys() ^ given.keys(), key=str):
        state = "missing" if path in wanted else "not part of the configuration"
        raise ValueError(f"parameter {path} is {state}")
    for path, leaf in wanted.items():
        if given[path].shape != leaf.shape or given[path].dtype != leaf.dtype:
            raise ValueError(
                f"parameter {path} is {given[path].dtype}{list(given[path].shape)}, "
                f"expected {leaf.dtype}{list(leaf.shape)}"
            )
    return {path: np.asarray(leaf) for path, leaf in given.items()}


@contextlib.contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A new folder that becomes ``directory`` when the block ends without an error.

    Files of the old folder that ``save_model`` does not write move along.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, expected a folder or a name that is free")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    if directory.is_dir():
        old = directory.with_name(f".{directory.name}.replaced-{os.getpid()}")
        directory.rename(old)
        for path in old.iterdir():
            if path.name not in _OURS and not WRITTEN.fullmatch(path.name):
                path.rename(partial / path.name)
        partial.rename(directory)
        shutil.rmtree(old)
    else:
        partial.rename(directory)
