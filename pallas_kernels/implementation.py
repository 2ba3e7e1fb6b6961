"""Which implementation of an operation runs: the Mosaic GPU kernel, or its XLA reference.

``auto`` takes the kernel where it can run and the reference elsewhere, and says so once. Asking for
``mosaic_gpu`` where it cannot run is an error, never a silent fallback.
"""

import functools
import logging

import jax

IMPLEMENTATIONS = ("auto", "xla", "mosaic_gpu", "interpret")
"""``interpret`` runs the kernels through Pallas' GPU interpreter: slow, on any machine."""

HOPPER = ("H100", "H200", "H800", "GH200")

_LOGGER = logging.getLogger("pallas_kernels")


def resolve(implementation: str, unsupported: str | None = None) -> str:
    """The implementation to run: "xla", "mosaic_gpu" or "interpret".

    Args:
      implementation: one of ``IMPLEMENTATIONS``.
      unsupported: why the kernel cannot take these arguments, or None if it can.

    Raises:
      ValueError: an unknown name, or a kernel was asked for where it cannot run.
    """
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"unknown implementation {implementation!r}, expected one of: {known}")
    if implementation == "xla":
        return "xla"
    problem = unsupported
    if problem is None and implementation != "interpret":
        problem = device_problem()
    if problem is None:
        return "interpret" if implementation == "interpret" else "mosaic_gpu"
    if implementation == "auto":
        _notice(problem)
        return "xla"
    raise ValueError(f"implementation {implementation!r}: {problem}; use 'auto' or 'xla'")


def device_problem() -> str | None:
    """Why Mosaic kernels cannot run on the target device, or None: they need a Hopper GPU.

    The target is the abstract device when lowering for one, else the default device.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        if any(name in abstract.device_kind for name in HOPPER):
            return None
        return f"the kernels need a Hopper GPU, the target is {abstract.device_kind!r}"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the kernels need a Hopper GPU, the default device is a {device.platform.upper()}"
    capability = str(getattr(device, "compute_capability", ""))
    if capability.split(".")[0] != "9":
        return (
            f"the kernels need a Hopper GPU (compute capability 9), {device.device_kind} "
            f"has {capability or 'an unknown one'}"
        )
    return None


@functools.cache
def _notice(problem: str) -> None:
    """One line a reason and process, through the standard logging."""
    _LOGGER.warning("pallas_kernels: %s; running the XLA reference", problem)
