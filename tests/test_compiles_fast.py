"""The marker ``compiles_fast``: what it changes is seen in a program's roundings."""

import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.compiles_fast

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"
PROGRAM = """
import jax
print(jax.config.values["jax_disable_most_optimizations"])
"""


def test_this_module_compiles_without_optimisations():
    assert jax.config.values[VARIABLE.lower()] is True


def test_processes_of_this_module_do_so_too():
    made = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert made.stdout == "True\n", made.stderr
