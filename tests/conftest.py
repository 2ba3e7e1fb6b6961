"""One strict JAX for every test: checked shapes, no silent promotion, nothing cached on disk.

Shapes and dtypes of all ``typed`` functions are checked while they are traced. Mixing dtypes or
ranks by accident is an error. Eight virtual CPU devices stand in for eight real ones.
"""

import importlib.util
import os

if importlib.util.find_spec("beartype"):  # a GPU machine may lack it; shapes are checked in CI
    os.environ["TREEJAX_TYPECHECK"] = "beartype"  # read when treejax.shapes is imported
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)

hypothesis.settings.register_profile(
    "treejax",
    deadline=None,  # the first example compiles
    derandomize=True,
    database=None,
    max_examples=25,
    phases=[p for p in hypothesis.Phase if p is not hypothesis.Phase.explain],
)
hypothesis.settings.load_profile("treejax")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "standard_promotion: optax mixes dtypes and ranks inside; allow it in this test"
    )


@pytest.fixture(autouse=True, scope="module")
def _give_back_programs():
    """Compiled programs live as long as their process: without this it grows to several GB."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _standard_promotion(request):
    """Lift the promotion rules for tests that ask for it."""
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
