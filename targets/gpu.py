"""What every GPU target is described by: limits, matrix instructions, and a product to reckon speed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.matrix_unit import MatrixInstruction

LANES = 32  # of a vector unit: a warp, half a wave of 64


@dataclass(frozen=True)
class Product:
    """One product of an architecture, for predictions: its peaks per second, dense, at boost clock.

    `multiprocessors`: SMs, compute units or GPU cores. `bandwidth`: memory, in GB/s. The others are in
    tera-operations, where a multiply-add counts as two: int8 products summed by 4-way dot instructions, by
    matrix instructions, and f16 products summed in f32 by matrix instructions.
    """

    name: str
    multiprocessors: int
    bandwidth: float
    int8_dot: float
    int8_matrix: float
    f16_matrix: float


@dataclass(frozen=True)
class GpuTarget:
    """One GPU architecture.

    `kind`: `cuda`, `rocm` or `metal`, as in `--target`; `dialect`: the language of its kernels, `cuda`, `hip`
    or `metal`. `subgroup`: lanes of a warp, wave or SIMD-group. `dot4`: the instruction that adds four signed
    int8 products to an int32, or None. `shared_memory`: bytes that a block can have when asked for at launch;
    `static_shared_memory`: bytes that a kernel may declare. `registers`: 32-bit registers that a thread can
    have. `async_copy`: global to shared memory without passing through registers, 16 bytes at a time.
    `max_buffers`: pointer arguments of a kernel. `max_grid`: blocks along x, y, z.
    """

    kind: str
    name: str
    dialect: Literal["cuda", "hip", "metal"]
    subgroup: int
    dot4: str | None
    matrix: tuple[MatrixInstruction, ...]
    shared_memory: int
    static_shared_memory: int
    max_threads: int
    registers: int
    async_copy: bool
    max_buffers: int
    max_grid: tuple[int, int, int]
    product: Product

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def lanes(self) -> int:
        """Rows of a weight matrix that are packed side by side."""
        return LANES

    def matrix_instruction(self, inputs: str) -> MatrixInstruction | None:
        """The instruction for `s8`, `f16`, `bf16` or `f32` inputs, if there is one."""
        return next((i for i in self.matrix if i.inputs == inputs), None)


def named(kind: str, name: str, targets: Mapping[str, GpuTarget]) -> GpuTarget:
    """The target of this name; raises ZllmcError naming those that exist."""
    if name not in targets:
        raise ZllmcError(f"unknown {kind} target {name!r}: known are {', '.join(targets)}")
    return targets[name]


def undetected(kind: str, why: str, targets: Mapping[str, GpuTarget]) -> ZllmcError:
    """The error of a bare `--target kind` where no device of that kind can be asked."""
    known = ", ".join(str(t) for t in targets.values())
    return ZllmcError(f"`--target {kind}` takes the GPU of this machine, but {why}: name one of {known}")
