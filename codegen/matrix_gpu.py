"""Many rows of x against packed weights on a GPU's matrix units: y = x · Wᵀ, in integers unit by unit.

A block makes a tile of ROWS tokens × ROWS weight rows. It takes the columns in pieces of UNITS units: the
codes of W are unpacked once into shared memory, as int8, beside the codes of x; then each subgroup multiplies
its quarter of the tile. The sums of a unit of 32 columns (or of each half, where a weight has a scale for 16)
are integers, which the scales of both sides turn into floats: the arithmetic of `block_sums`.

In shared memory a row is UNITS · 32 codes, in chunks of 16; chunk c of row r lies at place c ^ r % 8. So
eight lanes that write or read the same chunk of neighbouring rows use each bank once.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.block_sums import BlockSums
from zllmc.codegen.dot import Dot
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    LaneArray,
    Memory,
    Register,
    barrier,
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
from zllmc.zllm_ir.matrix_unit import Fragment, MatrixInstruction

ROWS = 64  # of x, and of W, in a block's tile
PART = 32  # of either in a subgroup's
SUBGROUPS = (ROWS // PART) ** 2
UNITS = 4  # of 32 columns that lie in shared memory at a time
_CHUNK = 16  # codes that are moved at once
_ROW_CHUNKS = UNITS * UNIT // _CHUNK
_ROW_WORDS = UNITS * UNIT // 4
_SWIZZLE = 8  # rows
SHARED_WORDS = 2 * ROWS * _ROW_WORDS

Finish = Callable[[Expr, Expr, Expr], None]  # stores the totals of a group of weight rows and a row of x


def fits(instruction: MatrixInstruction) -> bool:
    """Whether `MatrixTiles` can be made of this instruction."""
    fragments = (instruction.a, instruction.b, instruction.c)
    return None not in fragments and instruction.k in (UNIT // 2, UNIT)


@dataclass(frozen=True)
class MatrixUnit:
    """A target's instruction for int8, and the lanes that execute it together."""

    instruction: MatrixInstruction
    subgroup: int


class _Axis:
    """Where elements of a fragment lie along one axis of its matrix: what the lane and the element add."""

    def __init__(self, fragment: Fragment | None, axis: int, lane: Expr, lanes: int) -> None:
        if fragment is None:
            raise ValueError("the layout of this matrix instruction is opaque")
        self._fragment, self._axis = fragment, axis
        self.elements = fragment.elements
        self.lane = self._sum([offset[axis] for offset in fragment.lane_bits], lane, lanes)

    def of(self, element: int) -> int:
        return self._fragment.position(0, element)[self._axis]

    @staticmethod
    def _sum(offsets: Sequence[int], lane: Expr, lanes: int) -> Expr:
        """Σ of the lane's bits times their offsets; neighbouring bits that double are one field."""
        total: Expr = const(0, "int32", lanes)
        first = 0
        while first < len(offsets):
            end = first + 1
            while end < len(offsets) and offsets[end] == 2 * offsets[end - 1]:
                end += 1
            if offsets[first]:
                field = lane >> const(first, "int32", lanes) & const((1 << end - first) - 1, "int32", lanes)
                total = total + field * const(offsets[first], "int32", lanes)
            first = end
        return bind(total)


@dataclass(frozen=True)
class _Issue:
    """One of the instructions that make a unit's sums: columns from `begin` on, which add to sum `part`. With
    `half`, those of only one half of the unit."""

    begin: int
    part: int
    half: int | None = None


def _issues(k: int, parts: int) -> list[_Issue]:
    if k == UNIT // 2:
        return [_Issue(0, 0), _Issue(k, parts - 1)]
    return [_Issue(0, 0)] if parts == 1 else [_Issue(0, 0, 0), _Issue(0, 1, 1)]


@dataclass
class MatrixTiles:
    """The tiles of one product. `memory`: the kernel's x, as `a8` rows, and weight."""

    layout: PackedLayout
    dot: Dot
    unit: MatrixUnit
    memory: dict[str, Memory]
    x_stride: int  # 4-byte words
    finish: Finish
    _tile: dict[str, Memory] = field(default_factory=dict, init=False)

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

    def run(self, kernel: Kernel, tokens: Expr, units: int, shared: Memory) -> None:
        """All tiles for `tokens` rows of x, by blocks of `units` vector units, which share SHARED_WORDS."""
        lanes = self.dot.lanes
        size = UNITS * ROWS
        self._tile = {
            "codes": shared,  # of W, then of x
            "scales": block_array("float32", (self._parts + self._minima) * size),
            "x_scales": block_array("float32", (1 + self._minima) * size),
        }
        self._units = units
        self._inside = bind(tirx.truncmod(kernel.thread, units))
        self._thread = bind(self._ramp(self._inside * lanes))
        block, blocks = bind(tirx.truncdiv(kernel.thread, units)), tirx.truncdiv(kernel.threads, units)
        across = bind(tirx.truncdiv(tokens + (ROWS - 1), ROWS))
        tiles = across * -(-self.layout.groups * lanes // ROWS)
        self._prepare()
        with serial(0, tirx.truncdiv(tiles - block + blocks - 1, blocks)) as round:
            tile = bind(block + round * blocks)
            down = bind(tirx.truncdiv(tile, across))
            group = bind(down * (ROWS // lanes))
            token = bind((tile - down * across) * ROWS)
            totals = [Register("float32", lanes, const(0, "float32", lanes)) for _ in range(self._outputs)]
            with rolled(0, -(-self._columns // UNITS)) as piece:
                first = bind(piece * UNITS)
                barrier()
                self._load_x(token, tokens, first)
                self._load_w(group, first)
                barrier()
                with (
                    when(token + self._m < tokens),
                    rolled(0, tirx.min(UNITS, self._columns - first)) as unit,
                ):
                    self._multiply(totals, unit)
            barrier()
            self._store(totals, group, token, tokens)

    # -- loads ---------------------------------------------------------------------------------------------

    def _load_x(self, token: Expr, tokens: Expr, first: Expr) -> None:
        """Codes and scales of the tile's rows of x; those after the last one repeat it."""
        lanes, row_bytes = self.dot.lanes, 4 * self.x_stride
        last_row = broadcast(bind(tokens - 1), lanes)

        def row_of(inside: Expr) -> Expr:
            return bind(tirx.min(broadcast(token, lanes) + inside, last_row) * self._const(row_bytes // 4))

        with serial(0, ROWS * _ROW_CHUNKS // (self._units * lanes)) as round:
            piece = bind(broadcast(round * (self._units * lanes), lanes) + self._thread)
            row, chunk = bind(piece // self._const(_ROW_CHUNKS)), bind(piece % self._const(_ROW_CHUNKS))
            column = broadcast(first * UNIT, lanes) + chunk * self._const(_CHUNK)
            column = tirx.min(column, self._const(self.layout.columns - _CHUNK))
            place = self._place(row, chunk) + self._const(ROWS * _ROW_WORDS)
            source = self.memory["x"].address(row_of(row) * self._const(4) + column)
            call("copy_words", self._tile["codes"].address(place), source)

        floats, words = self.memory["x"].view("float32"), self.memory["x"].view("int32")
        scale_at = self.layout.columns // 4
        with serial(0, ROWS * UNITS // (self._units * lanes)) as round:
            piece = bind(broadcast(round * (self._units * lanes), lanes) + self._thread)
            row, unit = bind(piece // self._const(UNITS)), bind(piece % self._const(UNITS))
            column = tirx.min(broadcast(first, lanes) + unit, self._const(self._columns - 1))
            source = bind(row_of(row) + self._const(scale_at) + column)
            place = bind(unit * self._const(ROWS) + row)
            scale = bind(floats.buffer[source])
            self._put("x_scales", place, scale)
            if self._minima == 1:
                value = floats.buffer[source + self._const(self._columns)]
                self._put("x_scales", place + self._const(UNITS * ROWS), value)
            elif self._minima == 2:
                pairs = bind(words.buffer[source + self._const(2 * self._columns)])
                half = self._const(16)
                for part, total in enumerate(((pairs << half) >> half, pairs >> half)):
                    at = place + self._const((1 + part) * UNITS * ROWS)
                    self._put("x_scales", at, scale * cast(total, "float32"))

    def _load_w(self, group: Expr, first: Expr) -> None:
        """Codes and scales of the tile's rows of W, a unit of columns of a group of rows at a time."""
        lanes = self.dot.lanes
        groups = ROWS // lanes
        with serial(0, -(-groups * UNITS // self._units)) as round:
            job = bind(round * self._units + self._inside)
            inside, unit = bind(tirx.truncmod(job, groups)), bind(tirx.truncdiv(job, groups))
            with when(tirx.all(unit < UNITS, first + unit < self._columns)):
                at = T.Cast("int64", tirx.min(group + inside, self.layout.groups - 1))
                record = self.memory["weight"].from_(at * const(self.layout.group_bytes, "int64"))
                sums = BlockSums(self.layout, self.dot, record, self.memory["x"])
                row = bind(self._ramp(inside * lanes))
                column = bind(first + unit)
                steps = [bind(step) for step in sums.steps(column)]
                for half in range(UNIT // _CHUNK):
                    words = steps[half * STEPS // 2 : (half + 1) * STEPS // 2]
                    chunk = broadcast(unit * (UNIT // _CHUNK) + half, lanes)
                    call("store_words", self._tile["codes"].address(self._place(row, chunk)), *words)
                if sums.by_unit:
                    vectors = sums.unit_scales(column)
                else:
                    scales, minima = sums.half_scales(column)
                    vectors = scales + minima
                for i, vector in enumerate(vectors):
                    self._tile["scales"].store((i * UNITS + unit) * ROWS + inside * lanes, vector)

    # -- products ------------------------------------------------------------------------------------------

    @property
    def _outputs(self) -> int:
        """Elements of a lane in a subgroup's part of the tile."""
        return PART * PART // self.unit.subgroup

    def _prepare(self) -> None:
        """What all tiles have in common: this subgroup's part, and where a lane's elements lie in it."""
        lanes, per_subgroup = self.dot.lanes, self.unit.subgroup // self.dot.lanes
        subgroup = bind(tirx.truncdiv(self._inside, per_subgroup))
        self._m = bind(tirx.truncmod(subgroup, ROWS // PART) * PART)
        self._n = bind(tirx.truncdiv(subgroup, ROWS // PART) * PART)
        lane = bind(self._ramp(tirx.truncmod(self._inside, per_subgroup) * lanes))
        it = self.unit.instruction
        self._x_axes = _Axis(it.a, 0, lane, lanes), _Axis(it.a, 1, lane, lanes)
        self._w_axes = _Axis(it.b, 1, lane, lanes), _Axis(it.b, 0, lane, lanes)  # B is Wᵀ
        self._y_row, self._y_column = _Axis(it.c, 0, lane, lanes), _Axis(it.c, 1, lane, lanes)

    def _multiply(self, totals: Sequence[Register], unit: Expr) -> None:
        """Add a unit of the tile's columns to this subgroup's totals."""
        it, lanes = self.unit.instruction, self.dot.lanes
        issues = _issues(it.k, self._parts)
        elements = range(self._y_row.elements)
        across = range(0, PART, it.m)
        a = [
            [self._words(self._x_axes, unit, self._m + (ROWS + m), i.begin, i.half) for i in issues]
            for m in across
        ]
        x_scales = [self._scales("x_scales", unit, self._m + m, self._y_row) for m in across]
        remaining = iter(totals)
        for n in range(0, PART, it.n):
            b = [self._words(self._w_axes, unit, self._n + n, i.begin) for i in issues]
            w_scales = self._scales("scales", unit, self._n + n, self._y_column)
            for x, of_x in zip(a, x_scales, strict=True):
                sums = [LaneArray("int32", len(elements), lanes) for _ in range(self._parts)]
                for total, element in itertools.product(sums, elements):
                    total.set(element, const(0, "int32", lanes))
                for issue, left, right in zip(issues, x, b, strict=True):
                    call("matrix_s8", sums[issue.part].pointer, left.pointer, right.pointer)
                for element in elements:
                    dx, *x_sums = of_x[self._y_row.of(element)]
                    of_w = w_scales[self._y_column.of(element)]
                    products = [
                        cast(part.get(element), "float32") * d for part, d in zip(sums, of_w, strict=False)
                    ]
                    y = next(remaining)
                    value = y.get() + functools.reduce(operator.add, products) * dx
                    for minimum, x_sum in zip(of_w[self._parts :], x_sums, strict=True):
                        value = value + minimum * x_sum
                    y.set(value)

    def _words(
        self, axes: tuple[_Axis, _Axis], unit: Expr, first: Expr, begin: int, half: int | None = None
    ) -> LaneArray:
        """The operand of an instruction: rows from `first` on of shared memory, columns from `begin` on of
        the unit, with zeros for those that are not in `half`."""
        rows, columns = axes
        lanes = self.dot.lanes
        words = LaneArray("uint32", rows.elements // 4, lanes)
        for i in range(rows.elements // 4):
            row = rows.lane + self._const(rows.of(4 * i))
            column = columns.lane + self._const(columns.of(4 * i) + begin)
            chunk = column // self._const(_CHUNK)
            place = self._place(row, broadcast(unit * (UNIT // _CHUNK), lanes) + chunk)
            place = place + column % self._const(_CHUNK) // self._const(4)
            word = bind(self._tile["codes"].buffer[place + broadcast(first * _ROW_WORDS, lanes)])
            if half is not None:
                word = tirx.Select(chunk == self._const(half), word, const(0, "uint32", lanes))
            words.set(i, word)
        return words

    def _scales(self, array: str, unit: Expr, first: Expr, axis: _Axis) -> dict[int, list[Expr]]:
        """The scales and what belongs to a minimum, of all rows of one side that a lane has elements of: by
        what the element adds to the lane's place."""
        count = self._minima + (1 if array == "x_scales" else self._parts)
        found: dict[int, list[Expr]] = {}
        for offset in dict.fromkeys(axis.of(element) for element in range(axis.elements)):
            place = bind(axis.lane + broadcast(unit * ROWS + first + offset, self.dot.lanes))
            places = [place + self._const(i * UNITS * ROWS) for i in range(count)]
            found[offset] = [bind(self._tile[array].buffer[at]) for at in places]
        return found

    # -- results -------------------------------------------------------------------------------------------

    def _store(self, totals: Sequence[Register], group: Expr, token: Expr, tokens: Expr) -> None:
        """Through shared memory, so that what follows has a group of weight rows in its lanes."""
        it, lanes = self.unit.instruction, self.dot.lanes
        staged = self._tile["codes"].view("float32")  # as large as the codes
        places = itertools.product(range(0, PART, it.n), range(0, PART, it.m), range(self._y_row.elements))
        for total, (n, m, element) in zip(totals, places, strict=True):
            row = bind(self._y_row.lane + broadcast(self._m + (m + self._y_row.of(element)), lanes))
            column = self._y_column.lane + broadcast(self._n + (n + self._y_column.of(element)), lanes)
            T.buffer_store(staged.buffer, total.get(), [self._staged(row, column)])
        barrier()
        groups = ROWS // lanes
        with rolled(0, ROWS * groups // self._units) as round:
            job = bind(round * self._units + self._inside)
            row, inside = bind(tirx.truncdiv(job, groups)), bind(tirx.truncmod(job, groups))
            with when(tirx.all(token + row < tokens, group + inside < self.layout.groups)):
                place = self._staged(broadcast(row, lanes), self._ramp(inside * lanes))
                self.finish(bind(group + inside), bind(token + row), bind(staged.buffer[place]))

    def _staged(self, row: Expr, column: Expr) -> Expr:
        """Where an element of y waits; rows are turned against each other, to use more banks at once."""
        return row * self._const(ROWS) + (column ^ (row % self._const(_SWIZZLE)) * self._const(4))

    # -- indices -------------------------------------------------------------------------------------------

    def _place(self, row: Expr, chunk: Expr) -> Expr:
        """Word of the tile's codes at which a chunk of a row begins."""
        turned = chunk ^ row % self._const(_SWIZZLE)
        return row * self._const(_ROW_WORDS) + turned * self._const(4)

    def _ramp(self, first: Expr) -> Expr:
        return T.ramp(const(0, "int32"), 1, self.dot.lanes) + broadcast(first, self.dot.lanes)

    def _const(self, value: int) -> Any:
        return const(value, "int32", self.dot.lanes)

    def _put(self, array: str, place: Expr, value: Expr) -> None:
        T.buffer_store(self._tile[array].buffer, value, [place])
