"""Tiles of a matrix product on Intel's matrix unit: 16 rows of x against a group of 16 weight rows.

As in `linear_tiles`, units of weights are unpacked once for all rows of x. The matrix unit leaves sums of
integers in memory. They are scaled with the totals of all 16 rows in registers; of the last rows, which may
be fewer, one row after the other.

Sums of integers are exact, and so is their product with a sub-scale in f32; all else is the arithmetic of
`block_sums`, operation by operation: a row's result is the same alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tvm.script.ir_builder import tirx as T

from zllmc.codegen.activations import Activations
from zllmc.codegen.amx import LANES, ROWS, MatrixUnit
from zllmc.codegen.block_sums import BlockSums
from zllmc.codegen.dot import Dot
from zllmc.codegen.linear_tiles import asking_tiles
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout
from zllmc.codegen.plain_tiles import tile_groups
from zllmc.codegen.tile_vectors import UnitVectors, unit_names, unit_vectors
from zllmc.codegen.tir import Expr, Memory, Register, bind, cast, choose, const, local, serial, when

_UNPACKED = 21 * 1024  # bytes of unpacked vectors: half of the L1 cache
_BATCH = 8  # units that are multiplied before they are scaled: what was just stored from a tile is not there
# for loads until much later, and what is long past is no longer in the L1 cache
_SUMS = ROWS * LANES  # of a product


@dataclass(frozen=True)
class MatrixTiles:
    """The product of rows of x with weights of `layout`; `dot` gives these as i8."""

    layout: PackedLayout
    dot: Dot
    x: Memory

    @property
    def width(self) -> int:
        """Groups of weight rows that share a row of x in the L1 cache."""
        return tile_groups(self.layout)

    @property
    def height(self) -> int:
        """Rows of x in a tile."""
        return ROWS

    @property
    def products(self) -> int:
        """Of a unit: its halves where these have scales of their own."""
        return self.layout.unit_subs if self.layout.subs else self.layout.parts

    @property
    def batch(self) -> int:
        """Units in a batch."""
        return self.layout.units if self.layout.subs else _BATCH

    @property
    def unit(self) -> MatrixUnit:
        return MatrixUnit(STEPS // self.products)

    @contextmanager
    def configured(self, count: Expr) -> Iterator[None]:
        """Inside, there may be products of so many rows."""
        self.unit.configure(T.bitwise_and(count, ROWS - 1))
        yield
        self.unit.release()

    def add(
        self,
        weights: Sequence[BlockSums],
        first: Expr,
        count: Expr,
        most: int,
        stride: int,
        ask: Callable[[Expr, int, int], None],
        ask_for_result: Callable[[int, Expr], None],
        finish: Callable[[int, Expr, Expr], None],
    ) -> None:
        """`finish(group, row, w · x)` for rows first … first + count − 1 of x, at most `most`, `stride` words
        apart, and the `width` groups of weights; rows count from `first` on. `ask(unit, group, ahead)` asks
        for the weights of a group that will be unpacked that many units after this one, maybe those of the
        next groups, `ask_for_result(group, row)` for what `finish` will store to."""
        units = self.layout.units
        blocks = self.layout.columns // self.layout.format.block
        vectors = UnitVectors(unit_names(self.layout), self.width, LANES)
        pieces = min(blocks, -(-vectors.stride * units * blocks // _UNPACKED))
        piece = -(-blocks // pieces)
        vectors.allocate(piece * units)
        sums = local("int32", self.batch * self.products * _SUMS)
        totals = local("float32", most * self.width * LANES)
        rest = bind(T.bitwise_and(count, ROWS - 1))
        with serial(0, -(-blocks // piece)) as p:
            block = bind(p * piece)
            stop = bind(T.min(block + piece, blocks))
            vectors.unpack(weights, block, stop, _unit_vectors)
            begin, end = bind(block * units), bind(stop * units)

            def tile(row: Expr, last: Expr | None) -> None:
                x = self.x.from_(T.Cast("int64", first + row) * const(4 * stride, "int64"))
                asks = asking_tiles(row, count, ROWS)
                for g, group in enumerate(weights):

                    def ask_ahead(unit: Expr, g: int = g) -> None:
                        with when(asks[g % 2]):
                            ask(unit, g, piece * units)

                    mine = totals.from_(T.Cast("int64", (row * self.width + g) * LANES))
                    tile = _Tile(self, group, vectors, g, x, stride, mine, row, sums, begin, end)
                    if last is None:
                        tile.add_all(ask_ahead, partial(ask_for_result, g), partial(finish, g))
                    else:
                        tile.add_last(last, ask_ahead, partial(finish, g))

            with serial(0, T.truncdiv(count, ROWS)) as t:
                tile(bind(t * ROWS), None)
            with when(rest > 0):
                tile(bind(count - rest), rest)


def _unit_vectors(group: BlockSums, unit: Expr) -> dict[str, Expr]:
    """`unit_vectors` with sub-scales as f32."""
    vectors = unit_vectors(group, unit)
    return {n: cast(v, "float32") if n.startswith("scale") else v for n, v in vectors.items()}


@dataclass(frozen=True)
class _Tile:
    """Rows of x from the address `x` on, whose first is number `row`, against group `g`."""

    of: MatrixTiles
    weights: BlockSums
    vectors: UnitVectors
    g: int
    x: Memory
    stride: int  # of x, in words
    totals: Memory
    row: Expr
    sums: Memory
    begin: Expr  # of the units that are unpacked
    end: Expr

    def add_all(
        self,
        ask: Callable[[Expr], None],
        ask_for_result: Callable[[Expr], None],
        finish: Callable[[Expr, Expr], None],
    ) -> None:
        """Add the units to the totals of 16 rows."""
        with when(self._completes):
            for row in range(ROWS):
                ask_for_result(self.row + row)
        totals = [Register("float32", LANES, self._total(row, self.begin)) for row in range(ROWS)]
        with self._batches() as (begin, end):
            self._multiply(begin, end, ask, last=False)
            self._scale(totals, range(ROWS), begin, end)

        def done() -> None:
            for row, total in enumerate(totals):
                finish(self.row + row, total.get())

        def kept() -> None:
            for row, total in enumerate(totals):
                self.totals.store(self._total_at(row), total.get())

        choose(self._completes, done, kept)

    def add_last(self, rows: Expr, ask: Callable[[Expr], None], finish: Callable[[Expr, Expr], None]) -> None:
        """Add them to the totals of the last rows."""
        with self._batches() as (begin, end):
            self._multiply(begin, end, ask, last=True)
            with serial(0, rows) as row:
                total = Register("float32", LANES, self._total(row, begin))
                self._scale([total], [row], begin, end)
                self.totals.store(self._total_at(row), total.get())
        with when(self._completes), serial(0, rows) as row:
            finish(self.row + row, self.totals.load(self._total_at(row), LANES))

    @property
    def _completes(self) -> Expr:
        """Whether these are the last units."""
        return self.end == self.of.layout.columns // UNIT

    @contextmanager
    def _batches(self) -> Iterator[tuple[Expr, Expr]]:
        """Units begin … end − 1, a batch at a time."""
        size = self.of.batch
        with serial(0, T.truncdiv(self.end - self.begin + (size - 1), size)) as batch:
            begin = bind(self.begin + batch * size)
            yield begin, bind(T.min(begin + size, self.end))

    def _multiply(self, begin: Expr, end: Expr, ask: Callable[[Expr], None], *, last: bool) -> None:
        """Leave the sums of a batch in memory, for `_scale`."""
        with serial(begin, end) as unit:
            ask(unit)
            for part in range(self.of.products):
                step = part * self.of.unit.steps
                x = self.x.view("int8").address(unit * UNIT + 4 * step)
                w = self.vectors.address(self._slot(unit), self.g, f"code{step}")
                at = self._at(unit - begin, part)
                self.of.unit.product(x, 4 * self.stride, w, self.vectors.step, self.sums, at, part, last)

    def _slot(self, unit: Expr) -> Expr:
        return bind((unit - self.begin) * self.vectors.stride)

    def _at(self, number: Expr, part: int) -> Expr:
        """Where the sums of a product are, of a unit within its batch."""
        return bind((number * self.of.products + part) * _SUMS)

    def _sum(self, number: Expr, part: int, row: Expr) -> Expr:
        return cast(self.sums.load(self._at(number, part) + row * LANES, LANES), "float32")

    def _activations(self) -> Activations:
        return Activations(self.of.layout, self.of.dot, self.x)

    def _total_at(self, row: Expr) -> Expr:
        return row * (self.of.width * LANES)

    def _total(self, row: Expr, begin: Expr) -> Expr:
        """Of the units before `begin`."""
        zero = const(0, "float32", LANES)
        return T.if_then_else(begin == 0, zero, self.totals.load(self._total_at(row), LANES))

    def _scale(self, totals: Sequence[Register], rows: Sequence[Expr], begin: Expr, end: Expr) -> None:
        """Add the units of a batch to the totals of these rows."""
        layout, x = self.of.layout, self._activations()
        if layout.subs:
            self._scale_block(totals, rows, begin)
            return
        with serial(begin, end) as unit:
            slot = self._slot(unit)
            d = [bind(self.vectors.load(slot, self.g, f"d{part}")) for part in range(layout.parts)]
            minimum = bind(self.vectors.load(slot, self.g, "minimum")) if layout.format.minimum else None
            for total, row in zip(totals, rows, strict=True):
                dx, scaled_sum = x.unit_scale(row * self.stride, unit, None, row)
                terms = [(self._sum(unit - begin, part, row), d[part]) for part in range(layout.parts)]
                total.set(x.plus_unit(total.get(), terms, dx, minimum, scaled_sum))

    def _scale_block(self, totals: Sequence[Register], rows: Sequence[Expr], begin: Expr) -> None:
        """The block whose first unit is `begin`."""
        layout, x = self.of.layout, self._activations()
        end = begin + layout.units
        block = bind(begin // layout.units)
        zero = const(0, "float32", LANES)

        def add(values: Sequence[Register], factor: Expr) -> None:
            for total, value in zip(totals, values, strict=True):
                total.set(total.get() + value.get() * factor)

        scaled = [Register("float32", LANES, zero) for _ in rows]
        with serial(begin, end) as unit:
            slot = self._slot(unit)
            scales = [bind(self.vectors.load(slot, self.g, f"scale{p}")) for p in range(self.of.products)]
            for value, row in zip(scaled, rows, strict=True):
                terms = [self._sum(unit - begin, part, row) * scale for part, scale in enumerate(scales)]
                value.set(value.get() + sum(terms[1:], terms[0]) * x.scale(row * self.stride, unit))
        add(scaled, self.weights.block_scale(block))
        if not layout.format.minimum:
            return
        minima = [Register("float32", LANES, zero) for _ in rows]
        with serial(begin, end) as unit:
            minimum = bind(self.vectors.load(self._slot(unit), self.g, "minimum"))
            for value, row in zip(minima, rows, strict=True):
                value.set(x.plus_minimum(value.get(), minimum, row * self.stride, unit))
        add(minima, self.weights.block_minimum(block))
