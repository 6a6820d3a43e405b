"""Many rows of x against packed weights on a GPU's matrix units: y = x · Wᵀ, in integers unit by unit.

The codes of W are unpacked once into shared memory, beside the codes of x; then each subgroup multiplies its
part of the tile. The sums of a unit of 32 columns (or of each half, where a weight has a scale for 16) are
integers, which the scales of both sides turn into floats: the arithmetic of `block_sums`.

Where the matrix unit has only halves, as in Metal, codes are halves in shared memory. They are exact, and so
are their sums in f32, which stay below 32 · 128 · 128 = 2**19: results are those of the integers. To scale W
before would save a few operations for each sum, but halves would round every weight, and might overflow.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.block_sums import BlockSums
from zllmc.codegen.dot import Dot
from zllmc.codegen.matrix_tile import CHUNK_BYTES, PART, ROWS, Axis, Block, Finish, MatrixUnit, X
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    LaneArray,
    Memory,
    Register,
    bind,
    block_array,
    broadcast,
    call,
    cast,
    const,
    rolled,
    serial,
    when,
)


@dataclass(frozen=True)
class _Issue:
    """One of the instructions that make a unit's sums: columns from `begin` on, which add to sum `part`. With
    `half`, those of only one half of the unit."""

    begin: int
    part: int
    half: int | None = None


def _issues(k: int, parts: int) -> list[_Issue]:
    if k == UNIT and parts == 2:
        return [_Issue(0, 0, 0), _Issue(0, 1, 1)]
    return [_Issue(begin, begin * parts // UNIT) for begin in range(0, UNIT, k)]


@dataclass
class MatrixTiles:
    """The tiles of one product. `memory`: the kernel's x, as `a8` rows, and weight."""

    layout: PackedLayout
    dot: Dot
    unit: MatrixUnit
    memory: dict[str, Memory]
    x_stride: int  # 4-byte words
    finish: Finish
    _scales: dict[str, Memory] = field(default_factory=dict, init=False)

    @property
    def _parts(self) -> int:
        """Sums of a unit that have a scale of their own."""
        return 2 if self.layout.format.sub_block == UNIT // 2 else 1

    @property
    def _minima(self) -> int:
        """Sums of activations of a unit that a minimum multiplies."""
        if self.layout.format.minimum is None:
            return 0
        return self._parts if self.layout.sub_mins else 1

    @property
    def _columns(self) -> int:
        """Units of columns."""
        return self.layout.columns // UNIT

    @property
    def _units(self) -> int:
        """Those of a piece."""
        return self.unit.columns // UNIT

    @property
    def _unit_chunks(self) -> int:
        """Chunks of a row that a unit takes in shared memory."""
        return UNIT * self.unit.element_bytes // CHUNK_BYTES

    def run(self, kernel: Kernel, tokens: Expr, units: int, shared: Memory) -> None:
        """All tiles for `tokens` rows of x, by blocks of `units` vector units, which share SHARED_WORDS."""
        lanes = self.dot.lanes
        self._vectors = {"w": self._parts + self._minima, "x": 1 + self._minima}
        self._scales = {
            side: block_array("float32", 2 * count * self._units * ROWS)
            for side, count in self._vectors.items()
        }
        block = Block(self.unit, lanes, kernel, units, shared)
        pieces = -(-self._columns // self._units)
        with block.tiles(tokens, self.layout.groups) as (group, token):
            totals = [Register("float32", lanes, const(0, "float32", lanes)) for _ in block.outputs]
            with block.pieces(pieces) as (step, odd):
                with when(step < pieces):
                    first = bind(step * self._units)
                    self._load_x(block, odd, token, tokens, first)
                    self._load_w(block, odd, group, first)
                with when(tirx.all(step > 0, token + block.m < tokens)):
                    left = bind(self._columns - (step - 1) * self._units)
                    with rolled(0, tirx.min(self._units, left)) as unit:
                        self._multiply(block, bind(1 - odd), totals, unit)
            results = (total.get() for total in totals)
            block.store(results, group, token, tokens, self.layout.groups, self.finish)

    # -- loads ---------------------------------------------------------------------------------------------

    def _load_x(self, block: Block, odd: Expr, token: Expr, tokens: Expr, first: Expr) -> None:
        """Codes and scales of the tile's rows of x; those after the last one repeat it."""
        lanes = self.dot.lanes
        last_row = broadcast(bind(tokens - 1), lanes)

        def row_of(inside: Expr) -> Expr:
            return bind(tirx.min(broadcast(token, lanes) + inside, last_row) * block.const(self.x_stride))

        chunks = self.unit.columns // CHUNK_BYTES  # of 16 codes, as they come
        with block.jobs(ROWS * chunks) as job:
            row, chunk = bind(job // block.const(chunks)), bind(job % block.const(chunks))
            column = broadcast(first * UNIT, lanes) + chunk * block.const(CHUNK_BYTES)
            column = tirx.min(column, block.const(self.layout.columns - CHUNK_BYTES))
            source = self.memory["x"].address(row_of(row) * block.const(4) + column)
            inside = row + block.const(X)
            if self.unit.element_bytes == 1:
                call("copy_async16", block.address(odd, inside, chunk), source)
            else:
                halves = [chunk * block.const(2) + block.const(i) for i in range(2)]
                call("copy_halves", *(block.address(odd, inside, half) for half in halves), source)

        floats, words = self.memory["x"].view("float32"), self.memory["x"].view("int32")
        scale_at = self.layout.columns // 4
        with block.jobs(ROWS * self._units) as job:
            row, unit = bind(job // block.const(self._units)), bind(job % block.const(self._units))
            column = tirx.min(broadcast(first, lanes) + unit, block.const(self._columns - 1))
            source = bind(row_of(row) + block.const(scale_at) + column)
            places = [self._at("x", odd, i, unit, row) for i in range(1 + self._minima)]
            to = self._scales["x"]
            call("copy_async4", to.address(places[0]), floats.address(source))
            if self._minima == 1:
                scaled_sum = source + block.const(self._columns)
                call("copy_async4", to.address(places[1]), floats.address(scaled_sum))
            elif self._minima == 2:
                scale = bind(floats.buffer[source])
                pairs = bind(words.buffer[source + block.const(2 * self._columns)])
                half = block.const(16)
                for at, total in zip(places[1:], ((pairs << half) >> half, pairs >> half), strict=True):
                    T.buffer_store(to.buffer, scale * cast(total, "float32"), [at])

    def _load_w(self, block: Block, odd: Expr, group: Expr, first: Expr) -> None:
        """Codes and scales of the tile's rows of W, a unit of columns of a group of rows at a time."""
        lanes = self.dot.lanes
        groups = ROWS // lanes
        with serial(0, -(-groups * self._units // block.units)) as round:
            job = bind(round * block.units + block.inside)
            inside, unit = bind(tirx.truncmod(job, groups)), bind(tirx.truncdiv(job, groups))
            with when(tirx.all(unit < self._units, first + unit < self._columns)):
                at = T.Cast("int64", tirx.min(group + inside, self.layout.groups - 1))
                record = self.memory["weight"].from_(at * const(self.layout.group_bytes, "int64"))
                sums = BlockSums(self.layout, self.dot, record, self.memory["x"])
                row = bind(block.ramp(inside * lanes))
                column = bind(first + unit)
                steps = [bind(step) for step in sums.steps(column)]
                each = STEPS // self._unit_chunks
                for i in range(self._unit_chunks):
                    chunk = broadcast(unit * self._unit_chunks + i, lanes)
                    store = "store_words" if self.unit.element_bytes == 1 else "store_halves"
                    call(store, block.address(odd, row, chunk), *steps[i * each : (i + 1) * each])
                if sums.by_unit:
                    vectors = sums.unit_scales(column)
                else:
                    scales, minima = sums.half_scales(column)
                    vectors = scales + minima
                for i, vector in enumerate(vectors):
                    at = self._at("w", odd, i, broadcast(unit, lanes), row)
                    T.buffer_store(self._scales["w"].buffer, vector, [at])

    # -- products ------------------------------------------------------------------------------------------

    def _multiply(self, block: Block, odd: Expr, totals: Sequence[Register], unit: Expr) -> None:
        """Add a unit of the piece in buffer `odd` to this subgroup's totals."""
        it, lanes = self.unit.instruction, self.dot.lanes
        issues = _issues(it.k, self._parts)
        elements = range(it.c.elements)
        across = range(0, PART, it.m)
        chunk = bind(unit * self._unit_chunks)
        a = [[block.x(odd, m, i.begin, chunk, i.half) for i in issues] for m in across]
        x_scales = [self._scales_of("x", odd, unit, block.m, m, block.y_row) for m in across]
        sum_type = "int32" if it.accumulator == "s32" else "float32"
        remaining = iter(totals)
        for n in range(0, PART, it.n):
            b = [block.w(odd, n, i.begin, chunk) for i in issues]
            w_scales = self._scales_of("w", odd, unit, block.n, n, block.y_column)
            for x, of_x in zip(a, x_scales, strict=True):
                sums = [LaneArray(sum_type, len(elements), lanes) for _ in range(self._parts)]
                for total in sums:
                    for element in elements:
                        total.set(element, const(0, sum_type, lanes))
                for issue, left, right in zip(issues, x, b, strict=True):
                    call(self.unit.function, sums[issue.part].pointer, left.pointer, right.pointer)
                for element in elements:
                    dx, *x_sums = of_x[block.y_row.of(element)]
                    of_w = w_scales[block.y_column.of(element)]
                    products = [
                        cast(part.get(element), "float32") * d for part, d in zip(sums, of_w, strict=False)
                    ]
                    y = next(remaining)
                    value = y.get() + functools.reduce(operator.add, products) * dx
                    for minimum, x_sum in zip(of_w[self._parts :], x_sums, strict=True):
                        value = value + minimum * x_sum
                    y.set(value)

    def _scales_of(
        self, side: str, odd: Expr, unit: Expr, part: Expr, first: int, axis: Axis
    ) -> dict[int, list[Expr]]:
        """The scales and what belongs to a minimum, of all rows of one side that a lane has elements of: by
        what the element adds to the lane's place."""
        lanes = self.dot.lanes
        count = self._vectors[side]
        row = axis.lane + broadcast(bind((odd * self._units + unit) * ROWS + part), lanes)
        begin = bind(row * const(count, "int32", lanes))
        found: dict[int, list[Expr]] = {}
        for offset in dict.fromkeys(axis.of(element) for element in range(axis.elements)):
            places = [begin + const((first + offset) * count + i, "int32", lanes) for i in range(count)]
            found[offset] = [bind(self._scales[side].buffer[at]) for at in places]
        return found

    def _at(self, side: str, odd: Expr, vector: int, unit: Expr, row: Expr) -> Expr:
        """Where one of a row's scales for a unit lies: side by side, so that they are loaded at once."""
        lanes = self.dot.lanes
        rows = broadcast(bind(odd * (self._units * ROWS)), lanes) + unit * const(ROWS, "int32", lanes) + row
        return rows * const(self._vectors[side], "int32", lanes) + const(vector, "int32", lanes)
