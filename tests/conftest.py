"""One strict JAX for every test: checked shapes, no silent promotion, nothing of an earlier run.

Shapes and dtypes of all ``typed`` functions are checked while they are traced. Mixing dtypes or
ranks by accident is an error. Eight virtual CPU devices stand in for eight real ones. A program
compiles once a run: its processes share a folder that is new when the run starts.
"""

import collections
import gc
import importlib.util
import os
import tempfile

if importlib.util.find_spec("beartype"):  # a GPU machine may lack it; shapes are checked in CI
    os.environ["TREEJAX_TYPECHECK"] = "beartype"  # read when treejax.shapes is imported
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads spin where cores are busy

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", os.environ["JAX_PLATFORMS"] == "cpu")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

hypothesis.settings.register_profile(
    "treejax",
    deadline=None,  # the first example compiles
    derandomize=True,
    database=None,
    max_examples=25,
    phases=[p for p in hypothesis.Phase if p is not hypothesis.Phase.explain],
)
hypothesis.settings.load_profile("treejax")


LESS = "jax_disable_most_optimizations"  # the setting; in capitals the environment variable
PROGRAMS = "programs"  # the folder, as xdist hands it to its workers
FOLDER = pytest.StashKey[str]()


def pytest_configure(config):
    """The folder of compiled programs is the run's own, and ends with it.

    JAX's key covers the program, its options and flags: what is found there is what would be
    compiled. Processes that a test starts have caches of their own.
    """
    if hasattr(config, "workerinput"):
        folder = config.workerinput[PROGRAMS]
    else:
        made = tempfile.TemporaryDirectory(prefix="treejax-programs-", ignore_cleanup_errors=True)
        config.add_cleanup(made.cleanup)
        folder = config.stash[FOLDER] = made.name
    jax.config.update("jax_compilation_cache_dir", folder)
    config.addinivalue_line(
        "markers", "standard_promotion: optax mixes dtypes and ranks inside; allow it in this test"
    )
    config.addinivalue_line(
        "markers",
        "compiles_fast: XLA leaves out most optimisations in this module, which halves the time it "
        "compiles. For tests of tokens, trees and messages. Sums and products are then rounded "
        "differently: not for tests of bits, of roundings or of tight bounds",
    )


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node):
    node.workerinput[PROGRAMS] = node.config.stash[FOLDER]


def pytest_runtest_setup(item):
    """``compiles_fast`` acts on whole modules: on one test it would do nothing, so is refused."""
    module = item.getparent(pytest.Module)
    if item.get_closest_marker("compiles_fast") and not module.get_closest_marker("compiles_fast"):
        pytest.fail("compiles_fast marks one test, expected a module: use pytestmark", False)


def pytest_collection_modifyitems(items):
    """Modules with a slow test first, then those of many tests: none is begun near the end that
    would keep one worker busy long after the others."""
    tests = collections.Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))  # stable within each


def pytest_collection_finish():
    """What is imported by now lives to the end: a full collection need not walk through it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # tracing makes objects by the million, hardly any in cycles


@pytest.fixture(autouse=True, scope="module")
def _programs(request):
    """Compile as the module asks; and give the programs back, which would live as long as their
    process: without this it grows to several GB.

    Processes that a test starts compile as the test does.
    """
    before = jax.config.values[LESS]
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("compiles_fast"):
            jax.clear_caches()  # of what was compiled while modules were imported
            jax.config.update(LESS, True)
            patch.setenv(LESS.upper(), "1")
        yield
        jax.config.update(LESS, before)
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _standard_promotion(request):
    """Lift the promotion rules for tests that ask for it."""
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(params=["cpu", "accelerator"])
def branch(request, monkeypatch):
    """Which side of ``lax.platform_dependent`` runs, here on a CPU: its own, or the other one."""
    if request.param == "cpu":
        yield request.param
        return
    jax.clear_caches()  # of programs that took the other side
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    yield request.param
    jax.clear_caches()
