"""Unpacking on the CPU that needs no particular instruction: bit fields, grid code books, kinds of scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.packing import STEPS, PackedLayout
from zllmc.codegen.tir import Expr, Memory, bind, bits, cast, const, lanes_of, local, serial
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


def grid_steps(
    layout: PackedLayout,
    grid: Grid,
    unit: Memory,
    at: Expr,
    rows: Callable[[int], Sequence[Expr]] | None = None,
) -> list[Expr]:
    """The 8 vectors of codes of the unit at byte `at`: every row's indices pick 4 or 8 codes at a time.

    `rows(i)` gives index i of each row, see `RowIndices.of`; without it they are taken out of vectors."""
    lanes = layout.lanes
    size = 4 * lanes
    high = _high_bits(layout, unit, at, "int32")
    signs = None if grid.signs is None else bind(unit.load(at + layout.planes_offset, size))
    steps: list[Expr] = []
    words = STEPS // layout.indices  # of 4 codes in a vector of the code book
    table = _table(grid)
    for i in range(layout.indices):
        shift = None
        if grid.shift is not None:  # the codes are larger than any shift: no byte borrows from the next
            shift = _bits_above(layout, high, i, grid.index.bits - 8, 1)
            shift = bind(shift * const(grid.shift.step * 0x01010101, "int32", lanes))
        if rows is None:
            vectors = _gathered(table, _index(layout, grid, unit, at, high, i), words)
        else:
            vectors = _picked(table, rows(i), words)
        for codes in vectors:
            codes = bits(codes if shift is None else codes - shift, f"uint8x{size}")
            if signs is not None:
                minus = bind(const(0, "uint8", size) - bit_field(signs, len(steps), 1, 0))
                codes = (codes ^ minus) - minus
            steps.append(bind(codes))
    return steps


class RowIndices:
    """The indices of each row of a group, for processors that load from one address at a time.

    Those of 8 bits are read from the packed bytes. Larger ones are put together for a whole block, in memory:
    to take them out of vectors costs more, and what has just been stored as a vector is slow to load.
    """

    def __init__(self, layout: PackedLayout, grid: Grid, codes: Memory) -> None:
        self._layout, self._grid, self._codes = layout, grid, codes
        self._units = layout.units
        if layout.high_bytes:
            self._indices = local("uint16", self._units * layout.indices * layout.lanes)

    def prepare(self, block: Expr) -> None:
        """Before `of` is asked for units of this block."""
        layout = self._layout
        if not layout.high_bytes:
            return
        with serial(0, self._units) as u:
            at = bind(layout.codes_at(block * self._units + u))
            high = _high_bits(layout, self._codes, at, "uint16")
            for i in range(layout.indices):
                index = _index(layout, self._grid, self._codes, at, high, i)
                self._indices.store((u * layout.indices + i) * layout.lanes, index)

    def of(self, unit: Expr, i: int) -> list[Expr]:
        """Index i of every row in this unit."""
        layout = self._layout
        memory, at = self._codes, layout.codes_at(unit) + i * layout.lanes
        if layout.high_bytes:
            u = T.bitwise_and(unit, self._units - 1)
            memory, at = self._indices, (u * layout.indices + i) * layout.lanes
        return [cast(memory.load(at + row), "int32") for row in range(layout.lanes)]


def _high_bits(layout: PackedLayout, unit: Memory, at: Expr, dtype: str) -> Expr | None:
    """Of each row, the bits above 8 of all indices."""
    if not layout.high_bytes:
        return None
    raw = unit.load(at + layout.indices * layout.lanes, layout.high_bytes * layout.lanes)
    return bind(cast(bits(raw, f"uint{8 * layout.high_bytes}x{layout.lanes}"), dtype))


def _bits_above(layout: PackedLayout, high: Expr, index: int, start: int, width: int) -> Expr:
    """`width` of the high bits of an index from bit 8 + `start` on."""
    dtype, lanes = str(high.ty.dtype).split("x")[0], layout.lanes
    by = const(index * layout.high_bits + start, dtype, lanes)
    return high >> by & const((1 << width) - 1, dtype, lanes)


def _index(layout: PackedLayout, grid: Grid, unit: Memory, at: Expr, high: Expr | None, i: int) -> Expr:
    """Index i of every row, in a vector of the type of `high`."""
    dtype = "int32" if high is None else str(high.ty.dtype).split("x")[0]
    index = cast(unit.load(at + i * layout.lanes, layout.lanes), dtype)
    if high is None:
        return index
    return index | _bits_above(layout, high, i, 0, grid.index.bits - 8) << const(8, dtype, layout.lanes)


def _gathered(table: Memory, index: Expr, words: int) -> list[Expr]:
    """The words of the code book's vectors that a vector of indices names."""
    first = bind(index * const(words, "int32", lanes_of(index)))
    # Each word from its own address, so that a row's index is taken out of its register once.
    return [table.from_(const(word, "int64")).load(first) for word in range(words)]


def _picked(table: Memory, rows: Sequence[Expr], words: int) -> list[Expr]:
    """The same of an index for each row. Two words of a row are loaded together, then parted."""
    lanes = len(rows)
    if words == 1:
        return [T.Shuffle([table.load(row) for row in rows], list(range(lanes)))]
    entries = table.view("int64")
    # Of four rows, two go to the same 128 bits of either vector: one instruction parts these.
    orders = [[row for row in range(lanes) if row % 4 // 2 == half] for half in range(2)]
    halves = []
    for order in orders:
        pairs = bind(T.Shuffle([entries.load(rows[row]) for row in order], list(range(lanes // 2))))
        halves.append(bits(pairs, f"int32x{lanes}"))
    places = {row: 2 * i for i, row in enumerate(orders[0] + orders[1])}
    return [bind(T.Shuffle(halves, [places[row] + word for row in range(lanes)])) for word in range(2)]


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
