"""Where the commands keep compiled programs."""

import jax
import pytest

from treejax.cli.cache import use_compilation_cache


@pytest.fixture(autouse=True)
def _folder_as_before():
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_cache_lies_in_the_users_folder_or_nowhere(tmp_path, monkeypatch):
    """XDG's folder, else ~/.cache; one that cannot be made is done without; a chosen one stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    assert use_compilation_cache() == tmp_path / "cache" / "treejax" / "xla"
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says: ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert use_compilation_cache() == tmp_path / ".cache" / "treejax" / "xla"
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_compilation_cache() is None and jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "chosen"))
    assert use_compilation_cache() == tmp_path / "chosen"
