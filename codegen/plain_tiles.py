"""Tiles of a matrix product with plain float weights: a few rows of x against a few groups of weight rows.

Some columns of the weights are widened to f32 once for all rows of x. A tile then goes over them with all its
sums in registers: a column's weights are loaded once for its rows, a value of x once for its groups of weight
rows. Every sum has its products in the order of the columns, so a row is the same in each place of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from zllmc.codegen.grid_codes import load_plain
from zllmc.codegen.packing import ROW_PAD, PackedLayout
from zllmc.codegen.tir import Expr, Memory, Register, bind, broadcast, local, serial, when

_WIDENED = 16 * 1024  # bytes of weights: half of the L1 cache


def tile_groups(layout: PackedLayout) -> int:
    """Groups of weight rows in a tile: as many as rows are padded to, and an even number where there is one,
    as a value of x then serves two."""
    groups = ROW_PAD // layout.lanes
    return 2 if groups == 1 and layout.groups % 2 == 0 else groups


@dataclass(frozen=True)
class PlainTiles:
    """The product of rows of x (f32, at `x`) with weights of `layout`."""

    layout: PackedLayout
    registers: int  # of the target, a vector each
    x: Memory

    @property
    def width(self) -> int:
        """Groups of weight rows in a tile."""
        return tile_groups(self.layout)

    @property
    def height(self) -> int:
        """Rows of x in a tile, at most 8: three registers hold weights and a value of x."""
        return min(8, (self.registers - 1) // self.width - 1)

    def add(
        self,
        totals: Memory,
        weights: Sequence[Memory],
        first: Expr,
        count: Expr,
        stride: int,
        prefetch: Callable[[Memory, Expr], None],
    ) -> None:
        """totals[row][group] += w · x for rows first … first + count − 1 of x, `stride` floats apart, and the
        `width` groups of weights. `prefetch(group, column)` is called before that column is read."""
        lanes, columns = self.layout.lanes, self.layout.columns
        size = self.width * lanes
        most = min(columns, _WIDENED // (4 * size))
        widened = local("float32", most * size)
        with serial(0, -(-columns // most)) as piece:
            begin = bind(piece * most)
            length = bind(T.min(columns - begin, most))
            with serial(0, length) as k:
                for g, group in enumerate(weights):
                    column = bind(begin + k)
                    prefetch(group, column)
                    w = load_plain(group, column * lanes, lanes, self.layout.format.plain)
                    widened.store(k * size + g * lanes, w)

            def tile(row: Expr, rows: int) -> None:
                words = [bind((first + row + r) * stride + begin) for r in range(rows)]
                self._add_tile(totals.from_(bind(row * size)), widened, words, length)

            tiles = bind(T.truncdiv(count, self.height))
            with serial(0, tiles) as t:
                tile(bind(t * self.height), self.height)
            done, rest = bind(tiles * self.height), bind(count - tiles * self.height)
            for rows in (4, 2, 1):
                with when(T.bitwise_and(rest, rows) != 0):
                    tile(bind(done + T.bitwise_and(rest, -2 * rows)), rows)

    def _add_tile(self, totals: Memory, widened: Memory, words: Sequence[Expr], length: Expr) -> None:
        lanes, groups = self.layout.lanes, range(self.width)
        places = [(r, g) for r in range(len(words)) for g in groups]
        at = {(r, g): (r * self.width + g) * lanes for r, g in places}
        sums = {place: Register("float32", lanes, totals.load(at[place], lanes)) for place in places}
        with serial(0, length) as k:
            w = [bind(widened.load((k * self.width + g) * lanes, lanes)) for g in groups]
            for r, row in enumerate(words):
                x = bind(broadcast(self.x.load(row + k), lanes))
                for g in groups:
                    sums[r, g].set(sums[r, g].get() + w[g] * x)
        for place in places:
            totals.store(at[place], sums[place].get())
