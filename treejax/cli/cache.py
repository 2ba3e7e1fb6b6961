"""The compilation cache of the commands: compiled programs stay in the user's cache folder.

Importing treejax never switches it on. JAX's key covers program, versions, flags and the
processor's features, so that a folder shared by several machines is safe.
"""

import os
from pathlib import Path

import jax


def use_compilation_cache() -> Path | None:
    """Keep compiled programs between runs: the folder, or None where none can be written.

    A folder that the user chose (``JAX_COMPILATION_CACHE_DIR``) stays.
    """
    chosen = jax.config.jax_compilation_cache_dir
    folder = Path(chosen) if chosen else _user_folder()
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def _user_folder() -> Path | None:
    """``treejax/xla`` below the user's cache folder (XDG base directories)."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    except RuntimeError:  # there is no home
        return None
    return base / "treejax" / "xla"
