"""The GPU back end: which family makes which op's kernel, how many blocks it gets, and its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from zllmc.codegen import (
    attention_decode,
    attention_gpu,
    attention_gpu_shape,
    choice,
    elementwise,
    embedding_gpu,
    matrix_tile,
    norm,
    quantize,
    rope_kv,
)
from zllmc.codegen.cuda_toolchain import compile_cuda
from zllmc.codegen.linear_gpu import linear, matrix_unit
from zllmc.codegen.metal_check import check_metal
from zllmc.codegen.packing import UNIT
from zllmc.codegen.rocm_toolchain import compile_hip
from zllmc.codegen.simt import DIALECTS, Source, print_source
from zllmc.targets.gpu import LANES, GpuTarget
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS
from zllmc.zllm_ir.gpu_kernel import GpuKernel
from zllmc.zllm_ir.kernel_graph import KernelCall, KVOperand, Operand, symbol

MAX_TOKENS = 512  # that the grid of a pass over several tokens is made for; more make the units do more
MAX_UNITS = 8  # vector units of a block
GEMV_UNITS = 16  # of one that multiplies a single row: so many loads must be in flight to fill the memory
RESIDENT = 3  # blocks of a linear on matrix units that a multiprocessor has: some load, others multiply
RESIDENT_UNITS = 32  # that a multiprocessor has of a kernel that only moves its operands
NORM_COLUMNS = 256  # of a row that is normed, for each of the units that share it


@dataclass(frozen=True)
class VectorUnit:
    """What the kernel families ask of a target: here, LANES threads of a GPU side by side."""

    lanes: int = LANES
    registers: int = 32
    dot: str = "dot4"
    float64: bool = False
    units: int = 1


@dataclass(frozen=True)
class Cut:
    """A kernel with its grid: blocks of `units` vector units each, of which a multiprocessor shall have
    registers for `resident`."""

    function: Any
    blocks: int
    units: int
    resident: int = 1


_UNIT = VectorUnit()

# An op's kernel family is the function of the op's name in its module, as on the CPU.
FAMILIES: dict[str, tuple[Callable[[KernelCall, VectorTarget, str], Any], VectorUnit]] = {
    op: (getattr(module, op), unit)
    for module, unit, ops in (
        (attention_decode, _UNIT, ("attention_merge", "attention_merge_quantize")),
        (choice, _UNIT, ("choose", "top_k_partial")),
        (elementwise, _UNIT, ("activation", "add", "glu", "glu_quantize", "scale", "select_rows", "softcap")),
        (embedding_gpu, _UNIT, ("embedding",)),
        (quantize, _UNIT, ("quantize",)),
        (rope_kv, _UNIT, ("kv_append", "rope", "rope_append", "rope_table")),
    )
    for op in ops
}
_OF_ONE_TOKEN = ("top_k_partial",)  # whose results' rows are parts of it
ATTENTION = {f.__name__: f for f in (attention_gpu.attention_rows, attention_gpu.attention_partial)}
NORMS = {f.__name__: f for f in (norm.layer_norm, norm.norm_add, norm.rms_norm, norm.rms_norm_quantize)}


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
    try:
        cut = kernel_cut(call, target)
        return print_source(cut.function, DIALECTS[target.dialect], cut.blocks, cut.units, cut.resident)
    except ZllmcError as error:
        raise ZllmcError(f"{call.op} for {target}: {error}") from error


def kernel_cut(call: KernelCall, target: GpuTarget) -> Cut:
    """The call's TIR function, and the grid that it is made for."""
    if call.op == "linear":
        return _linear(call, target)
    if call.op in NORMS:
        return _norm(call, target)
    if call.op in ATTENTION:
        return _attention(call, target)
    if call.op not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *NORMS, *ATTENTION, "linear"]))
        raise ZllmcError(f"no GPU kernel for op {call.op!r}; there are kernels for {known}")
    family, unit = FAMILIES[call.op]
    function = family(call, unit, symbol(call))
    stack = print_source(function, DIALECTS[target.dialect], 1, 1).shared_bytes
    one = call.op in _OF_ONE_TOKEN or all(r.single_row for r in call.results)
    pieces = _pieces(call) * (1 if one else MAX_TOKENS)
    # A small kernel is over when its slowest unit is: it gets as many multiprocessors as it can use.
    each = min(-(-pieces // target.product.multiprocessors), _most_units(stack, target))
    units = _subgroups(each, target)
    most = RESIDENT_UNITS * target.product.multiprocessors // units
    return Cut(function, min(-(-pieces // units), most), units)


def _pieces(call: KernelCall) -> int:
    """Pieces of work of a token, which units share."""
    values = [o for o in (*call.operands, *call.results) if isinstance(o, Operand) and o.type.shape]
    kv_heads = sum(o.type.kv_heads for o in call.operands if isinstance(o, KVOperand))
    match call.op:
        case "attention_merge" | "attention_merge_quantize":
            return -(-call.results[0].width // LANES)
        case "choose":
            return 1
        case "top_k_partial":
            return int(call.results[0].type.shape[0])
        case "embedding":
            format, columns = values[1].type.dtype, int(values[1].type.shape[1])
            return embedding_gpu.pieces(columns, FORMATS[format].plain is not None)
        case "kv_append":
            return kv_heads
        case "rope":
            return int(values[0].type.shape[1])
        case "rope_append":
            return int(call.attributes["heads"]) + 2 * kv_heads
    return max(-(-v.width // LANES) for v in values)


def _most_units(stack: int, target: GpuTarget) -> int:
    """Units of a block that have `stack` bytes of shared memory each: whole subgroups."""
    subgroup = target.subgroup // LANES
    units = min(MAX_UNITS, target.static_shared_memory // max(stack, 1)) // subgroup * subgroup
    if not units:
        has = target.static_shared_memory
        raise ZllmcError(
            f"its arrays take {subgroup * stack} bytes of shared memory, of which there are {has}"
        )
    return units


def _subgroups(units: int, target: GpuTarget) -> int:
    """So many units, or a few more: whole subgroups."""
    subgroup = target.subgroup // LANES
    return -(-max(units, 1) // subgroup) * subgroup


def _norm(call: KernelCall, target: GpuTarget) -> Cut:
    """The units of a block share a row, if it is long. Blocks share what is written of a single one."""
    x = call.operands[0]
    if not isinstance(x, Operand):
        raise ZllmcError(f"{call.op}: x is required")
    width = int(x.type.shape[-1])
    heads = x.width // width
    units = _subgroups(min(GEMV_UNITS, -(-width // NORM_COLUMNS)) if heads == 1 else MAX_UNITS, target)
    function = NORMS[call.op](call, replace(_UNIT, units=units if heads == 1 else 1), symbol(call))
    if heads > 1:
        blocks = -(-heads * (1 if x.single_row else MAX_TOKENS) // units)
    else:
        blocks = -(-width // (LANES * units)) if x.single_row else MAX_TOKENS
    most = RESIDENT_UNITS * target.product.multiprocessors // units
    return Cut(function, min(blocks, most), units)


def _attention(call: KernelCall, target: GpuTarget) -> Cut:
    """A block for each part of a kv head's keys, or for each tile of query rows of MAX_TOKENS tokens."""
    shape = attention_gpu_shape.attention_shape(call, target)
    kv_heads = shape.cache.type.kv_heads
    if shape.shared:
        tokens = 1 if shape.q.single_row else MAX_TOKENS
        blocks = kv_heads * -(-tokens * shape.group // (shape.units * shape.rows))
    else:
        blocks = kv_heads * -(-shape.group // shape.rows) * int(call.attributes["splits"])
    most = RESIDENT_UNITS * target.product.multiprocessors // shape.units
    return Cut(ATTENTION[call.op](call, shape, symbol(call)), min(blocks, most), shape.units, shape.resident)


def _linear(call: KernelCall, target: GpuTarget) -> Cut:
    """A block for each group of weight rows, or for several tiles of a matrix unit."""
    rows, columns = (int(d) for d in call.operands[1].type.shape)  # type: ignore[union-attr]
    unit = matrix_unit(call, target)
    if unit is not None:
        units = _subgroups(matrix_tile.SUBGROUPS * target.subgroup // LANES, target)
        # The tiles of MAX_TOKENS tokens all get a block where there is room.
        tiles = MAX_TOKENS // matrix_tile.ROWS * -(-rows // matrix_tile.ROWS)
        blocks = min(RESIDENT * target.product.multiprocessors, tiles)
        function = linear(call, _UNIT, units, symbol(call), unit)
        return Cut(function, blocks, units, RESIDENT)
    most = GEMV_UNITS if call.results[0].single_row else MAX_UNITS
    units = _subgroups(min(most, columns // (2 * UNIT)), target)
    return Cut(linear(call, _UNIT, units, symbol(call)), -(-rows // LANES), units)
