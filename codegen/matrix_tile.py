"""What kernels for GPUs' matrix units have in common: a block's tiles, and where elements lie in them.

A block makes a tile of ROWS tokens × ROWS weight rows, each subgroup a quarter of it. It takes the columns in
pieces, of which rows of x and W lie in shared memory as the matrix unit wants them, ROW_BYTES of each. There
are two such buffers: one is filled while the other is multiplied, so that a barrier a piece is enough.

A row is CHUNKS chunks of 16 bytes; chunk c of row r lies at place c ^ r / 2 % CHUNKS. So eight lanes that
write or read the same chunk of neighbouring rows use each of 32 banks once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.tir import (
    Expr,
    Kernel,
    LaneArray,
    Memory,
    barrier,
    bind,
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
ROW_BYTES = 64  # of a piece
CHUNK_BYTES = 16  # that are moved at once
CHUNKS = ROW_BYTES // CHUNK_BYTES
_ROW_WORDS, _CHUNK_WORDS = ROW_BYTES // 4, CHUNK_BYTES // 4
_BUFFER_WORDS = 2 * ROWS * _ROW_WORDS
SHARED_WORDS = 2 * _BUFFER_WORDS  # later the tile's ROWS × ROWS results
X = ROWS  # the first row of x in a buffer; those of W come before
_ELEMENT_BYTES = {"s8": 1, "bf16": 2, "f16": 2, "f32": 4}

Finish = Callable[[Expr, Expr, Expr], None]  # stores the totals of a group of weight rows and a row of x


@dataclass(frozen=True)
class MatrixUnit:
    """A target's matrix instruction, and the lanes that execute it together."""

    instruction: MatrixInstruction
    subgroup: int

    @property
    def element_bytes(self) -> int:
        """Of x and W."""
        return _ELEMENT_BYTES[self.instruction.inputs]

    @property
    def columns(self) -> int:
        """Of a piece."""
        return ROW_BYTES // self.element_bytes

    @property
    def function(self) -> str:
        """The prelude's name of the instruction."""
        return f"matrix_{self.instruction.inputs}"


class Axis:
    """Where elements of a fragment lie along one axis of its matrix: what the lane and the element add."""

    def __init__(self, fragment: Fragment, axis: int, lane: Expr, lanes: int) -> None:
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


class _Operand:
    """Rows of one side in shared memory, as the matrix instruction takes them.

    What the lane and what the element adds to a row or a column are different bits, so a place is computed
    for the lane once; an element's chunk is then an exclusive or, and the rest a constant. Places are in
    words, or in halves where a word's do not lie side by side.
    """

    def __init__(self, unit: MatrixUnit, shared: Memory, rows: Axis, columns: Axis, lanes: int) -> None:
        self._rows, self._columns, self._lanes = rows, columns, lanes
        self._each = 4 // unit.element_bytes  # elements of a word
        self._chunk = CHUNK_BYTES // unit.element_bytes
        firsts = range(0, rows.elements, self._each)
        self._split = any(columns.of(e + j) != columns.of(e) + j for e in firsts for j in range(self._each))
        self._memory = shared.view("uint16") if self._split else shared
        self._scale = self._each if self._split else 1  # places of a word
        inside = columns.lane % self._const(self._chunk)
        word = chunk_place(rows.lane, columns.lane // self._const(self._chunk), lanes)
        if self._split:
            self._place = bind(word * self._const(self._each) + inside)
        else:
            self._place = bind(word + inside // self._const(self._each))

    def load(self, begin: Expr, row: int, column: int, chunk: Expr = 0, half: int | None = None) -> LaneArray:
        """The operand of rows from `row`, a multiple of 8, after word `begin`, where a row begins; `column`
        is counted from `chunk`, which has other bits."""
        place = self._place
        if not isinstance(chunk, int):
            place = bind(place ^ broadcast(bind(chunk * (_CHUNK_WORDS * self._scale)), self._lanes))
        words = LaneArray("uint32", self._rows.elements // self._each, self._lanes)
        begin = broadcast(bind(begin * self._scale), self._lanes)
        for i in range(self._rows.elements // self._each):
            element = i * self._each
            value = self._part(place, begin, row, column, element)
            if self._split:
                high = cast(self._part(place, begin, row, column, element + 1), "uint32")
                value = cast(value, "uint32") | high << const(16, "uint32", self._lanes)
            if half is not None:
                at = self._columns.lane + self._const(self._columns.of(element))
                inside = at // self._const(16) == self._const(half)
                value = tirx.Select(inside, value, const(0, "uint32", self._lanes))
            words.set(i, value)
        return words

    def _part(self, place: Expr, begin: Expr, row: int, column: int, element: int) -> Expr:
        row, column = row + self._rows.of(element), column + self._columns.of(element)
        chunk = column // self._chunk ^ row // 2 % CHUNKS
        inside = column % self._chunk // (1 if self._split else self._each)
        turned = place ^ self._const(chunk * _CHUNK_WORDS * self._scale)
        return bind(
            self._memory.buffer[turned + begin + self._const(row * _ROW_WORDS * self._scale + inside)]
        )

    def _const(self, value: int) -> Any:
        return const(value, "int32", self._lanes)


def chunk_place(row: Expr, chunk: Expr, lanes: int) -> Expr:
    """The word of a buffer at which a chunk of a row begins; `row` and `chunk` of each lane."""
    turned = chunk ^ row // const(2, "int32", lanes) % const(CHUNKS, "int32", lanes)
    return row * const(_ROW_WORDS, "int32", lanes) + turned * const(_CHUNK_WORDS, "int32", lanes)


class Block:
    """A thread's place in a block of `units` vector units, which share SHARED_WORDS.

    `m`, `n`: where its subgroup's part of a tile begins. `y_row`, `y_column`: where a lane's results lie in
    an instruction's. `odd` is always the number of a buffer, 0 or 1.
    """

    def __init__(self, unit: MatrixUnit, lanes: int, kernel: Kernel, units: int, shared: Memory) -> None:
        self.unit, self.lanes, self.units = unit, lanes, units
        self._shared = shared
        self.inside = bind(tirx.truncmod(kernel.thread, units))
        self.thread = bind(self.ramp(self.inside * lanes))
        self._number = bind(tirx.truncdiv(kernel.thread, units))
        self._blocks = tirx.truncdiv(kernel.threads, units)
        per_subgroup = unit.subgroup // lanes
        subgroup = bind(tirx.truncdiv(self.inside, per_subgroup))
        self.m = bind(tirx.truncmod(subgroup, ROWS // PART) * PART)
        self.n = bind(tirx.truncdiv(subgroup, ROWS // PART) * PART)
        lane = bind(self.ramp(tirx.truncmod(self.inside, per_subgroup) * lanes))
        it = unit.instruction
        self._x = _Operand(unit, shared, Axis(it.a, 0, lane, lanes), Axis(it.a, 1, lane, lanes), lanes)
        self._w = _Operand(unit, shared, Axis(it.b, 1, lane, lanes), Axis(it.b, 0, lane, lanes), lanes)  # Wᵀ
        self.y_row, self.y_column = Axis(it.c, 0, lane, lanes), Axis(it.c, 1, lane, lanes)

    # -- loops ---------------------------------------------------------------------------------------------

    @contextmanager
    def tiles(self, tokens: Expr, groups: int) -> Iterator[tuple[Expr, Expr]]:
        """The block's tiles: the first group of weight rows and the first token of each."""
        across = bind(tirx.truncdiv(tokens + (ROWS - 1), ROWS))
        tiles = across * -(-groups * self.lanes // ROWS)
        with serial(0, tirx.truncdiv(tiles - self._number + self._blocks - 1, self._blocks)) as round:
            tile = bind(self._number + round * self._blocks)
            down = bind(tirx.truncdiv(tile, across))
            yield bind(down * (ROWS // self.lanes)), bind((tile - down * across) * ROWS)
            barrier()  # all results are read before the next tile is loaded

    @contextmanager
    def pieces(self, count: int) -> Iterator[tuple[Expr, Expr]]:
        """One step more than there are pieces: step s loads piece s to buffer `odd` and multiplies piece
        s − 1, which lies in the other one."""
        with rolled(0, count + 1) as step:
            yield step, bind(tirx.truncmod(step, 2))
            call("copies_wait")
            barrier()

    @contextmanager
    def jobs(self, count: int) -> Iterator[Expr]:
        """The numbers below `count`, of a multiple of the lanes, one for each lane."""
        threads = self.units * self.lanes
        with serial(0, -(-count // threads)) as round:
            first = bind((round * self.units + self.inside) * self.lanes)
            number = bind(self.ramp(first))
            if count % threads == 0:
                yield number
            else:
                with when(first < count):
                    yield number

    # -- shared memory -------------------------------------------------------------------------------------

    def address(self, odd: Expr, row: Expr, chunk: Expr) -> Expr:
        """Where a chunk of a row begins; `row` and `chunk` of each lane."""
        begin = broadcast(bind(odd * _BUFFER_WORDS), self.lanes)
        return self._shared.address(begin + chunk_place(row, chunk, self.lanes))

    def x(self, odd: Expr, m: int, column: int, chunk: Expr = 0, half: int | None = None) -> LaneArray:
        """An instruction's A: rows of this subgroup's part from `m` on, and columns from `column` on, counted
        from a chunk of the piece. With `half`, 0 for all but the first or the second 16 of them."""
        begin = bind(odd * _BUFFER_WORDS + (self.m + X) * _ROW_WORDS)
        return self._x.load(begin, m, column, chunk, half)

    def w(self, odd: Expr, n: int, column: int, chunk: Expr = 0) -> LaneArray:
        """Its B, from the rows of W from `n` on."""
        return self._w.load(bind(odd * _BUFFER_WORDS + self.n * _ROW_WORDS), n, column, chunk)

    # -- results -------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> list[tuple[int, int, int]]:
        """A lane's results of its subgroup's part: where an instruction's begin, (n, m), and its element."""
        it = self.unit.instruction
        return [*itertools.product(range(0, PART, it.n), range(0, PART, it.m), range(it.c.elements))]

    def store(
        self, results: Iterable[Expr], group: Expr, token: Expr, tokens: Expr, groups: int, finish: Finish
    ) -> None:
        """The results, in the order of `outputs`, through shared memory, so that `finish` has a group of
        weight rows in its lanes."""
        staged = self._shared.view("float32")
        for value, (n, m, element) in zip(results, self.outputs, strict=True):
            row = bind(self.y_row.lane + broadcast(self.m + (m + self.y_row.of(element)), self.lanes))
            column = self.y_column.lane + broadcast(self.n + (n + self.y_column.of(element)), self.lanes)
            T.buffer_store(staged.buffer, value, [self._staged(row, column)])
        barrier()
        wide = ROWS // self.lanes
        with rolled(0, ROWS * wide // self.units) as round:
            job = bind(round * self.units + self.inside)
            row, inside = bind(tirx.truncdiv(job, wide)), bind(tirx.truncmod(job, wide))
            with when(tirx.all(token + row < tokens, group + inside < groups)):
                place = self._staged(broadcast(row, self.lanes), self.ramp(inside * self.lanes))
                finish(bind(group + inside), bind(token + row), bind(staged.buffer[place]))

    def _staged(self, row: Expr, column: Expr) -> Expr:
        """Where an element of y waits; rows are turned against each other, to use more banks at once."""
        return row * self.const(ROWS) + (column ^ (row % self.const(8)) * self.const(4))

    # -- indices -------------------------------------------------------------------------------------------

    def ramp(self, first: Expr) -> Expr:
        return T.ramp(const(0, "int32"), 1, self.lanes) + broadcast(first, self.lanes)

    def const(self, value: int) -> Any:
        return const(value, "int32", self.lanes)
