"""Which implementation a command runs. The library says through logging that ``auto`` came to the
reference; a command says it where its figures are.
"""

from typing import NamedTuple

from pallas_kernels.implementation import device_problem, resolve
from treejax.config import ModelConfig
from treejax.policies import kernel_problem

CHOICES = ("auto", "xla", "mosaic_gpu")


class Chosen(NamedTuple):
    """What runs, and why it is not the kernels if ``auto`` was asked for."""

    implementation: str
    notice: str | None


def choose_implementation(asked: str, config: ModelConfig, capacity: int) -> Chosen:
    """What ``asked`` comes to on this device, for a model and trees of a capacity.

    Raises:
      ValueError: kernels were asked for and cannot run.
    """
    problem = kernel_problem(config, capacity)
    if asked != "auto":
        return Chosen(resolve(asked, problem), None)
    problem = problem or device_problem()
    return Chosen("mosaic_gpu", None) if problem is None else Chosen("xla", problem)


def describe_implementations() -> str:
    """What ``--implementation`` accepts, and why the kernels cannot run here if so."""
    problem = device_problem()
    return "xla, mosaic_gpu" if problem is None else f"xla (not mosaic_gpu: {problem})"
