"""A folder of safetensors files as one set of named tensors, and writing such a folder.

Reading keeps account: a tensor that is taken is checked for shape and dtype, and the names never
taken are known, so that nothing is missing and nothing is silently ignored.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names that ``write_tensors`` uses."""

_DTYPES = ("F32", "BF16", "F16")


class StoredTensors:
    """The tensors of ``model.safetensors``, or of the shards that the index names.

    Raises:
      ValueError: no such files, a shard of the index is absent or damaged, or a shard lacks a
        tensor that the index promises.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._home = {}  # name of a tensor -> the open file that holds it
        self._taken: set[str] = set()
        for path, promised in _files(folder):
            try:
                file = safe_open(path, framework="numpy")
            except FileNotFoundError:
                raise ValueError(
                    f"{folder}: shard {path.name} is named in {INDEX} and absent "
                    f"({len(promised)} tensors, first {min(promised)!r})"
                ) from None
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged or incomplete: {error}") from None
            found = set(file.keys())
            for name in sorted(promised - found):
                raise ValueError(f"{path} lacks tensor {name!r}, which {INDEX} places there")
            for name in sorted(found & self._home.keys()):
                raise ValueError(f"{folder}: tensor {name!r} is in two files")
            self._home |= dict.fromkeys(found, file)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._home)

    @property
    def unused(self) -> list[str]:
        """Names that were never taken, sorted."""
        return sorted(self.names - self._taken)

    def take(self, name: str, shape: tuple[int, ...], hint: str = "") -> np.ndarray:
        """One tensor in its stored dtype; ``hint`` explains why it is needed if it is absent."""
        if name not in self._home:
            raise ValueError(f"{self.folder}: tensor {name!r} is missing{hint}")
        header = self._home[name].get_slice(name)
        got, dtype = tuple(header.get_shape()), header.get_dtype()
        if got != shape:
            raise ValueError(
                f"{self.folder}: tensor {name!r} has shape {list(got)}, expected {list(shape)}"
            )
        if dtype not in _DTYPES:
            raise ValueError(
                f"{self.folder}: tensor {name!r} has dtype {dtype}, expected {' or '.join(_DTYPES)}"
            )
        self._taken.add(name)
        return self._home[name].get_tensor(name)


def _files(folder: Path) -> Iterable[tuple[Path, set[str]]]:
    """Files to read, each with the names that the index promises in it."""
    if (folder / SINGLE).exists():
        return [(folder / SINGLE, set())]
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map")
    promised: dict[str, set[str]] = {}
    for name, file in where.items():
        promised.setdefault(file, set()).add(name)
    return [(folder / file, names) for file, names in sorted(promised.items())]


def write_tensors(folder: Path, tensors: dict[str, np.ndarray], shard_bytes: int) -> None:
    """Write ``model.safetensors``, or shards of at most ``shard_bytes`` each with an index.

    A tensor larger than ``shard_bytes`` gets a shard of its own.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        # The writer copies memory as it lies: a transposed view would be written untransposed.
        shards[-1][name] = np.ascontiguousarray(tensor)
        filled += tensor.nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    for file, shard in zip(names, shards, strict=True):
        path = folder / file
        path.touch()
        mode = path.stat().st_mode
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(mode)  # the writer's own is readable by its user alone
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(folder / INDEX, index)


def read_json(path: Path) -> dict:
    """A JSON object from a file; an absent or malformed file is a one-line ``ValueError``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
