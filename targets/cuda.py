"""NVIDIA GPUs, by compute capability.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Fragments: PTX ISA,
"Warp-level matrix instructions", mma.m16n8k16 (.f16, .bf16) and mma.m16n8k32 (.s8). They are those of
`mma.sync`, which every architecture here has; Hopper's wgmma and Blackwell's tcgen05 take their operands from
shared memory and are not described.
"""

from __future__ import annotations

import ctypes

from zllmc.targets.gpu import GpuTarget, Product, named, undetected
from zllmc.zllm_ir.matrix_unit import Fragment, MatrixInstruction

# In the words of the PTX ISA, lane bits 0 and 1 are threadID_in_group, and bits 2 to 4 are groupID.
_GROUP_ROWS = ((1, 0), (2, 0), (4, 0))
_GROUP_COLUMNS = ((0, 1), (0, 2), (0, 4))
_ACCUMULATOR = Fragment(16, 8, ((0, 2), (0, 4), *_GROUP_ROWS), ((0, 1), (8, 0)))

_FLOATS = tuple(
    MatrixInstruction(
        name=f"mma.sync.aligned.m16n8k16.row.col.f32.{inputs}.{inputs}.f32",
        m=16,
        n=8,
        k=16,
        inputs=inputs,
        accumulator="f32",
        a=Fragment(16, 16, ((0, 2), (0, 4), *_GROUP_ROWS), ((0, 1), (8, 0), (0, 8))),
        b=Fragment(16, 8, ((2, 0), (4, 0), *_GROUP_COLUMNS), ((1, 0), (8, 0))),
        c=_ACCUMULATOR,
    )
    for inputs in ("f16", "bf16")
)
_S8 = MatrixInstruction(
    name="mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    m=16,
    n=8,
    k=32,
    inputs="s8",
    accumulator="s32",
    a=Fragment(16, 32, ((0, 4), (0, 8), *_GROUP_ROWS), ((0, 1), (0, 2), (8, 0), (0, 16))),
    b=Fragment(32, 8, ((4, 0), (8, 0), *_GROUP_COLUMNS), ((1, 0), (2, 0), (16, 0))),
    c=_ACCUMULATOR,
)


def _target(name: str, shared_memory: int, product: Product) -> GpuTarget:
    return GpuTarget(
        kind="cuda",
        name=name,
        dialect="cuda",
        subgroup=32,
        dot4="dp4a",
        matrix=(_S8, *_FLOATS),
        shared_memory=shared_memory,
        static_shared_memory=48 << 10,
        max_threads=1024,
        registers=255,
        async_copy=True,
        max_buffers=512,  # 4 KiB of arguments
        max_grid=(2**31 - 1, 65535, 65535),
        product=product,
    )


# Peaks without sparsity; where NVIDIA states them with it, half. GeForce sums f16 in f32 at half its rate,
# which is what counts here. Sources, all NVIDIA's:
#   A100: datasheet "NVIDIA A100 Tensor Core GPU", specifications, column A100 80GB SXM
#   RTX 3090: whitepaper "NVIDIA Ampere GA102 GPU Architecture", appendix A, "GeForce RTX 3090"
#   RTX 4090: whitepaper "NVIDIA Ada GPU Architecture", appendix A
#   H100: datasheet "NVIDIA H100 Tensor Core GPU", specifications, column H100 SXM
#   B200: "NVIDIA Blackwell Architecture Technical Brief", specifications of HGX B200; SMs as CUDA reports
#   RTX 5090: whitepaper "NVIDIA RTX Blackwell GPU Architecture", appendix A
# None states a rate for dp4a: it is reckoned as the 64 lanes of a 32-bit integer multiply-add × 8 operations
# × SMs × boost clock: 1.41, 1.695, 2.52, 1.98, 1.965 and 2.407 GHz, from the top.
TARGETS = {
    t.name: t
    for t in (
        _target("sm_80", 163 << 10, Product("A100 SXM 80 GB", 108, 2039, 78, 624, 312)),
        _target("sm_86", 99 << 10, Product("GeForce RTX 3090", 82, 936, 71, 284, 71)),
        _target("sm_89", 99 << 10, Product("GeForce RTX 4090", 128, 1008, 165, 661, 165)),
        _target("sm_90", 227 << 10, Product("H100 SXM", 132, 3350, 134, 1979, 989)),
        _target("sm_100", 227 << 10, Product("B200", 148, 8000, 149, 4500, 2250)),
        _target("sm_120", 99 << 10, Product("GeForce RTX 5090", 170, 1792, 210, 838, 210)),
    )
}


def for_capability(major: int, minor: int) -> GpuTarget | None:
    """The newest target whose cubins this device runs: same major version, minor no newer."""
    able = [t for t in TARGETS.values() if _capability(t)[0] == major and _capability(t)[1] <= minor]
    return max(able, key=_capability, default=None)


def _capability(target: GpuTarget) -> tuple[int, int]:
    major, minor = divmod(int(target.name.removeprefix("sm_")), 10)
    return major, minor


def _device_capability() -> tuple[int, int] | None:
    """Compute capability of CUDA's first device; None without a driver or a device."""
    compute_capability_major, compute_capability_minor = 75, 76  # CUdevice_attribute, cuda.h
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), compute_capability_major, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), compute_capability_minor, device)
    ):
        return None
    return major.value, minor.value


def detect() -> GpuTarget:
    """The target of this machine's first NVIDIA GPU; raises ZllmcError where there is none."""
    capability = _device_capability()
    if capability is None:
        raise undetected("cuda", "the NVIDIA driver (libcuda.so.1) or its device is missing", TARGETS)
    target = for_capability(*capability)
    if target is None:
        found = "a GPU of compute capability {}.{}".format(*capability)
        raise undetected("cuda", f"there is no target for {found}", TARGETS)
    return target


def parse(text: str) -> GpuTarget:
    """`cuda` (this machine's GPU) or `cuda:sm_NN`."""
    name = text.partition(":")[2]
    return named("cuda", name, TARGETS) if name else detect()
