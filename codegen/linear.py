"""The linear family: y = alpha · (x · Wᵀ) + bias + residual, straight from packed weights.

One generator serves decode (one row of x: every packed byte is read once) and prefill (tiles of `ROW_TILE`
rows share each unpacked weight vector), and every block format: what differs is data in its description.

A block's contribution to a row of W and a row of x, with d, m the block's floats, sc, mn its small integers,
q the codes as `Dot.values` gives them, z what they exceed the weight by, and dx the activation's scale:

    Σ over units u of dx[u] · d · Σ_sub sc · (Σ q·x − z·Σx)  ±  m · mn · dx[u] · Σx
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from zllmc.codegen.dot import Dot, broadcast_pair, broadcast_step, load_i32
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout, layout_of
from zllmc.codegen.rows import row_count
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    Register,
    bind,
    bits,
    broadcast,
    cast,
    const,
    prefetch,
    serial,
)
from zllmc.targets.cpu import CpuTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, activation_row_bytes

ROW_TILE = 4  # rows of x that share an unpacked weight vector
PREFETCH_BYTES = 6144  # 2 KiB is too late for memory, 16 KiB crowds the L1 cache
_L2_SHARE = 192 * 1024  # bytes of x that stay in a core's L2 cache while weights stream past


def linear(call: KernelCall, target: CpuTarget, name: str) -> Any:
    x, weight, bias, residual = call.operands
    (y,) = call.results
    if not isinstance(x, Operand) or not isinstance(weight, Operand):
        raise ZllmcError("linear: x and the weight are required")
    rows, columns = (int(d) for d in weight.type.shape)
    layout = layout_of(weight.type.dtype, (rows, columns), target.lanes)
    quantized = layout.format.plain is None
    if quantized != (x.type.dtype == "a8"):
        raise ZllmcError(f"no CPU kernel for linear of {x.type} with a {weight.type} weight")
    arguments: dict[str, Any] = {
        "control": "int32",
        "x": "uint8" if quantized else "float32",
        "weight": "uint8",
    }
    arguments |= {n: "float32" for n, v in (("bias", bias), ("residual", residual)) if v is not None}
    # The residual may be y itself.
    with Kernel(name, noalias=residual is None, **arguments, y="float32") as kernel:
        given = dict(zip((*arguments, "y"), kernel.arguments, strict=True))
        tile = _Tile(
            layout,
            Dot(target),
            given["weight"],
            activation_row_bytes(columns) if quantized else x.stride,
            float(call.attributes.get("alpha", 1.0)),
            _Rows(given["y"], y.stride),
            given.get("bias"),
            _Rows(given["residual"], residual.stride) if isinstance(residual, Operand) else None,
        )
        begin = bind(layout.groups * kernel.thread // kernel.threads)
        end = bind(layout.groups * (kernel.thread + 1) // kernel.threads)
        if x.single_row:
            with serial(begin, end) as group:
                tile.emit(group, given["x"], [const(0, "int32")])
        else:
            tokens = bind(row_count(x, given["control"]))
            block = max(ROW_TILE, _L2_SHARE // (columns if quantized else 4 * columns) // ROW_TILE * ROW_TILE)
            with serial(0, (tokens + (block - 1)) // block) as b, serial(begin, end) as group:
                tiles = (T.min(tokens - b * block, block) + (ROW_TILE - 1)) // ROW_TILE
                with serial(0, tiles) as t:
                    first = bind(b * block + t * ROW_TILE)
                    # A short last tile repeats its last row: the same value is stored again.
                    last = bind(tokens - 1)
                    tile.emit(group, given["x"], [bind(T.min(first + r, last)) for r in range(ROW_TILE)])
    return kernel.function


@dataclass(frozen=True)
class _Rows:
    memory: Memory
    stride: int


@dataclass(frozen=True)
class _Tile:
    """One group of `lanes` weight rows against a few rows of x."""

    layout: PackedLayout
    dot: Dot
    weight: Memory
    x_stride: int  # bytes of a quantized row, elements of a float row
    alpha: float
    y: _Rows
    bias: Memory | None
    residual: _Rows | None

    def emit(self, group: Expr, x: Memory, rows: list[Expr]) -> None:
        lanes = self.dot.lanes
        record = self.weight.from_(T.Cast("int64", group) * const(self.layout.group_bytes, "int64"))
        if self.layout.format.plain is None:
            sums = self._quantized(record, x, rows)
        else:
            sums = self._plain(record, x, rows)
        column = bind(group * lanes)
        results = []
        for row, total in zip(rows, sums, strict=True):
            value = total if self.alpha == 1.0 else total * const(self.alpha, "float32", lanes)
            if self.bias is not None:
                value = value + self.bias.load(column, lanes)
            if self.residual is not None:
                value = value + self.residual.memory.load(row * self.residual.stride + column, lanes)
            results.append(bind(value))
        for row, value in zip(rows, results, strict=True):
            self.y.memory.store(row * self.y.stride + column, value)

    # -- block formats -------------------------------------------------------------------------------------

    def _quantized(self, record: Memory, x: Memory, rows: list[Expr]) -> list[Expr]:
        layout, lanes = self.layout, self.dot.lanes
        fmt, columns = layout.format, layout.columns
        scales = record.from_(const(layout.code_bytes, "int64"))
        words, floats = x.view("int32"), x.view("float32")
        row_words = [bind(row * (self.x_stride // 4)) for row in rows]
        scale_at, sum_at, pair_at = (
            columns // 4,
            columns // 4 + columns // UNIT,
            columns // 4 + 2 * columns // UNIT,
        )
        zero = const(0, "float32", lanes)
        totals = [Register("float32", lanes, zero) for _ in rows]
        with serial(0, columns // fmt.block) as block:
            scale_record = bind(block * layout.block_scale_bytes)
            d_at = scale_record + (layout.subs + layout.sub_mins) * lanes
            units = fmt.block // UNIT
            if units == 1:
                d = bind(self._f16(scales, d_at))
                m = bind(self._f16(scales, d_at + 2 * lanes)) if fmt.minimum else None
                sums, _ = self._unit(record, scales, scale_record, words, row_words, pair_at, block, 0)
                for total, acc, base in zip(totals, sums, row_words, strict=True):
                    dx = broadcast(floats.load(base + scale_at + block), lanes)
                    value = total.get() + cast(acc, "float32") * dx * d
                    if m is not None:
                        value = value + fmt.min_sign * (
                            m * broadcast(floats.load(base + sum_at + block), lanes)
                        )
                    total.set(value)
            else:
                scaled = [Register("float32", lanes, zero) for _ in rows]
                minima = [Register("float32", lanes, zero) for _ in rows] if fmt.minimum else []
                with serial(0, units) as u:
                    unit = bind(block * units + u)
                    sums, mins = self._unit(record, scales, scale_record, words, row_words, pair_at, unit, u)
                    for i, base in enumerate(row_words):
                        dx = bind(broadcast(floats.load(base + scale_at + unit), lanes))
                        scaled[i].set(scaled[i].get() + cast(sums[i], "float32") * dx)
                        if mins:
                            minima[i].set(minima[i].get() + cast(mins[i], "float32") * dx)
                d = bind(self._f16(scales, d_at))
                for total, part in zip(totals, scaled, strict=True):
                    total.set(total.get() + part.get() * d)
                if minima:
                    m = bind(self._f16(scales, d_at + 2 * lanes) * const(fmt.min_sign, "float32", lanes))
                    for total, part in zip(totals, minima, strict=True):
                        total.set(total.get() + part.get() * m)
        return [total.get() for total in totals]

    def _f16(self, memory: Memory, at: Expr) -> Expr:
        lanes = self.dot.lanes
        return cast(bits(memory.load(at, 2 * lanes), f"float16x{lanes}"), "float32")

    def _unit(
        self,
        codes: Memory,
        scales: Memory,
        scale_record: Expr,
        words: Memory,
        row_words: list[Expr],
        pair_at: int,
        unit: Expr,
        unit_in_block: Expr,
    ) -> tuple[list[Expr], list[Expr]]:
        """Of 32 columns, per row of x: Σ_sub sc · Σ (q − z) · x, and Σ_sub mn · Σ x; i32 lanes."""
        layout, dot, lanes = self.layout, self.dot, self.dot.lanes
        fmt = layout.format
        if len(row_words) == 1:
            self._prefetch(codes, unit, columns=UNIT)
        raw = dot.code_steps(layout, codes, bind(unit * layout.unit_bytes))
        steps = [dot.values(layout, step) for step in raw]
        x = [
            [broadcast_step(words, base + unit * STEPS + s, lanes) for s in range(STEPS)]
            for base in row_words
        ]
        offset = dot.offset(layout)
        pairs: list[Expr] = []
        if offset or fmt.sub_mins:
            pairs = [bind(broadcast_pair(words, base + pair_at + unit, lanes)) for base in row_words]

        if not layout.subs:
            sums = dot.dot(layout, steps, x, None)
            if offset:
                less = const(-offset, "int16", 2 * lanes)
                sums = [bind(s + dot.pair_sum(p, less)) for s, p in zip(sums, pairs, strict=True)]
            return sums, []

        signed = scales.view("int8")
        if fmt.sub_block == UNIT:
            sc = bind(load_i32(signed, scale_record + unit_in_block * lanes, lanes))
            sums = dot.dot(layout, steps, x, dot.scale_vector(sc))
            paired = dot.twice(sc) if offset else None
        else:
            at = scale_record + unit_in_block * (2 * lanes)
            paired = bind(cast(signed.load(at, 2 * lanes), "int16"))
            half = STEPS // 2
            low = dot.dot(layout, steps[:half], [r[:half] for r in x], dot.scale_vector(paired, 0))
            high = dot.dot(layout, steps[half:], [r[half:] for r in x], dot.scale_vector(paired, 1))
            sums = [bind(a + b) for a, b in zip(low, high, strict=True)]
        if offset:
            by = const(offset, "int32", lanes)
            sums = [bind(s - dot.pair_sum(paired, p) * by) for s, p in zip(sums, pairs, strict=True)]

        if not layout.sub_mins:
            return sums, []
        mins_at = scale_record + layout.subs * lanes
        if fmt.sub_block == UNIT:
            mn = bind(dot.twice(load_i32(scales, mins_at + unit_in_block * lanes, lanes)))
        else:
            mn = bind(cast(scales.load(mins_at + unit_in_block * (2 * lanes), 2 * lanes), "int16"))
        return sums, [bind(dot.pair_sum(mn, p)) for p in pairs]

    def _prefetch(self, record: Memory, piece: Expr, columns: int) -> None:
        """Ask for what the weights of `columns` columns take, PREFETCH_BYTES ahead. A group is two streams
        that jump at its end, which the hardware's prefetcher loses; the bytes ahead are one run."""
        size = self.layout.group_bytes * columns // self.layout.columns
        ahead = bind(piece * size + PREFETCH_BYTES)
        for line in range(0, size, 64):
            prefetch(record, ahead + line)

    # -- plain floats --------------------------------------------------------------------------------------

    def _plain(self, record: Memory, x: Memory, rows: list[Expr]) -> list[Expr]:
        lanes, columns = self.dot.lanes, self.layout.columns
        # One accumulator would wait for its own FMA: a single row takes four in turn.
        depth = 4 if columns % 4 == 0 else 1
        chains = depth if len(rows) == 1 else 1
        zero = const(0, "float32", lanes)
        sums = [[Register("float32", lanes, zero) for _ in range(chains)] for _ in rows]
        bases = [bind(row * self.x_stride) for row in rows]
        with serial(0, columns // depth) as k:
            if len(rows) == 1:
                self._prefetch(record, k, columns=depth)
            for j in range(depth):
                column = k * depth + j
                w = bind(self._float(record, column))
                for base, accumulators in zip(bases, sums, strict=True):
                    acc = accumulators[j % chains]
                    acc.set(acc.get() + w * broadcast(x.load(base + column), lanes))
        totals = []
        for accumulators in sums:
            total = accumulators[0].get()
            for acc in accumulators[1:]:
                total = total + acc.get()
            totals.append(total)
        return totals

    def _float(self, record: Memory, column: Expr) -> Expr:
        """One column of the group's rows, as f32."""
        lanes = self.dot.lanes
        match self.layout.format.plain:
            case "f32":
                return record.view("float32").load(column * lanes, lanes)
            case "f16":
                return cast(record.view("float16").load(column * lanes, lanes), "float32")
            case "bf16":
                high = cast(record.view("uint16").load(column * lanes, lanes), "uint32")
                return bits(high << const(16, "uint32", lanes), f"float32x{lanes}")
        raise ZllmcError(f"no CPU kernel for {self.layout.format.name} weights")
