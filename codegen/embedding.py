"""The embedding family: rows of a packed table as f32, from the same bytes that the output head reads."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from zllmc.codegen.dot import Dot
from zllmc.codegen.grid_codes import load_plain, load_scale
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout, layout_of
from zllmc.codegen.rows import row_count, share
from zllmc.codegen.tir import Expr, Kernel, Memory, bind, broadcast, cast, const, local, serial
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand


def embedding(call: KernelCall, target: VectorTarget, name: str) -> Any:
    tokens, table = call.operands
    (y,) = call.results
    if not isinstance(tokens, Operand) or not isinstance(table, Operand):
        raise ZllmcError("embedding: tokens and the table are required")
    rows, columns = (int(d) for d in table.type.shape)
    layout = layout_of(table.type.dtype, (rows, columns), target.lanes)
    pieces = columns // UNIT if layout.format.plain is None else columns
    with Kernel(name, control="int32", tokens="int32", table="uint8", y="float32") as kernel:
        control, ids, weight, out = kernel.arguments
        row = _Row(layout, Dot(target), weight, out, float(call.attributes["scale"]))
        if tokens.single_row:
            begin, end = share(kernel, pieces)
            row.emit(ids.load(0), const(0, "int32"), begin, end)
        else:
            begin, end = share(kernel, row_count(tokens, control))
            with serial(begin, end) as t:
                row.emit(ids.load(t), bind(t * y.stride), 0, pieces)
    return kernel.function


class _Row:
    """Writes part of one token's row: `begin … end` in units of 32 columns (columns of a plain format)."""

    def __init__(self, layout: PackedLayout, dot: Dot, table: Memory, out: Memory, scale: float) -> None:
        self.layout, self.dot, self.table, self.out, self.scale = layout, dot, table, out, scale

    def emit(self, token: Expr, out_at: Expr, begin: Expr, end: Expr) -> None:
        lanes = self.dot.lanes
        token = bind(token)
        group = T.Cast("int64", token // lanes)
        record = self.table.from_(group * const(self.layout.group_bytes, "int64"))
        lane = bind(token % lanes)
        with serial(begin, end) as piece:
            if self.layout.format.plain is None:
                self._unit(record, lane, piece, out_at)
            else:
                self._column(record, lane, piece, out_at)

    def _unit(self, record: Memory, lane: Expr, unit: Expr, out_at: Expr) -> None:
        layout, dot, lanes = self.layout, self.dot, self.dot.lanes
        fmt = layout.format
        if fmt.scale is None:
            raise ZllmcError(f"{fmt.name} has no scale")
        # All rows of the group are unpacked side by side, then this one is picked.
        size = 4 * lanes
        codes = local("uint8", STEPS * size)
        for s, step in enumerate(dot.code_steps(layout, record, bind(layout.codes_at(unit)))):
            codes.store(s * size, step)
        if layout.format.signed:
            codes = codes.view("int8")

        block = bind(unit // layout.units * layout.block_bytes)
        inside = bind(unit % layout.units)
        subs = UNIT // fmt.sub_block if fmt.sub_block < fmt.block else 1  # sub-scales of a unit
        floats = local("float32", 3 * lanes)  # d of both halves of the unit, m
        d_at = block + layout.scale_offset
        if fmt.scale.count > 1:
            d_at = d_at + inside * (subs * lanes * fmt.scale.nbytes)
        for sub in range(subs if fmt.scale.count > 1 else 1):
            at = d_at + sub * lanes * fmt.scale.nbytes
            floats.store(sub * lanes, load_scale(record, at, lanes, fmt.scale))
        if fmt.minimum:
            floats.store(2 * lanes, load_scale(record, block + layout.minimum_offset, lanes, fmt.minimum))
        for sub in range(subs):
            within = bind(inside * (subs * lanes) + lane * subs + sub)
            d = floats.load((sub * lanes if fmt.scale.count > 1 else 0) + lane)
            if layout.subs:
                d = d * cast(record.view("int8").load(block + within), "float32")
            d = bind(d)
            m = None
            if fmt.minimum:
                m = floats.load(2 * lanes + lane)
                if layout.sub_mins:
                    m = m * cast(record.load(block + layout.subs * lanes + within), "float32")
                m = bind(m * const(fmt.min_sign, "float32"))
            for s in range(sub * STEPS // subs, (sub + 1) * STEPS // subs):
                q = cast(codes.load(s * size + lane * 4, 4), "int32") - const(layout.codes.zero, "int32", 4)
                w = broadcast(d, 4) * cast(q, "float32")
                if m is not None:
                    w = w + broadcast(m, 4)
                self.out.store(out_at + unit * UNIT + 4 * s, w * const(self.scale, "float32", 4))

    def _column(self, record: Memory, lane: Expr, column: Expr, out_at: Expr) -> None:
        at = column * self.dot.lanes + lane
        w = load_plain(record, at, 1, self.layout.format.plain)
        self.out.store(out_at + column, w * const(self.scale, "float32"))
