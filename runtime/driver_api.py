"""The driver APIs of CUDA and HIP, through ctypes: HIP's has CUDA's functions under names of its own.

Declared after CUDA's `cuda.h` and ROCm's `hip_runtime_api.h`. Functions that changed over the years are used
in the version that all drivers since CUDA 11.6 and ROCm 6 have. Only these structures are passed: those of
kernel nodes, and HIP's device properties, as bytes: a GPU's gfx name is in nothing else.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from zllmc.zllm_ir.errors import ZllmcError

# The same numbers in both.
OUT_OF_MEMORY, NO_DEVICE = 2, 100
NON_BLOCKING, DISABLE_TIMING = 1, 2  # flags of a stream, and of an event

_dimension = c_uint
# name here: (CUDA's, HIP's, types of the arguments). Handles and addresses are c_void_p, and so are results.
_FUNCTIONS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "init": ("cuInit", "hipInit", (c_uint,)),
    "device_count": ("cuDeviceGetCount", "hipGetDeviceCount", (c_void_p,)),
    "device": ("cuDeviceGet", "hipDeviceGet", (c_void_p, c_int)),
    "device_name": ("cuDeviceGetName", "hipDeviceGetName", (c_char_p, c_int, c_int)),
    "attribute": ("cuDeviceGetAttribute", "hipDeviceGetAttribute", (c_void_p, c_int, c_int)),
    "memory_info": ("cuMemGetInfo_v2", "hipMemGetInfo", (c_void_p, c_void_p)),
    "allocate": ("cuMemAlloc_v2", "hipMalloc", (c_void_p, c_size_t)),
    "free": ("cuMemFree_v2", "hipFree", (c_void_p,)),
    "allocate_host": ("cuMemHostAlloc", "hipHostMalloc", (c_void_p, c_size_t, c_uint)),
    "free_host": ("cuMemFreeHost", "hipHostFree", (c_void_p,)),
    "write": ("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", (c_void_p, c_void_p, c_size_t, c_void_p)),
    "read": ("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", (c_void_p, c_void_p, c_size_t, c_void_p)),
    "stream": ("cuStreamCreate", "hipStreamCreateWithFlags", (c_void_p, c_uint)),
    "synchronize": ("cuStreamSynchronize", "hipStreamSynchronize", (c_void_p,)),
    "destroy_stream": ("cuStreamDestroy_v2", "hipStreamDestroy", (c_void_p,)),
    "event": ("cuEventCreate", "hipEventCreateWithFlags", (c_void_p, c_uint)),
    "record_event": ("cuEventRecord", "hipEventRecord", (c_void_p, c_void_p)),
    "wait_for_event": ("cuEventSynchronize", "hipEventSynchronize", (c_void_p,)),
    "elapsed": ("cuEventElapsedTime", "hipEventElapsedTime", (c_void_p, c_void_p, c_void_p)),
    "destroy_event": ("cuEventDestroy_v2", "hipEventDestroy", (c_void_p,)),
    "module": ("cuModuleLoadData", "hipModuleLoadData", (c_void_p, c_void_p)),
    "function": ("cuModuleGetFunction", "hipModuleGetFunction", (c_void_p, c_void_p, c_char_p)),
    "unload_module": ("cuModuleUnload", "hipModuleUnload", (c_void_p,)),
    "launch": (
        "cuLaunchKernel",
        "hipModuleLaunchKernel",
        (c_void_p, *[_dimension] * 6, c_uint, c_void_p, c_void_p, c_void_p),
    ),
    "graph": ("cuGraphCreate", "hipGraphCreate", (c_void_p, c_uint)),
    "add_kernel_node": (
        "cuGraphAddKernelNode",
        "hipGraphAddKernelNode",
        (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p),
    ),
    "instantiate": (
        "cuGraphInstantiateWithFlags",
        "hipGraphInstantiateWithFlags",
        (c_void_p, c_void_p, c_uint64),
    ),
    "set_kernel_node": (
        "cuGraphExecKernelNodeSetParams",
        "hipGraphExecKernelNodeSetParams",
        (c_void_p, c_void_p, c_void_p),
    ),
    "enable_node": ("cuGraphNodeSetEnabled", "hipGraphNodeSetEnabled", (c_void_p, c_void_p, c_uint)),
    "launch_graph": ("cuGraphLaunch", "hipGraphLaunch", (c_void_p, c_void_p)),
    "destroy_instance": ("cuGraphExecDestroy", "hipGraphExecDestroy", (c_void_p,)),
    "destroy_graph": ("cuGraphDestroy", "hipGraphDestroy", (c_void_p,)),
}


class DriverError(Exception):
    """A function of the driver failed. `code` is the driver's number, None if it has no such function."""

    def __init__(self, function: str, code: int | None, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.code = code


@dataclass(frozen=True)
class Vendor:
    """What differs between the two.

    `architecture` asks the driver for the device's, and `runs` says whether the first of two architectures
    runs what was compiled for the second. `node` is the structure of a kernel node's parameters. `forks`: a
    graph's launches run side by side where they may; HIP replays a chain from packets that it made before.
    """

    kind: Literal["cuda", "rocm"]
    libraries: tuple[str, ...]
    missing: str
    select: tuple[str, Any]  # the function that makes a device the thread's, and the type of its argument
    subgroup: int  # number of the attribute
    architecture: Callable[[Driver, int], str]
    runs: Callable[[str, str], bool]
    node: np.dtype[Any]
    forks: bool


class Driver(SimpleNamespace):
    """The loaded library: a method for each name in the table. They raise DriverError.

    Raises ZllmcError where there is no library.
    """

    def __init__(self, vendor: Vendor, library: str | None = None) -> None:
        super().__init__()
        self.vendor = vendor
        self.library = _load(vendor, library)
        for name, (cuda, hip, types) in _FUNCTIONS.items():
            setattr(self, name, self.bind(cuda if vendor.kind == "cuda" else hip, *types))
        self.select = self.bind(*vendor.select)

    def bind(self, symbol: str, *types: Any) -> Callable[..., None]:
        """A function of the library, which returns its status."""
        function = getattr(self.library, symbol, None)
        if function is not None:
            function.argtypes, function.restype = types, c_int

        def call(*arguments: Any) -> None:
            if function is None:
                raise DriverError(symbol, None, "this driver is too old, and does not have it")
            if code := function(*arguments):
                raise DriverError(symbol, code, self._describe(code))

        return call

    def made(self, create: Callable[..., None], *arguments: Any) -> int:
        """The handle or address that a function passes back through its first argument."""
        handle = c_void_p()
        create(ctypes.byref(handle), *arguments)
        return handle.value or 0

    def number(self, ask: Callable[..., None], *arguments: Any) -> int:
        """The int that a function passes back through its first argument."""
        value = c_int()
        ask(ctypes.byref(value), *arguments)
        return value.value

    def milliseconds(self, start: int, end: int) -> float:
        """The time between two events on the device."""
        value = c_float()
        self.elapsed(ctypes.byref(value), start, end)
        return value.value

    def memory(self) -> tuple[int, int]:
        """Bytes of the selected device: free ones, and all."""
        free, total = c_size_t(), c_size_t()
        self.memory_info(ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def _describe(self, code: int) -> str:
        symbol = "cuGetErrorName" if self.vendor.kind == "cuda" else "hipDrvGetErrorName"
        name, text = getattr(self.library, symbol, None), c_char_p()
        if name is None or name(c_int(code), ctypes.byref(text)) or not text.value:
            return f"error {code}"
        return f"{text.value.decode()} ({code})"


def _load(vendor: Vendor, library: str | None) -> ctypes.CDLL:
    for name in [library] if library else vendor.libraries:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ZllmcError(
        f"{vendor.missing} Install it, or run the kernels on the emulated device, with --device emulate."
    )


def _capability(driver: Driver, device: int) -> str:
    major, minor = (driver.number(driver.attribute, number, device) for number in (75, 76))
    return f"sm_{major}{minor}"


def _runs_cubin(device: str, compiled: str) -> bool:
    """CUDA Programming Guide, "Binary compatibility": the same major version, and no older minor one; names
    that end in `a` are for that version alone."""
    major, minor, specific = _version(compiled)
    has_major, has_minor, _ = _version(device)
    return major == has_major and (minor == has_minor if specific else minor <= has_minor)


def _version(name: str) -> tuple[int, int, bool]:
    number = name.removeprefix("sm_").rstrip("af")
    return int(number[:-1]), int(number[-1]), name.endswith("a")


def _gfx_name(driver: Driver, device: int) -> str:
    """Found by its form among the device's properties: its place differs between versions of ROCm. The
    structure of ROCm 6 has a function of its own; it and those before take less than 2 KiB."""
    properties = ctypes.create_string_buffer(16 << 10)
    for function in ("hipGetDevicePropertiesR0600", "hipGetDeviceProperties"):
        try:
            driver.bind(function, c_void_p, c_int)(properties, device)
        except DriverError as error:
            if error.code is not None:
                raise
            continue
        if found := re.search(rb"\bgfx[0-9a-f]{3,}", properties.raw):
            return found[0].decode()
    return "an unknown architecture"


CUDA = Vendor(
    kind="cuda",
    libraries=("libcuda.so.1", "nvcuda.dll"),
    missing="The library of the NVIDIA driver, libcuda.so.1, is not on this machine.",
    select=("cuCtxSetCurrent", c_void_p),
    subgroup=10,  # CU_DEVICE_ATTRIBUTE_WARP_SIZE
    architecture=_capability,
    runs=_runs_cubin,
    node=np.dtype(
        [
            ("function", np.uint64),
            ("grid", np.uint32, 3),
            ("block", np.uint32, 3),
            ("shared_bytes", np.uint32),
            ("arguments", np.uint64),
            ("extra", np.uint64),
        ],
        align=True,
    ),  # CUDA_KERNEL_NODE_PARAMS_v1
    forks=True,
)
HIP = Vendor(
    kind="rocm",
    libraries=(
        *("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"),
        *("amdhip64_7.dll", "amdhip64_6.dll"),
    ),
    missing="ROCm's HIP runtime, libamdhip64.so, is not on this machine.",
    select=("hipSetDevice", c_int),
    subgroup=87,  # hipDeviceAttributeWarpSize
    architecture=_gfx_name,
    runs=str.__eq__,
    node=np.dtype(
        [
            ("block", np.uint32, 3),
            ("extra", np.uint64),
            ("function", np.uint64),
            ("grid", np.uint32, 3),
            ("arguments", np.uint64),
            ("shared_bytes", np.uint32),
        ],
        align=True,
    ),  # hipKernelNodeParams
    forks=False,
)
