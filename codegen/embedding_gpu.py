"""The embedding family on a GPU: the lanes are parts of one row, of which nothing else is read or unpacked.

A packed matrix has a group of LANES rows side by side, and what unpacks it (`Dot.code_steps`, `load_scale`)
loads vectors with an element of each row. Here it gets a memory in which such a vector has the elements that
LANES units of one row have at that place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.dot import Dot
from zllmc.codegen.grid_codes import load_plain, load_scale
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout, layout_of
from zllmc.codegen.rows import row_count, share
from zllmc.codegen.tir import Expr, Kernel, Memory, bind, bits, broadcast, cast, const, local, serial, when
from zllmc.targets.gpu import LANES
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand

_STAGED = UNIT + 1  # floats from a unit to the next in shared memory: lanes then use different banks


def pieces(columns: int, plain: bool) -> int:
    """Pieces of a row, a vector unit's work: units of columns in its lanes, or columns of a plain format."""
    return -(-columns // (LANES if plain else LANES * UNIT))


def embedding(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """The kernel of `embedding`: i32 (T,) and a packed table → f32 (T, D)."""
    tokens, table = call.operands
    (y,) = call.results
    if not isinstance(tokens, Operand) or not isinstance(table, Operand):
        raise ZllmcError("embedding: tokens and the table are required")
    rows, columns = (int(d) for d in table.type.shape)
    layout = layout_of(table.type.dtype, (rows, columns), LANES)
    plain = layout.format.plain is not None
    count = pieces(columns, plain)
    with Kernel(name, control="int32", tokens="int32", table="uint8", y="float32") as kernel:
        control, ids, weight, out = kernel.arguments
        row = _Row(layout, Dot(target), weight, out, float(call.attributes["scale"]))
        begin, end = share(kernel, row_count(tokens, control) * count)
        with serial(begin, end) as item:
            token = bind(tirx.truncdiv(item, count))
            emit = row.columns if plain else row.units
            emit(bind(ids.load(token)), bind(item - token * count), bind(token * y.stride))
    return kernel.function


class _LanesOfRow:
    """A group's memory as one row sees it: lane i of a vector is `row`'s part of what lies at `places[i]`."""

    def __init__(self, memory: Memory, places: Expr, row: Expr, dtype: str = "uint8") -> None:
        self._memory, self._places, self._row, self._dtype = memory, places, row, dtype

    def view(self, dtype: str) -> _LanesOfRow:
        return _LanesOfRow(self._memory, self._places, self._row, dtype)

    def load(self, at: Expr, count: int) -> Expr:
        """`count` elements from element `at` on, as `Memory.load`: as many of each row."""
        size = np.dtype(self._dtype).itemsize
        width = count * size // LANES  # bytes of a lane
        place = bind(self._places + broadcast(at * size + self._row * width, LANES))
        if width > 4:
            dtype = f"uint8x{width * LANES}"
            raw = T.call_pure_extern(dtype, f"load{width}", self._memory.address(place))
        else:
            words = self._memory.view(f"uint{8 * width}")
            raw = words.buffer[place // const(width, "int32", LANES)]
        return bits(bind(raw), f"{self._dtype}x{count}")


class _Row:
    """Writes parts of a token's row."""

    def __init__(self, layout: PackedLayout, dot: Dot, table: Memory, out: Memory, scale: float) -> None:
        self.layout, self.dot, self.table, self.out, self.scale = layout, dot, table, out, scale
        self._staged = None if layout.format.plain else local("float32", LANES * _STAGED)

    def _record(self, token: Expr) -> Memory:
        group = cast(tirx.truncdiv(token, LANES), "int64")
        return self.table.from_(group * const(self.layout.group_bytes, "int64"))

    def columns(self, token: Expr, piece: Expr, out_at: Expr) -> None:
        """LANES columns of a plain format."""
        plain, columns = self.layout.format.plain, self.layout.columns
        size = self.layout.block_bytes // LANES
        first = bind(piece * LANES)
        column = tirx.min(_ramp(first), const(columns - 1, "int32", LANES))
        row = bind(tirx.truncmod(token, LANES))
        memory: Any = _LanesOfRow(
            self._record(token), bind(column * const(LANES * size, "int32", LANES)), row
        )
        value = bind(load_plain(memory, 0, LANES, plain) * const(self.scale, "float32", LANES))
        self._store(value, out_at + first, columns - first, columns)

    def _store(self, value: Expr, at: Expr, left: Expr, columns: int) -> None:
        """All of a vector, or of the last one what a row has room for: it is padded to half a vector."""
        if columns % LANES == 0:
            self.out.store(at, value)
            return
        half = LANES // 2
        with when(left > half):
            self.out.store(at, value)
        with when(left <= half):
            self.out.store(at, tirx.Shuffle([value], list(range(half))))

    def units(self, token: Expr, piece: Expr, out_at: Expr) -> None:
        """LANES units of columns. They are staged, so that lanes store neighbouring columns."""
        layout, fmt = self.layout, self.layout.format
        if fmt.scale is None or self._staged is None:
            raise ZllmcError(f"{fmt.name} has no scale")
        units = layout.columns // UNIT
        first = bind(piece * LANES)
        unit = bind(tirx.min(_ramp(first), const(units - 1, "int32", LANES)))
        row, record = bind(tirx.truncmod(token, LANES)), self._record(token)
        per_block = const(layout.units, "int32", LANES)
        block = bind(unit // per_block * const(layout.block_bytes, "int32", LANES))
        inside = bind(unit % per_block)
        at = block + inside * const(layout.unit_bytes, "int32", LANES)
        codes: Any = _LanesOfRow(record, bind(at + const(layout.block_scale_bytes, "int32", LANES)), row)
        steps = self.dot.code_steps(layout, codes, 0)

        subs = UNIT // fmt.sub_block if fmt.sub_block < fmt.block else 1  # sub-scales of a unit
        scales: Any = _LanesOfRow(record, block, row)

        def of_unit(size: int) -> Any:
            """The scales, where a unit has `size` bytes of its own."""
            return _LanesOfRow(record, bind(block + inside * const(size, "int32", LANES)), row)

        minimum = load_scale(scales, layout.minimum_offset, LANES, fmt.minimum) if fmt.minimum else None
        several = fmt.scale.count > 1
        nbytes = LANES * fmt.scale.nbytes
        scales = of_unit(subs * nbytes) if several else scales
        # Those of a sub-block lie together, and are told apart by the row as it were.
        within = _LanesOfRow(record, bind(block + inside * const(subs * LANES, "int32", LANES)), row * subs)
        for sub in range(subs):
            at = layout.scale_offset + (sub * nbytes if several else 0)
            d = load_scale(scales, at, LANES, fmt.scale)
            if layout.subs:
                d = d * cast(within.view("int8").load(sub, LANES), "float32")
            m = minimum
            if m is not None:
                if layout.sub_mins:
                    m = m * cast(within.load(layout.subs * LANES + sub, LANES), "float32")
                m = bind(m * const(fmt.min_sign, "float32", LANES))
            d = bind(d)
            for step in range(sub * STEPS // subs, (sub + 1) * STEPS // subs):
                word = bind(bits(steps[step], f"int32x{LANES}"))
                for j in range(4):
                    w = d * cast(self._code(word, j), "float32")
                    w = (w if m is None else w + m) * const(self.scale, "float32", LANES)
                    place = T.ramp(const(4 * step + j, "int32"), _STAGED, LANES)
                    T.buffer_store(self._staged.buffer, w, [place])
        with serial(0, tirx.min(LANES, units - first)) as u:
            self.out.store(out_at + (first + u) * UNIT, self._staged.load(u * _STAGED, UNIT))

    def _code(self, word: Expr, j: int) -> Expr:
        """Byte j of four codes as the weight's integer."""
        left, right = (const(n, "int32", LANES) for n in (24 - 8 * j, 24))
        if self.layout.format.signed:
            code = (word << left) >> right
        else:
            code = word >> const(8 * j, "int32", LANES) & const(0xFF, "int32", LANES)
        return code - const(self.layout.codes.zero, "int32", LANES)


def _ramp(first: Expr) -> Expr:
    return T.ramp(const(0, "int32"), 1, LANES) + broadcast(first, LANES)
