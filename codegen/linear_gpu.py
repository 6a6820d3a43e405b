"""The linear family on a GPU: y = alpha · (x · Wᵀ) + bias + residual, straight from packed weights.

The arithmetic is the CPU's (`block_sums`): a lane holds a row of W. What differs is how the work is cut. One
row of x, or a few, are shared by the units of a block, which take parts of the columns and meet in shared
memory, so that enough loads are in flight. Many are multiplied by `matrix_gpu`, or by `matrix_plain` if the
weights are floats; where there is no matrix unit for them, they go in tiles whose sums stay in registers, a
unit for each tile and group of weight rows.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.block_sums import BlockSums, add_block
from zllmc.codegen.dot import Dot
from zllmc.codegen.grid_codes import load_plain
from zllmc.codegen.matrix_gpu import MatrixTiles
from zllmc.codegen.matrix_plain import PlainTiles
from zllmc.codegen.matrix_tile import SHARED_WORDS, MatrixUnit
from zllmc.codegen.packing import ROW_PAD, UNIT, PackedLayout, layout_of
from zllmc.codegen.rows import row_count, share
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    Register,
    barrier,
    bind,
    block_array,
    broadcast,
    choose,
    const,
    serial,
    when,
)
from zllmc.targets.gpu import GpuTarget
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS
from zllmc.zllm_ir.fused_ops import is_a8
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, activation_row_bytes

ROW_TILE = 8  # rows of x that share a weight vector
FEW_ROWS = 16  # fewer would leave most of a matrix unit's tile empty


def linear(
    call: KernelCall, target: VectorTarget, units: int, name: str, matrix: MatrixUnit | None = None
) -> Any:
    """The kernel for blocks of `units` vector units, which multiply with `matrix` what is worth it."""
    x, weight, bias, residual = call.operands
    if not isinstance(x, Operand) or not isinstance(weight, Operand):
        raise ZllmcError("linear: x and the weight are required")
    rows, columns = (int(d) for d in weight.type.shape)
    layout = layout_of(weight.type.dtype, (rows, columns), target.lanes)
    quantized = layout.format.plain is None
    if quantized != is_a8(x.type.dtype):
        raise ZllmcError(f"no GPU kernel for linear of {x.type} with a {weight.type} weight")
    arguments = {"control": "int32", "x": "uint8" if quantized else "float32", "weight": "uint8"}
    arguments |= {n: "float32" for n, v in (("bias", bias), ("residual", residual)) if v is not None}
    # The residual may be y itself.
    with Kernel(name, noalias=residual is None, **arguments, y="float32") as kernel:
        given = dict(zip((*arguments, "y"), kernel.arguments, strict=True))
        stride = activation_row_bytes(columns) // 4 if quantized else x.stride
        groups = _Groups(call, layout, Dot(target), given, stride)
        if x.single_row:
            partial = block_array("float32", units * target.lanes)
            groups.split(kernel, units, partial, const(1, "int32"), 1)
        else:
            tokens = bind(row_count(x, given["control"]))
            if matrix is None:
                groups.tiles(kernel, tokens)
            else:
                shared = block_array("uint32", SHARED_WORDS)
                family = MatrixTiles if quantized else PlainTiles
                tiles = family(layout, Dot(target, exact=True), matrix, given, stride, groups.finish)
                choose(
                    tokens < FEW_ROWS,
                    lambda: groups.split(kernel, units, shared.view("float32"), tokens, ROW_TILE),
                    lambda: tiles.run(kernel, tokens, units, shared),
                )
    return kernel.function


def matrix_unit(call: KernelCall, target: GpuTarget) -> MatrixUnit | None:
    """What multiplies the many rows of a linear's x, where the target has it and the shapes fit."""
    x, weight = call.operands[:2]
    if not isinstance(x, Operand) or not isinstance(weight, Operand) or x.single_row:
        return None
    plain = FORMATS[weight.type.dtype].plain
    # Where it costs no more, as in Metal, plain floats are multiplied as f32: nothing is rounded.
    for inputs in ("s8", "f16") if plain is None else ("f32", plain):
        instruction = target.matrix_instruction(inputs)
        if instruction is not None:
            unit = MatrixUnit(instruction, target.subgroup)
            whole = int(weight.type.shape[1]) % unit.columns == 0 and x.stride % 4 == 0
            return unit if plain is None or whole else None
    return None


@dataclass(frozen=True)
class _Groups:
    """Groups of weight rows, one in each lane, against rows of x."""

    call: KernelCall
    layout: PackedLayout
    dot: Dot
    memory: dict[str, Memory]
    x_stride: int  # 4-byte words

    def split(self, kernel: Kernel, units: int, partial: Memory, tokens: Expr, count: int) -> None:
        """Few rows of x, `count` at a time: a block takes them and a group of weight rows, its units take
        parts of the columns and meet in its array `partial`. A short last tile repeats the last row."""
        lanes = self.dot.lanes
        unit = bind(tirx.truncmod(kernel.thread, units))
        block, blocks = bind(tirx.truncdiv(kernel.thread, units)), tirx.truncdiv(kernel.threads, units)
        pieces = self.layout.columns // (UNIT if self.layout.format.plain else self.layout.format.block)
        begin = bind(tirx.truncdiv(unit * pieces, units))
        end = bind(tirx.truncdiv((unit + 1) * pieces, units))
        tiles = bind(tirx.truncdiv(tokens + (count - 1), count))
        with serial(0, tirx.truncdiv(tiles * self.layout.groups - 1 - block + blocks, blocks)) as round:
            item = bind(block + round * blocks)
            group = bind(tirx.truncdiv(item, tiles))
            first = bind((item - group * tiles) * count)
            rows = [bind(tirx.min(first + i, tokens - 1)) for i in range(count)]
            totals = self._sums(group, [bind(row * self.x_stride) for row in rows], begin, end)
            for i, total in enumerate(totals):
                partial.store((i * units + unit) * lanes, total)
            barrier()
            with serial(0, -(-count // units)) as turn:
                row = bind(turn * units + unit)
                with when(tirx.all(row < count, first + row < tokens)):
                    parts = [partial.load((row * units + other) * lanes, lanes) for other in range(units)]
                    self.finish(group, bind(first + row), bind(functools.reduce(operator.add, parts)))
            barrier()

    def tiles(self, kernel: Kernel, tokens: Expr) -> None:
        """Several rows of x, without a matrix unit."""
        tiles = bind(tirx.truncdiv(tokens + (ROW_TILE - 1), ROW_TILE))
        begin, end = share(kernel, tiles * self.layout.groups)
        with serial(begin, end) as piece:
            group = bind(tirx.truncdiv(piece, tiles))
            self._tile(group, bind((piece - group * tiles) * ROW_TILE), tokens)

    def _tile(self, group: Expr, first: Expr, tokens: Expr) -> None:
        """ROW_TILE rows of x from `first` on. A short last tile repeats the last row."""
        rows = [bind(tirx.min(first + i, tokens - 1)) for i in range(ROW_TILE)]
        pieces = self.layout.columns // (UNIT if self.layout.format.plain else self.layout.format.block)
        totals = self._sums(group, [bind(row * self.x_stride) for row in rows], 0, pieces)
        for i, total in enumerate(totals):
            with when(first + i < tokens):  # a residual that is y itself must be added once
                self.finish(group, bind(first + i), total)

    def _sums(self, group: Expr, starts: list[Expr], begin: Expr, end: Expr) -> list[Expr]:
        """Σ w · x over blocks begin … end − 1, which are 32 columns of a plain format, for each row of x."""
        layout, lanes = self.layout, self.dot.lanes
        record = self.memory["weight"].from_(T.Cast("int64", group) * const(layout.group_bytes, "int64"))
        totals = [Register("float32", lanes, const(0, "float32", lanes)) for _ in starts]
        if layout.format.plain is not None:
            with serial(begin * UNIT, tirx.min(end * UNIT, layout.columns)) as column:
                w = bind(load_plain(record, column * lanes, lanes, layout.format.plain))
                for total, start in zip(totals, starts, strict=True):
                    total.set(total.get() + w * broadcast(self.memory["x"].load(start + column), lanes))
            return [total.get() for total in totals]
        sums = BlockSums(layout, self.dot, record, self.memory["x"])
        if layout.subs:
            with serial(begin, end) as block:
                add_block([sums], [totals], starts, block)
        else:
            with serial(begin * layout.units, end * layout.units) as unit:
                sums.add_unit(totals, starts, unit)
        return [total.get() for total in totals]

    def finish(self, group: Expr, row: Expr, total: Expr) -> None:
        """alpha, bias, residual; and the store."""
        lanes = self.dot.lanes
        _, _, bias, residual = self.call.operands
        (y,) = self.call.results
        alpha = float(self.call.attributes.get("alpha", 1.0))
        column = bind(group * lanes)

        def store(n: int) -> None:
            value = total if n == lanes else tirx.Shuffle([total], list(range(n)))
            if alpha != 1.0:
                value = value * const(alpha, "float32", n)
            if bias is not None:
                value = value + self.memory["bias"].load(column, n)
            if isinstance(residual, Operand):
                value = value + self.memory["residual"].load(row * residual.stride + column, n)
            self.memory["y"].store(row * y.stride + column, value)

        # Rows in memory are padded to ROW_PAD, which the last group may exceed.
        width = -(-self.layout.rows // ROW_PAD) * ROW_PAD
        if rest := width % lanes:
            choose(column + lanes <= width, lambda: store(lanes), lambda: store(rest))
        else:
            store(lanes)
