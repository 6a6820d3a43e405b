"""Tiles of a matrix product: a few rows of x against a few groups of weights, unpacked into the L1 cache.

What the sums need of a unit of 32 columns is unpacked once for all rows of x. A tile then goes over the units
with all its sums in registers: a step loads the codes of each group of weight rows once, and an activation,
once broadcast, serves all groups.

Whatever is a sum of integers is exact, and the arithmetic on floats is that of `block_sums`, operation by
operation: a row's result is the same alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.activations import Activations, IntegerScales
from zllmc.codegen.block_sums import BlockSums
from zllmc.codegen.dot import LARGEST_PAIR, Dot
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout
from zllmc.codegen.plain_tiles import tile_groups
from zllmc.codegen.tile_vectors import TotalVectors, UnitVectors, unit_names, unit_vectors
from zllmc.codegen.tir import (
    Expr,
    Memory,
    Register,
    bind,
    bits,
    broadcast,
    cast,
    const,
    hold,
    local,
    serial,
    when,
)
from zllmc.zllm_ir.fused_ops import LIMITED_FOUR

Sums = list[list[Expr]]  # of each row of x and each group

_UNPACKED = 16 * 1024  # bytes of unpacked vectors: half of the L1 cache


@dataclass(frozen=True)
class Tiles:
    """The product of rows of x with weights of `layout`.

    AVX2 sums products in i16, for as many steps as cannot overflow: a `chunk`. The codes exceed the weights
    by `zero`; the sums are still those of the weights, because they start with −zero times the activations
    that are to come. On the way there they may wrap around.
    """

    layout: PackedLayout
    dot: Dot
    x: Activations

    @cached_property
    def zero(self) -> int:
        return self.dot.offset(self.layout)

    @cached_property
    def chunk(self) -> int:
        """Steps whose products are summed before they are widened and scaled: 1, 2, 4 or 8."""
        steps = STEPS // self.layout.unit_subs
        if self.dot.kind == "maddubs":
            weight = max(self.zero, self.dot.largest(self.layout) - self.zero)
            activations = LIMITED_FOUR if self.layout.format.wide else 2 * LARGEST_PAIR  # of two steps
            while steps > 1 and steps * activations * weight > 2 * 32767:
                steps //= 2
        return steps

    @property
    def chunks(self) -> int:
        """Of a unit."""
        return STEPS // self.chunk

    @property
    def width(self) -> int:
        """Groups of weight rows in a tile."""
        return tile_groups(self.layout)

    @property
    def height(self) -> int:
        """Rows of x in a tile, a power of 2."""
        return min(8, self.dot.registers // (2 * self.width))

    def add(
        self,
        totals: Memory,
        weights: Sequence[BlockSums],
        starts: Memory | None,
        factors: IntegerScales | None,
        first: Expr,
        count: Expr,
        stride: int,
        prefetch: Callable[[Expr, int, int], None],
    ) -> None:
        """totals[row][group] += w · x for rows first … first + count − 1 of x, `stride` words apart, and the
        `width` groups of weights; a row's lack `factors.scale`. `starts`: of `prepare`. `prefetch(unit,
        group, ahead)` asks for the weights of a group that will be unpacked that many units after this one,
        maybe those of the next groups."""
        units = self.layout.units
        blocks = self.layout.columns // self.layout.format.block
        vectors = UnitVectors(unit_names(self.layout), self.width, self.dot.lanes)
        piece = min(blocks, max(1, _UNPACKED // (vectors.stride * units)))
        vectors.allocate(piece * units)
        zero = bind(T.max(0 - count, 0))  # which LLVM doesn't know, see `_Tile`

        def tile(row: Expr, rows: int, begin: Expr, end: Expr) -> None:
            words = [bind((first + row + r) * stride) for r in range(rows)]
            asks = asking_tiles(row, count, self.height)

            def ask(unit: Expr) -> None:
                for g in range(self.width):
                    with when(asks[g % 2]):
                        prefetch(unit, g, piece * units)

            _Tile(self, weights, vectors, starts, factors, words, stride, row, zero, ask).add(
                totals, begin, end
            )

        with serial(0, -(-blocks // piece)) as p:
            begin = bind(p * piece)
            end = bind(T.min(begin + piece, blocks))
            vectors.unpack(weights, begin, end, unit_vectors)
            with serial(0, T.truncdiv(count, self.height)) as t:
                tile(bind(t * self.height), self.height, begin, end)
            rows = self.height
            while rows := rows // 2:
                with when(T.bitwise_and(count, rows) != 0):
                    tile(bind(T.bitwise_and(count, -2 * rows)), rows, begin, end)

    def prepare(self, most: int, first: Expr, count: Expr, stride: int) -> Memory | None:
        """What the i16 sums of each row and chunk start with: [row][unit][chunk], both sums in 4 bytes."""
        if not self.zero or self.dot.kind != "maddubs":
            return None
        lanes, units = self.dot.lanes, self.layout.columns // UNIT
        starts = local("int32", most * units * self.chunks + lanes)
        by = const(self.zero, "uint8", 4 * lanes)
        with serial(0, count) as row, serial(0, -(-units // self.chunk)) as some:
            begin = bind(some * self.chunk)
            sums = []
            for i in range(self.chunk):  # past the last unit, this gives what the next row overwrites
                codes = self.x.codes((first + row) * stride, bind(T.min(begin + i, units - 1)))
                sums.append(bind(self.dot.plus_products(None, by, codes)))
            total = const(0, "int16", 2 * lanes) - _sums_of_chunks(sums)
            starts.store((row * units + begin) * self.chunks, bits(total, f"int32x{lanes}"))
        return starts


@dataclass(frozen=True)
class _Tile:
    """Rows of x that begin at `words`, from the number `row` of the totals and of `starts` on.

    `zero` is 0, unknown to LLVM: what lies so much further in every turn of a loop stays in memory, and
    leaves the registers to the sums of integers.
    """

    of: Tiles
    weights: Sequence[BlockSums]
    vectors: UnitVectors
    starts: Memory | None
    factors: IntegerScales | None
    words: Sequence[Expr]
    stride: Expr
    row: Expr
    zero: Expr
    prefetch: Callable[[Expr], None]

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(r, g) for r in range(len(self.words)) for g in range(self.of.width)]

    def add(self, totals: Memory, begin: Expr, end: Expr) -> None:
        """Add blocks begin … end − 1 to the totals."""
        width, lanes = self.of.width, self.of.dot.lanes
        mine = TotalVectors(totals, bind(self.row * (width * lanes)), width, lanes)
        if self.of.layout.subs:
            with serial(begin, end) as block:
                self._add_block(mine, block, block - begin)
            return
        units = self.of.layout.units
        with serial(0, (end - begin) * units) as u:
            self._add_unit(mine.behind(u * self.zero), bind(begin * units + u), bind(u * self.vectors.stride))

    def _add_unit(self, totals: TotalVectors, unit: Expr, slot: Expr) -> None:
        self._ask(unit)
        x, parts = self.of.x, self.of.layout.parts
        chunks = self.of.chunks // parts
        sums = [self._dot(unit, slot, part * chunks, chunks) for part in range(parts)]
        for r, row in enumerate(self.words):
            dx, scaled_sum = x.unit_scale(row, unit, self.factors, self.row + r)
            for g in range(self.of.width):
                terms = [
                    (cast(of_part[r][g], "float32"), self.vectors.load(slot, g, f"d{part}"))
                    for part, of_part in enumerate(sums)
                ]
                minimum = self.vectors.load(slot, g, "minimum") if self.of.layout.format.minimum else None
                totals.set(r, g, x.plus_unit(totals.get(r, g), terms, dx, minimum, scaled_sum))

    def _add_block(self, totals: TotalVectors, block: Expr, number: Expr) -> None:
        """`number` counts the blocks that are unpacked."""
        x, fmt = self.of.x, self.of.layout.format
        width, lanes = self.of.width, self.of.dot.lanes
        units = self.of.layout.units
        first = bind(block * units)
        slots = bind(number * (units * self.vectors.stride))
        zero = const(0, "float32", lanes)
        scaled = TotalVectors(local("float32", len(self.places) * lanes), const(0, "int32"), width, lanes)
        for r, g in self.places:
            scaled.set(r, g, zero)
        with serial(0, units) as u:
            unit = bind(first + u)
            self._ask(unit)
            held = scaled.behind(u * self.zero)
            sums = self._dot(unit, bind(slots + u * self.vectors.stride), 0, self.of.chunks)
            for r, row in enumerate(self.words):
                dx = bind(x.scale(row, unit))
                for g in range(width):
                    held.set(r, g, held.get(r, g) + cast(sums[r][g], "float32") * dx)
        for r, g in self.places:
            totals.set(r, g, totals.get(r, g) + scaled.get(r, g) * self.weights[g].block_scale(block))
        if not fmt.minimum:
            return
        minima = {place: Register("float32", lanes, zero) for place in self.places}
        with serial(0, units) as u:
            unit = bind(first + u)
            slot = bind(slots + u * self.vectors.stride)
            for r, g in self.places:
                minimum = self.vectors.load(slot, g, "minimum")
                minima[r, g].set(x.plus_minimum(minima[r, g].get(), minimum, self.words[r], unit))
        for r, g in self.places:
            value = totals.get(r, g) + minima[r, g].get() * self.weights[g].block_minimum(block)
            totals.set(r, g, value)

    def _ask(self, unit: Expr) -> None:
        """Have on its way what will be read next: weights, and the same columns of the next rows of x, which
        may be in the L3 cache."""
        self.prefetch(unit)
        for row in self.words:
            self.of.x.prefetch(row + len(self.words) * self.stride, unit)

    # -- sums of integers ----------------------------------------------------------------------------------

    def _dot(self, unit: Expr, slot: Expr, first: int, count: int) -> Sums:
        """Σ of weight · x over `count` chunks of the unit, times sub-scales if there are any; i32 lanes."""
        sums: Sums = []
        for chunk in range(first, first + count):
            sums = self._plus_chunk(sums, unit, slot, chunk)
        return sums

    def _plus_chunk(self, sums: Sums, unit: Expr, slot: Expr, chunk: int) -> Sums:
        groups, rows = range(self.of.width), range(len(self.words))
        narrow = [[self._start(unit, chunk, r)] * len(groups) for r in rows]
        for step in range(chunk * self.of.chunk, (chunk + 1) * self.of.chunk):
            codes = [bind(self.vectors.load(slot, g, f"code{step}")) for g in groups]
            for r, row in enumerate(self.words):
                x = bind(self.of.x.step(row, unit, step))
                narrow[r] = [bind(self.of.dot.plus_products(narrow[r][g], codes[g], x)) for g in groups]
        out: Sums = []
        for r in rows:
            wide = [self.of.dot.widened(narrow[r][g], self._scale(unit, slot, chunk, r, g)) for g in groups]
            out.append([bind(w + sums[r][g] if sums else w) for g, w in zip(groups, wide, strict=True)])
        return out

    def _scale(self, unit: Expr, slot: Expr, chunk: int, r: int, g: int) -> Expr | None:
        if self.of.layout.subs:
            return bind(
                self.vectors.load(slot, g, f"scale{chunk * self.of.layout.unit_subs // self.of.chunks}")
            )
        return None if self.factors is None else bind(self.factors.factor(self.row + r, unit))

    def _start(self, unit: Expr, chunk: int, r: int) -> Expr | None:
        """What the sums of a chunk start with; None where the first products are the start."""
        dot, chunks = self.of.dot, self.of.chunks
        if not self.of.zero:
            return None
        if self.starts is None:
            return bind(
                self.of.x.times_sum(self.words[r], unit, -self.of.zero, chunk if chunks > 1 else None)
            )
        units = self.of.layout.columns // UNIT
        pair = self.starts.load(((self.row + r) * units + unit) * chunks + chunk)
        return bind(bits(broadcast(pair, dot.lanes), f"int16x{2 * dot.lanes}"))


def asking_tiles(row: Expr, count: Expr, height: int) -> list[Expr]:
    """Whether the tile at `row` asks for what will be read of even groups, and of odd ones. The first two
    share in this: one may come to its end before memory has taken all requests."""
    return [hold(row < 1), hold(tirx.EQ(row, tirx.Select(count > height, height, 0)))]


# Of two vectors of eight i32, which go into either term of a sum; but for the last time, in halves of each.
_FOLDS = [((0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15))] * 2
_FOLDS.append(((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)))
_ORDERS = {2: (0, 1, 4, 5, 2, 3, 6, 7), 4: (0, 4, 1, 5, 2, 6, 3, 7)}


def _sums_of_chunks(units: list[Expr]) -> Expr:
    """[unit][chunk]: sums over the steps of each chunk. There is a vector of 8 steps, i16 pairs, for each of
    1, 2, 4 or 8 units, and a chunk has as many steps."""
    vectors = [bits(unit, "int32x8") for unit in units]

    def picked(pair: list[Expr], order: Sequence[int]) -> Expr:
        return bits(tirx.Shuffle(pair, list(order)), "int16x16")

    for fold in _FOLDS:
        if len(vectors) > 1:
            pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
            vectors = [bind(bits(picked(p, fold[0]) + picked(p, fold[1]), "int32x8")) for p in pairs]
    return picked(vectors, _ORDERS.get(len(units), range(8)))
