"""Which implementation runs: kernels on Hopper, the reference elsewhere, and one notice."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import use_abstract_mesh
from kernel_cases import abstract_gpu

from pallas_kernels import implementation
from pallas_kernels.implementation import device_problem, resolve


@pytest.fixture(autouse=True)
def _no_notice_yet():
    implementation._notice.cache_clear()


@pytest.fixture
def device(monkeypatch):
    """Pretend that the default device is another one."""

    def pretend(platform, kind, capability=None):
        pretended = SimpleNamespace(
            platform=platform, device_kind=kind, compute_capability=capability
        )
        monkeypatch.setattr(jax, "devices", lambda: [pretended])

    return pretend


def test_a_cpu_runs_the_reference_with_one_notice(caplog):
    assert [resolve("auto") for _ in range(3)] == ["xla"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "pallas_kernels: the kernels need a Hopper GPU, the default device is a CPU; "
        "running the XLA reference"
    ]


def test_kernels_are_never_replaced_in_silence():
    with pytest.raises(ValueError, match="'mosaic_gpu': the kernels need a Hopper GPU"):
        resolve("mosaic_gpu")
    for asked in ("mosaic_gpu", "interpret"):
        with pytest.raises(ValueError, match="too wide; use 'auto' or 'xla'"):
            resolve(asked, "too wide")
    with pytest.raises(ValueError, match="unknown implementation 'cuda', expected one of: auto"):
        resolve("cuda")


@pytest.mark.parametrize("capability,runs", [("9.0", True), ("8.0", False), ("7.5", False)])
def test_fc24_older_gpus_run_the_reference(device, capability, runs, caplog):
    """FC-24: on a device that kernels do not support the reference, with one notice."""
    device("gpu", "NVIDIA something", capability)
    assert resolve("auto") == ("mosaic_gpu" if runs else "xla")
    assert len(caplog.records) == (0 if runs else 1)
    if not runs:
        assert f"NVIDIA something has {capability}" in caplog.text


def test_shapes_that_no_kernel_takes_run_the_reference(device, caplog):
    device("gpu", "NVIDIA H200", "9.0")
    assert resolve("auto", "too wide") == "xla"
    assert "too wide; running the XLA reference" in caplog.text


@pytest.mark.parametrize("kind,runs", [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_lowering_for_another_device_asks_for_that_one(kind, runs):
    with use_abstract_mesh(abstract_gpu(kind)):
        assert (device_problem() is None) == runs
