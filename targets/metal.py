"""Apple GPUs, by Metal GPU family.

Limits: Apple, "Metal Feature Set Tables". Of a `simdgroup_matrix`, each lane has two elements, its
`thread_elements()`. The Metal Shading Language Specification does not say which; Apple's own MLX relies on it
(ml-explore/mlx, mlx/backend/metal/kernels/steel/gemm/mma.h: `BaseMMAFrag<T, 8, 8>::get_coord`).
"""

from __future__ import annotations

import ctypes
import re
import sys

from zllmc.targets.gpu import GpuTarget, Product, named, undetected
from zllmc.zllm_ir.matrix_unit import Fragment, MatrixInstruction

# The two elements of a lane lie side by side.
_MATRIX = Fragment(8, 8, ((0, 2), (1, 0), (2, 0), (0, 4), (4, 0)), ((0, 1),))
_FLOATS = tuple(
    MatrixInstruction("simdgroup_multiply_accumulate", 8, 8, 8, inputs, "f32", _MATRIX, _MATRIX, _MATRIX)
    for inputs in ("f16", "f32")
)


def _target(name: str, product: Product) -> GpuTarget:
    return GpuTarget(
        kind="metal",
        name=name,
        dialect="metal",
        subgroup=32,
        dot4=None,
        matrix=_FLOATS,
        shared_memory=32 << 10,
        static_shared_memory=32 << 10,
        max_threads=1024,
        registers=128,  # of the 256 16-bit halves that an instruction can name
        async_copy=False,
        max_buffers=31,
        max_grid=(2**22 - 1, 2**22 - 1, 2**22 - 1),  # at 1024 threads: positions count threads in 32 bits
        product=product,
    )


# Cores and bandwidth: Apple, "Tech Specs" of the MacBook Pro of 2021, 2023, 2024 and 2025. Apple states no
# rates: f16 is 128 multiply-adds per core and clock (matrix functions share those of the shader's floats),
# int8 by 32-bit integer multiply-adds a quarter of it. philipturner/metal-benchmarks measured these (README,
# "Overview", "Instruction Throughputs"), and 1.296 and 1.398 GHz for M1 and M2 Max; 1.57 is taken for later.
TARGETS = {
    t.name: t
    for t in (
        _target("apple7", Product("M1 Max", 32, 400, 2.7, 2.7, 10.6)),
        _target("apple8", Product("M2 Max", 38, 400, 3.4, 3.4, 13.6)),
        _target("apple9", Product("M4 Max", 40, 546, 4.0, 4.0, 16.1)),
        # Its neural accelerators are reached through Metal 4 tensors only, which no kernel here uses.
        _target("apple10", Product("M5", 10, 153, 1.0, 1.0, 4.0)),
    )
}

_FAMILY_OF_CHIP = {1: "apple7", 2: "apple8", 3: "apple9", 4: "apple9", 5: "apple10"}


def for_chip(brand: str) -> GpuTarget | None:
    """The target of a chip as macOS names it, such as "Apple M3 Pro"."""
    match = re.match(r"Apple M(\d+)\b", brand)
    return TARGETS.get(_FAMILY_OF_CHIP.get(int(match[1]), "")) if match else None


def _chip() -> str:
    libc = ctypes.CDLL(None)
    brand, size = ctypes.create_string_buffer(128), ctypes.c_size_t(128)
    libc.sysctlbyname(b"machdep.cpu.brand_string", brand, ctypes.byref(size), None, ctypes.c_size_t(0))
    return brand.value.decode()


def detect() -> GpuTarget:
    """The target of this Mac's GPU; raises ZllmcError elsewhere."""
    if sys.platform != "darwin":
        raise undetected("metal", "this is no Mac", TARGETS)
    target = for_chip(_chip())
    if target is None:
        raise undetected("metal", f"there is no target for {_chip() or 'its chip'}", TARGETS)
    return target


def parse(text: str) -> GpuTarget:
    """`metal` (this Mac's GPU) or `metal:appleN`."""
    name = text.partition(":")[2]
    return named("metal", name, TARGETS) if name else detect()
