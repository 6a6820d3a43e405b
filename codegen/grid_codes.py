"""Unpacking on the CPU that needs no particular instruction: bit fields, grid code books, kinds of scales."""

from __future__ import annotations

import numpy as np
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.packing import STEPS, PackedLayout
from zllmc.codegen.tir import Expr, Memory, bind, bits, cast, const, lanes_of
from zllmc.zllm_ir.block_format import Float, Grid
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.grids import book


def bit_field(vector: Expr, start: int, width: int, to: int) -> Expr:
    """Bits start … start+width−1 of each byte, moved to bit `to`. Bytes have no shift of their own: shift
    wider lanes, then mask what came from the neighbour."""
    if width == 8:
        return vector
    size = lanes_of(vector)
    if start != to:
        wide = bits(vector, f"uint16x{size // 2}")
        by = const(abs(start - to), "uint16", size // 2)
        vector = bits(wide >> by if start > to else wide << by, f"uint8x{size}")
    return vector & const(((1 << width) - 1) << to, "uint8", size)


def grid_steps(layout: PackedLayout, grid: Grid, unit: Memory, at: Expr) -> list[Expr]:
    """The 8 vectors of codes of the unit at byte `at`: every row's indices pick 4 codes at a time."""
    lanes = layout.lanes
    size = 4 * lanes
    high = None
    if layout.high_bytes:
        raw = unit.load(at + layout.indices * lanes, layout.high_bytes * lanes)
        high = bind(cast(bits(raw, f"uint{8 * layout.high_bytes}x{lanes}"), "int32"))
    signs = None if grid.signs is None else bind(unit.load(at + layout.planes_offset, size))

    def bits_above(index: int, start: int, width: int) -> Expr:
        by = const(index * layout.high_bits + start, "int32", lanes)
        return high >> by & const((1 << width) - 1, "int32", lanes)

    steps: list[Expr] = []
    words = STEPS // layout.indices  # of 4 codes in a vector of the code book
    # Each word from its own address, so that a row's index is taken out of its register once.
    table = _table(grid)
    tables = [table.from_(const(word, "int64")) for word in range(words)]
    for i in range(layout.indices):
        index = cast(unit.load(at + i * lanes, lanes), "int32")
        if grid.index.bits > 8:
            index = index | bits_above(i, 0, grid.index.bits - 8) << const(8, "int32", lanes)
        first = bind(index * const(words, "int32", lanes))
        for words_at in tables:
            codes = words_at.load(first)
            if grid.shift is not None:  # the codes are larger than any shift: no byte borrows from the next
                shift = bits_above(i, grid.index.bits - 8, 1)
                codes = codes - shift * const(grid.shift.step * 0x01010101, "int32", lanes)
            codes = bits(codes, f"uint8x{size}")
            if signs is not None:
                minus = bind(const(0, "uint8", size) - bit_field(signs, len(steps), 1, 0))
                codes = (codes ^ minus) - minus
            steps.append(bind(codes))
    return steps


def _table(grid: Grid) -> Memory:
    """The code book's vectors as constant data of the kernel, in words of 4 codes.

    It is written as a string, which is the only constant that TVM's LLVM back end places in memory as it is;
    so every value must be an ASCII character other than NUL."""
    values = np.array(grid.values, np.uint8)[book(grid.book)]
    if values.min() == 0 or values.max() > 127:
        raise ZllmcError(f"the values of {grid.book} do not fit a constant")
    text = ir.StringImm(values.tobytes().decode("ascii"))
    return Memory.at(bind(T.reinterpret(text, dtype="handle")), "int32")


def load_scale(memory: Memory, at: Expr, lanes: int, number: Float) -> Expr:
    """The scales of `lanes` rows as f32; they lie side by side from byte `at` on, as floats of their kind."""
    raw = memory.load(at, lanes * number.nbytes)
    match number.kind:
        case "f16":
            value = cast(bits(raw, f"float16x{lanes}"), "float32")
        case "ue4m3_half":
            # The fields of an f16 whose bias is smaller by 8, so the number comes out 2**8 too small.
            half = cast(raw, "uint16") << const(7, "uint16", lanes)
            value = cast(bits(half, f"float16x{lanes}"), "float32") * const(2**8 / 2, "float32", lanes)
        case "e8m0_half":
            # 2**(e − 128) has the exponent field e − 1; the smallest two are subnormal.
            e = bind(cast(raw, "uint32"))
            small = const(1 << 21, "uint32", lanes) << tirx.min(e, const(1, "uint32", lanes))
            normal = (e - const(1, "uint32", lanes)) << const(23, "uint32", lanes)
            value = bits(tirx.Select(e < const(2, "uint32", lanes), small, normal), f"float32x{lanes}")
        case _:
            raise ZllmcError(f"no CPU kernel for scales of kind {number.kind}")
    return value if number.factor == 1 else value * const(number.factor, "float32", lanes)


def load_plain(memory: Memory, at: Expr, lanes: int, kind: str | None) -> Expr:
    """`lanes` weights of a plain float format (`kind`: f32, f16 or bf16) from element `at` on, as f32."""
    match kind:
        case "f32":
            return memory.view("float32").load(at, lanes)
        case "f16":
            return cast(memory.view("float16").load(at, lanes), "float32")
        case "bf16":
            high = cast(memory.view("uint16").load(at, lanes), "uint32")
            return bits(high << const(16, "uint32", lanes), "float32" if lanes == 1 else f"float32x{lanes}")
    raise ZllmcError(f"no kernel reads {kind} weights")
