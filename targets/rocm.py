"""AMD GPUs, by gfx number: CDNA with wave 64, RDNA with wave 32.

Fragments: "AMD Instinct MI200 / MI300 Instruction Set Architecture", chapter "Matrix Arithmetic
Instructions"; "RDNA3" and "RDNA4 Instruction Set Architecture", sections "Wave Matrix Multiply Accumulate".
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zllmc.targets.gpu import GpuTarget, Product, named, undetected
from zllmc.zllm_ir.matrix_unit import Fragment, MatrixInstruction, Offset

_FOUR_ROWS: tuple[Offset, ...] = ((1, 0), (2, 0), (4, 0), (8, 0))
_FOUR_COLUMNS: tuple[Offset, ...] = ((0, 1), (0, 2), (0, 4), (0, 8))


def _along_k(k: int, upper: tuple[int, ...], elements: int) -> tuple[Fragment, Fragment]:
    """A and B: lane % 16 is A's row and B's column, and its elements are consecutive in K.

    `upper`: by how much each lane bit above the fourth advances K.
    """
    steps = [1 << i for i in range(elements.bit_length() - 1)]
    return (
        Fragment(16, k, (*_FOUR_ROWS, *((0, step) for step in upper)), tuple((0, step) for step in steps)),
        Fragment(k, 16, (*_FOUR_COLUMNS, *((step, 0) for step in upper)), tuple((step, 0) for step in steps)),
    )


def _instruction(
    name: str, inputs: str, k: int, ab: tuple[Fragment, Fragment], c: Fragment
) -> MatrixInstruction:
    return MatrixInstruction(name, 16, 16, k, inputs, "s32" if inputs == "s8" else "f32", *ab, c)


# CDNA: four groups of 16 lanes, each with its part of K and, in C, four consecutive rows.
_CDNA_C = Fragment(16, 16, (*_FOUR_COLUMNS, (4, 0), (8, 0)), ((1, 0), (2, 0)))
_CDNA_F16 = _instruction("v_mfma_f32_16x16x16_f16", "f16", 16, _along_k(16, (4, 8), 4), _CDNA_C)
_CDNA2_BF16 = replace(_CDNA_F16, name="v_mfma_f32_16x16x16_bf16_1k", inputs="bf16")
_CDNA3_BF16 = replace(_CDNA_F16, name="v_mfma_f32_16x16x16_bf16", inputs="bf16")
_CDNA2_S8 = _instruction("v_mfma_i32_16x16x16_i8", "s8", 16, _along_k(16, (4, 8), 4), _CDNA_C)
_CDNA3_S8 = _instruction("v_mfma_i32_16x16x32_i8", "s8", 32, _along_k(32, (8, 16), 8), _CDNA_C)

# RDNA3: each half of the wave holds all of A and B; in C, the halves take the even and the odd rows.
_RDNA3_C = Fragment(16, 16, (*_FOUR_COLUMNS, (1, 0)), ((2, 0), (4, 0), (8, 0)))
_RDNA3 = (
    _instruction("v_wmma_i32_16x16x16_iu8", "s8", 16, _along_k(16, (0,), 16), _RDNA3_C),
    _instruction("v_wmma_f32_16x16x16_f16", "f16", 16, _along_k(16, (0,), 16), _RDNA3_C),
    _instruction("v_wmma_f32_16x16x16_bf16", "bf16", 16, _along_k(16, (0,), 16), _RDNA3_C),
)

# RDNA4: each half of the wave has its half of K and, in C, its half of the rows.
_RDNA4_C = Fragment(16, 16, (*_FOUR_COLUMNS, (8, 0)), ((1, 0), (2, 0), (4, 0)))
_RDNA4 = (
    _instruction("v_wmma_i32_16x16x16_iu8", "s8", 16, _along_k(16, (8,), 8), _RDNA4_C),
    _instruction("v_wmma_f32_16x16x16_f16", "f16", 16, _along_k(16, (8,), 8), _RDNA4_C),
    _instruction("v_wmma_f32_16x16x16_bf16", "bf16", 16, _along_k(16, (8,), 8), _RDNA4_C),
)


def _target(
    name: str, subgroup: int, dot4: str, matrix: tuple[MatrixInstruction, ...], product: Product
) -> GpuTarget:
    return GpuTarget(
        kind="rocm",
        name=name,
        dialect="hip",
        subgroup=subgroup,
        dot4=dot4,
        matrix=matrix,
        shared_memory=64 << 10,
        static_shared_memory=64 << 10,
        max_threads=1024,
        registers=512 if subgroup == 64 else 256,  # CDNA's 512 include the accumulation registers
        async_copy=False,
        max_buffers=512,  # 4 KiB of arguments
        max_grid=(2**22 - 1, 65535, 65535),  # at 1024 threads: the grid counts threads in 32 bits
        product=product,
    )


# Peaks without sparsity; where AMD states them with it, half. Sources, all AMD's:
#   MI210, MI300X: datasheets "AMD Instinct MI210 Accelerator" and "AMD Instinct MI300X Accelerator"
#   Radeon RX, Ryzen AI Max+ 395 (its Radeon 8060S): the product pages' specifications
# In operations per compute unit and clock they are 1024 for f16 and int8 on MI210, 2048 and 4096 on MI300X,
# 512 for both on RDNA3, and 1024 and 2048 on RDNA4. None states a rate for dot4: it is reckoned as one per
# lane and clock, 64 lanes × 8 operations, at 1.7, 2.1, 2.25, 2.5, 2.9, 3.13 and 2.97 GHz, from the top.
TARGETS = {
    t.name: t
    for t in (
        _target(
            "gfx90a",
            64,
            "sdot4",
            (_CDNA2_S8, _CDNA_F16, _CDNA2_BF16),
            Product("Instinct MI210", 104, 1638, 90, 181, 181),
        ),
        _target(
            "gfx942",
            64,
            "sdot4",
            (_CDNA3_S8, _CDNA_F16, _CDNA3_BF16),
            Product("Instinct MI300X", 304, 5300, 327, 2615, 1307),
        ),
        # Without matrix units: its int8 and f16 "matrix" peaks are those of dot instructions.
        _target("gfx1030", 32, "sdot4", (), Product("Radeon RX 6900 XT", 80, 512, 92, 92, 46)),
        _target("gfx1100", 32, "sudot4", _RDNA3, Product("Radeon RX 7900 XTX", 96, 960, 123, 123, 123)),
        _target("gfx1151", 32, "sudot4", _RDNA3, Product("Radeon 8060S", 40, 256, 59, 59, 59)),
        _target("gfx1200", 32, "sudot4", _RDNA4, Product("Radeon RX 9060 XT", 32, 320, 51, 205, 103)),
        _target("gfx1201", 32, "sudot4", _RDNA4, Product("Radeon RX 9070 XT", 64, 640, 97, 389, 195)),
    )
}

_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def detected_names(nodes: Path = _NODES) -> list[str]:
    """gfx names of the GPUs that the amdgpu driver lists, in its order."""
    names = []
    for properties in sorted(nodes.glob("*/properties"), key=lambda path: int(path.parent.name)):
        fields = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line)
        version = int(fields.get("gfx_target_version", "0"))  # 90402: major 9, minor 4, stepping 2
        if version:  # CPUs are nodes of version 0
            names.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return names


def detect(nodes: Path = _NODES) -> GpuTarget:
    """The target of this machine's first AMD GPU that is known; raises ZllmcError where there is none."""
    names = detected_names(nodes)
    for name in names:
        if name in TARGETS:
            return TARGETS[name]
    why = f"there is no target for {', '.join(names)}" if names else f"{nodes} lists no AMD GPU"
    raise undetected("rocm", why, TARGETS)


def parse(text: str) -> GpuTarget:
    """`rocm` (this machine's GPU) or `rocm:gfxNNNN`."""
    name = text.partition(":")[2]
    return named("rocm", name, TARGETS) if name else detect()
