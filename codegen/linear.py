"""The linear family: y = alpha · (x · Wᵀ) + bias + residual, straight from packed weights.

One generator serves every block format: what differs is data in its description (`block_sums`). Decode has
one row of x and reads every packed byte once. More rows are taken in large blocks; a few groups of weights at
a time are unpacked for all of a block's rows, and multiplied in tiles (`linear_tiles`, `plain_tiles`, or on a
matrix unit `linear_amx`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from tvm.script.ir_builder import tirx as T

from zllmc.codegen.activations import Activations, IntegerScales, largest_factor
from zllmc.codegen.block_sums import BlockSums, add_block
from zllmc.codegen.dot import Dot
from zllmc.codegen.grid_codes import load_plain
from zllmc.codegen.linear_amx import MatrixTiles
from zllmc.codegen.linear_tiles import Tiles
from zllmc.codegen.packing import UNIT, PackedLayout, layout_of
from zllmc.codegen.plain_tiles import PlainTiles
from zllmc.codegen.rows import row_count, share
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    Register,
    bind,
    broadcast,
    choose,
    const,
    local,
    prefetch,
    serial,
)
from zllmc.targets.cpu import CpuTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.fused_ops import is_a8
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, activation_row_bytes
from zllmc.zllm_ir.types import R

PREFETCH_BYTES = 6144  # 2 KiB is too late for memory, 16 KiB crowds the L1 cache
_STREAMS = 4  # that a thread reads: processors' prefetchers look ahead in each, and only so far
_ROWS_AHEAD = 8  # of the one whose results are stored
_BLOCK = 512 * 1024  # bytes of x that the weights are unpacked for at once; they may come from the L3 cache


def linear(call: KernelCall, target: CpuTarget, name: str) -> Any:
    x, weight, bias, residual = call.operands
    (y,) = call.results
    if not isinstance(x, Operand) or not isinstance(weight, Operand):
        raise ZllmcError("linear: x and the weight are required")
    rows, columns = (int(d) for d in weight.type.shape)
    layout = layout_of(weight.type.dtype, (rows, columns), target.lanes)
    quantized = layout.format.plain is None
    limited = target.limits_activations and layout.format.wide
    if quantized != is_a8(x.type.dtype) or (limited and x.type.dtype != "a8_limited"):
        raise ZllmcError(f"no {target} kernel for linear of {x.type} with a {weight.type} weight")
    arguments: dict[str, Any] = {
        "control": "int32",
        "x": "uint8" if quantized else "float32",
        "weight": "uint8",
    }
    arguments |= {n: "float32" for n, v in (("bias", bias), ("residual", residual)) if v is not None}
    # The residual may be y itself.
    with Kernel(name, noalias=residual is None, **arguments, y="float32") as kernel:
        given = dict(zip((*arguments, "y"), kernel.arguments, strict=True))
        groups = _Groups(
            layout,
            target,
            given["weight"],
            given["x"],
            activation_row_bytes(columns) // 4 if quantized else x.stride,
            float(call.attributes.get("alpha", 1.0)),
            _Rows(given["y"], y.stride),
            given.get("bias"),
            _Rows(given["residual"], residual.stride) if isinstance(residual, Operand) else None,
        )

        def one() -> None:
            begin, end = share(kernel, layout.groups)
            factors = groups.factors(1, offsets=True)
            if factors:
                factors.prepare(0, 0)
            groups.decode(begin, end, factors)

        def many() -> None:
            begin, end = share(kernel, layout.groups // groups.tiles.width)
            size = columns if quantized else 4 * columns
            height = groups.tiles.height
            block = max(2, _BLOCK // size // height) * height
            with serial(0, (tokens + (block - 1)) // block) as b:
                first = bind(b * block)
                groups.prefill(begin, end, first, bind(T.min(tokens - first, block)), block)

        tokens = row_count(x, given["control"])
        if x.single_row:
            one()
        elif x.type.shape[0] == R:  # mostly the last token's
            choose(tokens < 2, one, many)
        else:
            many()
    return kernel.function


@dataclass(frozen=True)
class _Rows:
    memory: Memory
    stride: int


@dataclass(frozen=True)
class _Groups:
    """Groups of `lanes` weight rows against rows of x."""

    layout: PackedLayout
    target: CpuTarget
    weight: Memory
    x: Memory
    x_stride: int  # 4-byte words
    alpha: float
    y: _Rows
    bias: Memory | None
    residual: _Rows | None

    @cached_property
    def dot(self) -> Dot:
        return Dot(self.target)

    def factors(self, rows: int, *, offsets: bool) -> IntegerScales | None:
        if self.layout.format.plain is not None or not largest_factor(self.layout, self.dot):
            return None
        x = Activations(self.layout, self.dot, self.x)
        return IntegerScales(self.layout, self.dot, x, rows, offsets=offsets)

    def decode(self, begin: Expr, end: Expr, factors: IntegerScales | None) -> None:
        """Groups begin … end − 1 against the only row of x."""
        each = bind(T.truncdiv(end - begin, _STREAMS))
        with serial(0, each) as i:
            self._decode([bind(begin + each * stream + i) for stream in range(_STREAMS)], factors)
        with serial(begin + each * _STREAMS, end) as group:
            self._decode([group], factors)

    def _decode(self, groups: Sequence[Expr], factors: IntegerScales | None) -> None:
        """A few groups side by side, a unit of columns of each at a time."""
        layout, lanes = self.layout, self.dot.lanes
        records = [self._record(group) for group in groups]
        totals = [Register("float32", lanes, const(0, "float32", lanes)) for _ in groups]
        start = const(0, "int32")
        if layout.format.plain is not None:
            with serial(0, layout.columns) as column:
                x = broadcast(self.x.load(column), lanes)
                for record, total in zip(records, totals, strict=True):
                    w = bind(load_plain(record, column * lanes, lanes, layout.format.plain))
                    total.set(total.get() + w * x)
        else:
            sums = [BlockSums(layout, self.dot, record, self.x) for record in records]
            with serial(0, layout.columns // (layout.format.block if layout.subs else UNIT)) as piece:
                if layout.subs:
                    add_block(sums, [[total] for total in totals], [start], piece)
                else:
                    for group_sums, total in zip(sums, totals, strict=True):
                        group_sums.add_unit([total], [start], piece, factors)
        for group, total in zip(groups, totals, strict=True):
            self._finish(group, start, total.get() * factors.scale(0) if factors else total.get())

    def prefill(self, begin: Expr, end: Expr, first: Expr, count: Expr, most: int) -> None:
        """Groups begin … end − 1 against rows first … first + count − 1 of x, which are at most `most`."""
        tiles = self.tiles
        if isinstance(tiles, MatrixTiles):
            with tiles.configured(count), serial(begin, end) as some:
                self._add_by_matrix(tiles, some, first, count, most)
            return
        totals = local("float32", most * tiles.width * self.dot.lanes)
        starts = tiles.prepare(most, first, count, self.x_stride) if isinstance(tiles, Tiles) else None
        factors = self.factors(most, offsets=False)
        if factors:
            with serial(0, count) as row:
                factors.prepare(row, (first + row) * self.x_stride)
        with serial(begin, end) as some:
            self._add(tiles, totals, starts, factors, some, first, count)

    def _add_by_matrix(self, tiles: MatrixTiles, some: Expr, first: Expr, count: Expr, most: int) -> None:
        numbers, records = self._some(some, tiles.width)
        weights = [BlockSums(self.layout, tiles.dot, record, self.x) for record in records]

        def finish(g: int, row: Expr, total: Expr) -> None:
            self._finish(numbers[g], first + row, total)

        def soon(g: int, row: Expr) -> None:
            self._ask_for_result(numbers[g], first + row)

        tiles.add(weights, first, count, most, self.x_stride, partial(self._ask, records), soon, finish)

    def _add(
        self,
        tiles: Tiles | PlainTiles,
        totals: Memory,
        starts: Memory | None,
        factors: IntegerScales | None,
        some: Expr,
        first: Expr,
        count: Expr,
    ) -> None:
        lanes, width = self.dot.lanes, tiles.width
        numbers, records = self._some(some, width)
        with serial(0, count * width) as i:
            totals.store(i * lanes, const(0, "float32", lanes))
        if isinstance(tiles, PlainTiles):
            tiles.add(totals, records, first, count, self.x_stride, self._prefetch)
        else:
            weights = [BlockSums(self.layout, tiles.dot, record, self.x) for record in records]
            ask = partial(self._ask, records)
            tiles.add(totals, weights, starts, factors, first, count, self.x_stride, ask)
        with serial(0, count) as r:
            self._ask_for_result(numbers[0], first + r + _ROWS_AHEAD)
            for g, group in enumerate(numbers):
                total = totals.load((r * width + g) * lanes, lanes)
                self._finish(group, first + r, total * factors.scale(r) if factors else total)

    def _some(self, number: Expr, width: int) -> tuple[list[Expr], list[Memory]]:
        """The groups of a tile, and their packed bytes."""
        numbers = [bind(number * width + g) for g in range(width)]
        return numbers, [self._record(group) for group in numbers]

    def _ask(self, records: Sequence[Memory], unit: Expr, g: int, ahead: int) -> None:
        """For the unit that is so far ahead, of this group or of the one that comes after all of these."""
        size, units = self.layout.group_bytes, self.layout.columns // UNIT
        later = bind(unit + ahead)
        inside = bind(T.truncmod(later, units) * (size // units))
        at = bind(inside + T.if_then_else(later < units, 0, len(records) * size))
        for line in range(0, size // units, 64):
            prefetch(records[g], at + line)

    def _ask_for_result(self, group: Expr, row: Expr) -> None:
        """For the line that will be written."""
        prefetch(self.y.memory, row * self.y.stride + group * self.dot.lanes, write=True)

    @property
    def tiles(self) -> Tiles | MatrixTiles | PlainTiles:
        if self.layout.format.plain is not None:
            return PlainTiles(self.layout, self.dot.registers, self.x)
        if self.target.matrix:
            return MatrixTiles(self.layout, Dot(self.target, exact=True), self.x)
        return Tiles(self.layout, self.dot, Activations(self.layout, self.dot, self.x))

    def _record(self, group: Expr) -> Memory:
        return self.weight.from_(T.Cast("int64", group) * const(self.layout.group_bytes, "int64"))

    def _finish(self, group: Expr, row: Expr, total: Expr) -> None:
        """alpha, bias, residual; and the store."""
        lanes = self.dot.lanes
        column = bind(group * lanes)
        value = total if self.alpha == 1.0 else total * const(self.alpha, "float32", lanes)
        if self.bias is not None:
            value = value + self.bias.load(column, lanes)
        if self.residual is not None:
            value = value + self.residual.memory.load(row * self.residual.stride + column, lanes)
        self.y.memory.store(row * self.y.stride + column, value)

    def _prefetch(self, record: Memory, column: Expr) -> None:
        """Ask for a column of plain weights, PREFETCH_BYTES ahead."""
        ahead = bind(column * self.layout.block_bytes + PREFETCH_BYTES)
        for line in range(0, self.layout.block_bytes, 64):
            prefetch(record, ahead + line)
