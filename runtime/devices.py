"""Opens the device that an artifact runs on. Only that device's driver is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from zllmc.runtime.artifact import GPU_SUFFIXES, Artifact
from zllmc.runtime.device import Device
from zllmc.zllm_ir.errors import ZllmcError

Mode = Literal["emulate", "eager"]  # how a GPU's kernels are run instead of by replaying graphs on it

_SMALL = 16 << 20  # bytes of weights


def open_device(artifact: Artifact, threads: int | None, mode: Mode | None) -> Any:
    """The device of the artifact's target, with its kernels: a CpuDevice, or a `Device`.

    `threads` are the CPU's. With "emulate", the CPU runs a GPU's kernels; with "eager", the GPU is given them
    one by one. Raises ZllmcError where the device isn't there or doesn't run them.
    """
    gpu = artifact.manifest.gpu
    if gpu is None:
        if mode is not None:
            raise ZllmcError(
                f"--device {mode} is for GPUs; this was compiled for {artifact.manifest.target}."
            )
        from zllmc.runtime.cpu import CpuDevice

        return CpuDevice(artifact.objects, threads)
    suffix, loaded = GPU_SUFFIXES[gpu.dialect]
    if mode == "emulate":
        from zllmc.runtime.emulator import EmulatedDevice

        texts = artifact.gpu_kernels(suffix)
        sources = {f"{name}.{suffix}": text.decode() for name, text in texts.items()}
        # Optimizing takes the compiler longer than a small model runs without.
        optimize = artifact.manifest.weights_bytes > _SMALL
        return EmulatedDevice(
            sources, gpu.dialect, gpu.subgroup, threads=threads, matrix=gpu.matrix, optimize=optimize
        )
    kernels = artifact.gpu_kernels(loaded)
    if gpu.dialect == "metal":
        include, prelude = b'#include "prelude.h"\n', artifact.prelude.encode()
        kernels = {name: text.replace(include, prelude, 1) for name, text in kernels.items()}
    kind, _, architecture = artifact.manifest.target.partition(":")
    return open_gpu(kind, kernels, architecture, gpu.subgroup, graphs=mode != "eager")


def open_gpu(
    kind: str,
    kernels: Mapping[str, bytes],
    architecture: str,
    subgroup: int,
    *,
    number: int = 0,
    graphs: bool = True,
    blocking: bool = False,
) -> Device:
    """Device `number` of its kind.

    `kernels`, by the name of the kernel in each: cubins, code objects, or Metal sources complete with their
    prelude. `architecture` (`sm_90`, `gfx1100`, `apple9`) and `subgroup` are what they were compiled for.
    Without `graphs`, recordings launch kernel by kernel; with `blocking` they also wait for each, so that the
    error of a kernel that fails names it.

    Raises ZllmcError where there is no driver or no such device, or where it does not run the kernels.
    """
    if kind == "metal":
        from zllmc.runtime.metal import MetalDevice

        return MetalDevice(kernels, architecture, subgroup, number=number, graphs=graphs, blocking=blocking)
    from zllmc.runtime.driver_api import CUDA, HIP
    from zllmc.runtime.gpu import GpuDevice

    vendor = {"cuda": CUDA, "rocm": HIP}[kind]
    return GpuDevice(vendor, kernels, architecture, subgroup, number=number, graphs=graphs, blocking=blocking)
