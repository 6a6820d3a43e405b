"""Emulated GPUs, and doubles of drivers' libraries, for the tests of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from driver_cases import SLOT
from driver_double import Double, compile_double
from simt_kernels import source
from zllmc.runtime import gpu, gpu_memory
from zllmc.runtime.driver_api import CUDA, HIP
from zllmc.runtime.emulator import EmulatedDevice


@pytest.fixture(scope="session")
def emulator_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept until the tests have run."""
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture(scope="session")
def open_device(emulator_cache: Path) -> Callable[..., EmulatedDevice]:
    """`open_device("metal", 64, reverse=True)`: a device with all of `simt_kernels`, or with a `text`."""

    def open_device(
        dialect: Any = "cuda", subgroup: int = 32, text: str | None = None, **options: Any
    ) -> EmulatedDevice:
        sources = {f"all.{dialect}": text or source(dialect)}
        return EmulatedDevice(sources, dialect, subgroup, cache=emulator_cache, **options)

    return open_device


@pytest.fixture(scope="session")
def libraries(emulator_cache):
    """Paths of the doubles, by kind."""
    return {kind: compile_double(kind, emulator_cache) for kind in ("cuda", "rocm")}


@pytest.fixture(params=[CUDA, HIP], ids=lambda vendor: vendor.kind)
def double(request, libraries, monkeypatch):
    for module in gpu, gpu_memory:
        monkeypatch.setattr(module, "SLOT", SLOT)
    double = Double(request.param, libraries[request.param.kind])
    yield double
    for device in double.devices:
        device.close()
    assert double.misuses() == ""
    assert double.left() == ""
