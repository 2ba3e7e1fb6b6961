"""Orbax checkpoints of any pytree: numbered steps that survive a kill, and exact restores.

A step is complete or it does not count: it is written under a temporary name and renamed. Values
come back bitwise, in the dtype they were saved in, onto the devices that the target names, whatever
devices saved them. Orbax is imported by the functions that need it; loading a model never does.
"""

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_COMPLETE = "commit_success.txt"  # orbax writes it last, before it renames the folder
_STEP = re.compile(r"(\d+)(\.orbax-checkpoint-tmp.*)?")
_SCALARS = (bool, int, float, str)


class Restored(NamedTuple):
    """What ``restore_checkpoint`` found: the step, its tree, and what the user should be told."""

    step: int
    tree: Any
    note: str | None


def save_checkpoint(directory: str | Path, step: int, tree: Any, keep: int | None = None) -> Path:
    """Save a pytree as ``directory/step`` and wait until it is on disk.

    Leaves are arrays (of any size and sharding, typed random keys included) or Python booleans,
    integers, floats and strings. What a killed save left in ``directory`` is removed.

    Args:
      keep: how many complete steps to leave there, this one included; None for all.

    Raises:
      ValueError: the step exists, or a leaf cannot be saved.
    """
    from orbax.checkpoint import v1 as ocp

    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step is {step} and keep {keep}, expected at least 0 and at least 1")
    directory = Path(directory).absolute()
    complete, unfinished = _scan(directory)
    if step in complete:
        raise ValueError(f"{directory} already holds step {step}")
    arrays, records = {}, {}
    for name, leaf in _named_leaves(tree).items():
        records[name] = _describe(name, leaf)
        if _is_key(leaf):
            records[name]["impl"] = str(jax.random.key_impl(leaf))
        if 0 not in records[name].get("shape", (0,)):  # orbax refuses arrays without elements
            arrays[name] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if not arrays:
        raise ValueError("a checkpoint needs at least one array with elements, the tree has none")
    if jax.process_index() == 0:
        for paths in unfinished.values():
            for path in paths:
                shutil.rmtree(path)
    ocp.save(str(directory / str(step)), arrays, custom_metadata={"leaves": records})
    if keep is not None and jax.process_index() == 0:
        for old in sorted({*complete, step})[:-keep]:
            shutil.rmtree(directory / str(old))
    return directory / str(step)


def restore_checkpoint(directory: str | Path, target: Any, step: int | None = None) -> Restored:
    """Restore a step, the latest complete one by default, into the structure of ``target``.

    Args:
      target: a tree like the saved one. Array leaves (``jax.ShapeDtypeStruct`` or arrays) give
        shape, dtype and sharding; without a sharding the first device. A NumPy array asks for a
        NumPy array. The values in it do not matter.

    Returns:
      ``Restored(step, tree, note)``; ``note`` is one line when a later step was found unfinished.

    Raises:
      ValueError: no such step, or the target differs from what was saved in structure, shape or
        dtype. A restore never converts: a bfloat16 target of a float32 leaf is an error.
    """
    from orbax.checkpoint import v1 as ocp

    directory = Path(directory).absolute()
    complete, unfinished = _scan(directory)
    step = _choose(directory, step, complete, unfinished)
    path = directory / str(step)
    custom: Any = ocp.metadata(str(path)).custom_metadata
    if not custom or "leaves" not in custom:
        raise ValueError(f"{path} was not written by save_checkpoint")
    records: dict[str, dict[str, Any]] = custom["leaves"]
    wanted = _named_leaves(target)
    for name in sorted(records.keys() ^ wanted.keys()):
        where = "the target" if name in records else "the checkpoint"
        raise ValueError(f"{path}: leaf {name!r} is not in {where}")
    asked = {}
    for name, leaf in wanted.items():
        saved, description = records[name], _describe(name, leaf)
        if _kind(saved) != _kind(description):
            raise ValueError(
                f"{path}: leaf {name!r} was saved as {_kind(saved)}, "
                f"the target asks for {_kind(description)}"
            )
        if 0 not in saved.get("shape", (0,)):
            asked[name] = _abstract(leaf)
    loaded: Any = ocp.load(str(path), asked)
    leaves = [_revive(records[name], leaf, loaded.get(name)) for name, leaf in wanted.items()]
    tree = jax.tree.unflatten(jax.tree.structure(target), leaves)
    return Restored(step, tree, unfinished_note(directory, step))


def latest_step(directory: str | Path) -> int | None:
    """The last complete step, or None."""
    return max(_scan(Path(directory))[0], default=None)


def unfinished_note(directory: str | Path, step: int | None) -> str | None:
    """One line for the user if a step later than ``step`` (None: any) was left unfinished."""
    later = max((n for n in _scan(Path(directory))[1] if step is None or n > step), default=None)
    if later is None:
        return None
    instead = "there is no earlier one" if step is None else f"using step {step}"
    return f"step {later} in {directory} was not completed, {instead}"


def _scan(directory: Path) -> tuple[set[int], dict[int, list[Path]]]:
    """(complete steps, folders of unfinished steps)."""
    complete: set[int] = set()
    unfinished: dict[int, list[Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if not match or not path.is_dir():
            continue
        if match[2] is None and (path / _COMPLETE).exists():
            complete.add(int(match[1]))
        else:
            unfinished.setdefault(int(match[1]), []).append(path)
    return complete, unfinished


def _choose(
    directory: Path, step: int | None, complete: set[int], unfinished: dict[int, list[Path]]
) -> int:
    if not complete:
        raise ValueError(f"{directory} holds no complete checkpoint")
    if step is None:
        return max(complete)
    if step not in complete:
        state = "was not completed" if step in unfinished else "does not exist"
        known = ", ".join(str(n) for n in sorted(complete))
        raise ValueError(f"step {step} in {directory} {state}; complete steps: {known}")
    return step


def _named_leaves(tree: Any) -> dict[str, Any]:
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(f"two leaves of the tree are called {name!r}")
        named[name] = leaf
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.uint8), jax.dtypes.prng_key)


def _describe(name: str, leaf: Any) -> dict[str, Any]:
    """What is recorded of a leaf, as JSON: dtype and shape, or the value of a Python scalar."""
    if type(leaf) in _SCALARS:
        return {"type": type(leaf).__name__, "value": leaf}
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    raise ValueError(f"leaf {name!r} is a {type(leaf).__name__}, expected an array or a number")


def _kind(record: dict[str, Any]) -> str:
    return record["type"] if "type" in record else f"{record['dtype']}{record['shape']}"


def _abstract(leaf: Any) -> Any:
    """The array to ask orbax for."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(leaf)
    # Without a sharding orbax wants the devices that saved, which need not exist here.
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharding = getattr(leaf, "sharding", None) or first
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _revive(record: dict[str, Any], target: Any, loaded: Any) -> Any:
    """The restored leaf in the form of the target."""
    if "value" in record:
        return record["value"]
    if loaded is None:  # no elements, so nothing was stored
        empty = np.empty(target.shape, target.dtype)
        return empty if isinstance(target, np.ndarray) else jnp.asarray(empty)
    if _is_key(target):
        return jax.random.wrap_key_data(loaded, impl=record["impl"])
    if loaded.dtype != target.dtype:  # 64-bit values of a jax.Array leaf without x64
        raise ValueError(f"a leaf saved as {target.dtype} came back as {loaded.dtype}")
    return loaded
