"""A program compiles once a run: then it is read, bit for bit what it was, and still counted."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compilations


@pytest.fixture
def hits():
    """Events of programs that were found in the folder."""
    seen = []

    def listen(event, **details):
        if event.endswith("/cache_hits"):
            seen.append(event)

    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a GPU compiles is not kept")
def test_a_program_that_was_forgotten_is_read_again(hits):
    folder = Path(jax.config.jax_compilation_cache_dir or "")
    assert folder.name.startswith("treejax-programs-")
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)

    def once_a_run(x):
        return jnp.tanh(x @ x.T / 3.0).sum(axis=0)

    made = []
    for found in (0, 1):
        hits.clear()
        with compilations() as counted:
            made.append(np.asarray(jax.jit(once_a_run)(x)))
        assert counted["jit(once_a_run)"] == 1 and len(hits) == found
        assert any("once_a_run" in file.name for file in folder.iterdir())
        jax.clear_caches()
    np.testing.assert_array_equal(made[0].view(np.uint32), made[1].view(np.uint32))
