"""The GPU back end: which family makes which op's kernel, how many blocks it gets, and its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from zllmc.codegen import (
    attention,
    attention_decode,
    elementwise,
    embedding,
    matrix_gpu,
    norm,
    quantize,
    rope_kv,
)
from zllmc.codegen.cuda_toolchain import compile_cuda
from zllmc.codegen.linear_gpu import linear
from zllmc.codegen.matrix_gpu import MatrixUnit
from zllmc.codegen.metal_check import check_metal
from zllmc.codegen.packing import UNIT
from zllmc.codegen.rocm_toolchain import compile_hip
from zllmc.codegen.simt import DIALECTS, Source, print_source
from zllmc.targets.gpu import LANES, GpuTarget
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.gpu_kernel import GpuKernel
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KernelCall, Operand, symbol

MAX_UNITS = 8  # vector units of a block
GEMV_UNITS = 16  # of one that multiplies a single row: so many loads must be in flight to fill the memory
RESIDENT = 3  # blocks of a linear on matrix units that a multiprocessor has: some load, others multiply


@dataclass(frozen=True)
class VectorUnit:
    """What the kernel families ask of a target: here, LANES threads of a GPU side by side."""

    lanes: int = LANES
    registers: int = 32
    dot: str = "dot4"
    float64: bool = False


_UNIT = VectorUnit()
_ATTENTION = replace(_UNIT, lanes=KEY_BLOCK)  # whose vectors are scores of a block of keys

# An op's kernel family is the function of the op's name in its module, as on the CPU.
FAMILIES: dict[str, tuple[Callable[[KernelCall, VectorTarget, str], Any], VectorUnit]] = {
    op: (getattr(module, op), unit)
    for module, unit, ops in (
        (attention, _ATTENTION, ("attention_rows",)),
        (attention_decode, _ATTENTION, ("attention_partial", "attention_merge", "attention_merge_quantize")),
        (elementwise, _UNIT, ("activation", "add", "glu", "glu_quantize", "scale", "select_rows", "softcap")),
        (embedding, _UNIT, ("embedding",)),
        (norm, _UNIT, ("layer_norm", "norm_add", "rms_norm", "rms_norm_quantize")),
        (quantize, _UNIT, ("quantize",)),
        (rope_kv, _UNIT, ("kv_append", "rope", "rope_append", "rope_table")),
    )
    for op in ops
}


def build_kernel(call: KernelCall, target: GpuTarget) -> bytes:
    """The kernel of a call: a `GpuKernel` in MessagePack.

    Raises ZllmcError for what has no kernel, and where the compiler of the target isn't installed.
    """
    source = kernel_source(call, target)
    try:
        match target.kind:
            case "cuda":
                code = compile_cuda(source.text, target).code
            case "rocm":
                code = compile_hip(source.text, target).code
            case _:
                check_metal(source.text, target)
                code = b""
    except ValueError as error:
        raise ZllmcError(f"{call.op} for {target}: {error}") from error
    return msgspec.msgpack.encode(GpuKernel(source.text, code, source.blocks, source.threads))


def kernel_source(call: KernelCall, target: GpuTarget) -> Source:
    """The source of the call's kernel; a ZllmcError that names the op where there is none."""
    dialect = DIALECTS[target.dialect]
    try:
        function = kernel_function(call, target)
        if call.op == "linear":
            matrix = _matrix_unit(call, target)
            blocks, units = _linear_grid(call, target, matrix)
            return print_source(function, dialect, blocks, units, 1 if matrix is None else RESIDENT)
        stack = print_source(function, dialect, 1, 1).shared_bytes
        units = _block_units(stack, target)
        blocks = max(1, min(2 * target.product.multiprocessors, -(-_work(call) // units)))
        return print_source(function, dialect, blocks, units)
    except ZllmcError as error:
        raise ZllmcError(f"{call.op} for {target}: {error}") from error


def kernel_function(call: KernelCall, target: GpuTarget) -> Any:
    """The TIR function that is printed."""
    if call.op == "linear":
        matrix = _matrix_unit(call, target)
        _, units = _linear_grid(call, target, matrix)
        return linear(call, _UNIT, units, symbol(call), matrix)
    if call.op not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, "linear"]))
        raise ZllmcError(f"no GPU kernel for op {call.op!r}; there are kernels for {known}")
    family, unit = FAMILIES[call.op]
    return family(call, unit, symbol(call))


def _block_units(stack: int, target: GpuTarget) -> int:
    """Units of a block that have `stack` bytes of shared memory each: whole subgroups."""
    subgroup = target.subgroup // LANES
    units = min(MAX_UNITS, target.static_shared_memory // max(stack, 1)) // subgroup * subgroup
    if not units:
        has = target.static_shared_memory
        raise ZllmcError(
            f"its arrays take {subgroup * stack} bytes of shared memory, of which there are {has}"
        )
    return units


def _matrix_unit(call: KernelCall, target: GpuTarget) -> MatrixUnit | None:
    """What multiplies the many rows of a linear's x."""
    x, instruction = call.operands[0], target.matrix_instruction("s8")
    if not isinstance(x, Operand) or x.type.dtype != "a8" or x.single_row or instruction is None:
        return None
    return MatrixUnit(instruction, target.subgroup) if matrix_gpu.fits(instruction) else None


def _linear_grid(call: KernelCall, target: GpuTarget, matrix: MatrixUnit | None) -> tuple[int, int]:
    """Blocks and units of a linear: a block for each group of rows, or for several tiles of a matrix unit."""
    rows, columns = (int(d) for d in call.operands[1].type.shape)  # type: ignore[union-attr]
    if matrix is not None:
        down = -(-rows // matrix_gpu.ROWS)
        # A pass has 512 tokens at most, whose tiles all get a block where there is room.
        blocks = min(RESIDENT * target.product.multiprocessors, 512 // matrix_gpu.ROWS * down)
        return blocks, matrix_gpu.SUBGROUPS * target.subgroup // LANES
    most = GEMV_UNITS if call.results[0].single_row else MAX_UNITS
    units = max(1, min(most, columns // (2 * UNIT)))
    return -(-rows // LANES), -(-units * LANES // target.subgroup) * target.subgroup // LANES


def _work(call: KernelCall) -> int:
    """About how many vector units find something to do: one for each vector of the operands' rows, of which
    a pass over several tokens has some."""
    values = [o for o in (*call.operands, *call.results) if isinstance(o, Operand)]
    vectors = max(-(-v.width // LANES) for v in values if v.type.shape)
    return vectors if all(v.single_row for v in call.results) else 16 * vectors
