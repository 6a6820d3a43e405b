"""What products need of quantized activations (`a8`, see `kernel_graph.activation_row_bytes`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import tirx

from zllmc.codegen.dot import Dot, broadcast_pair, broadcast_step
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout
from zllmc.codegen.quantize import round_to_int
from zllmc.codegen.rows import for_pieces, pieces
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
    lanes_of,
    llvm,
    local,
    prefetch,
)
from zllmc.codegen.vector_math import typed
from zllmc.zllm_ir.errors import IRError

_TINY = 1e-30  # a smaller largest scale counts as 0: largest / it must not overflow


class Activations:
    """Rows of x, which are `a8` rows (see `activation_row_bytes`); `row` is the word where one begins. What
    there is for all rows of W comes broadcast to a vector."""

    def __init__(self, layout: PackedLayout, dot: Dot, x: Memory) -> None:
        self._dot, self._halved = dot, layout.format.sub_block < UNIT
        self._has_minimum = layout.format.minimum is not None
        self._bytes, self._words = x.view("int8"), x.view("int32")
        self._halves, self._floats = x.view("int16"), x.view("float32")
        units = layout.columns // UNIT
        self._scale_at = layout.columns // 4
        self._sum_at = self._scale_at + units
        self._pair_at = self._sum_at + units

    def codes(self, row: Expr, unit: Expr) -> Expr:
        """The unit's codes as they lie there, i8."""
        return self._bytes.load(4 * row + unit * UNIT, UNIT)

    def prefetch(self, row: Expr, unit: Expr) -> None:
        prefetch(self._bytes, 4 * row + unit * UNIT)

    def step(self, row: Expr, unit: Expr, step: Expr) -> Expr:
        """Four codes."""
        return broadcast_step(self._words, row + unit * STEPS + step, self._dot.lanes)

    def scales(self, row: Expr, unit: Expr, count: int) -> Expr:
        """Those of `count` units from this one on, one in each lane."""
        return self._floats.load(row + self._scale_at + unit, count)

    def sums(self, row: Expr, unit: Expr, count: int) -> Expr:
        """Σ codes of both halves of `count` units from this one on, i16 pairs in each lane."""
        return self._words.load(row + self._pair_at + unit, count)

    def scale(self, row: Expr, unit: Expr) -> Expr:
        return broadcast(self._floats.load(row + self._scale_at + unit), self._dot.lanes)

    def scaled_sum(self, row: Expr, unit: Expr) -> Expr:
        """The unit's scale · Σ codes."""
        return broadcast(self._floats.load(row + self._sum_at + unit), self._dot.lanes)

    def half_sums(self, row: Expr, unit: Expr) -> Expr:
        """Σ codes of both halves of the unit: i16 pairs."""
        return broadcast_pair(self._words, row + self._pair_at + unit, self._dot.lanes)

    def times_sum(self, row: Expr, unit: Expr, factor: int, half: int | None = None) -> Expr:
        """factor · Σ codes, of the unit or of one half; i32 lanes."""
        low, high = (factor & 0xFFFF if half in (part, None) else 0 for part in range(2))
        word = (low | high << 16) - (1 << 32 if high >> 15 else 0)
        by = bits(const(word, "int32", self._dot.lanes), f"int16x{2 * self._dot.lanes}")
        return self._dot.pair_sum(by, self.half_sums(row, unit))

    def unit_scale(
        self, row: Expr, unit: Expr, factors: IntegerScales | None, number: Expr
    ) -> tuple[Expr | None, Expr | None]:
        """dx and dx · Σ codes as `plus_unit` takes them; row `number` of `factors`, where there are any."""
        if factors is None:
            dx = bind(self.scale(row, unit))
            return dx, self.scaled_sum(row, unit) if self._has_minimum else None
        return None, factors.sum(number, unit) if self._has_minimum else None

    def plus_unit(
        self,
        total: Expr,
        parts: Sequence[tuple[Expr, Expr]],
        dx: Expr | None,
        minimum: Expr | None,
        scaled_sum: Expr | None,
    ) -> Expr:
        """total + what a unit without sub-scales adds. `parts`: sums of products as f32, each with its d.
        Without `dx` they have that as a factor already, see `integer_scales`."""
        if len(parts) == 1:
            ((value, d),) = parts
            total = total + (value if dx is None else value * dx) * d
        elif dx is None:
            for value, d in parts:
                total = bind(total + value * d)
        else:
            scaled = const(0, "float32", self._dot.lanes)
            for value, d in parts:
                scaled = bind(scaled + value * d)
            total = total + scaled * dx
        return total if minimum is None else total + minimum * scaled_sum

    def plus_minimum(self, minima: Expr, mn: Expr, row: Expr, unit: Expr) -> Expr:
        """minima + Σ_sub mn · dx · Σx; `mn` is what `BlockSums.sub_minimum` gives."""
        if not self._halved:
            return minima + mn * self.scaled_sum(row, unit)
        pairs = self._dot.pair_sum(mn, self.half_sums(row, unit))
        return minima + cast(pairs, "float32") * self.scale(row, unit)


def largest_factor(layout: PackedLayout, dot: Dot) -> int:
    """The largest k that keeps a unit's sums within i32; 0 where sums don't take such factors."""
    if dot.kind != "maddubs" or layout.subs or layout.format.wide:
        return 0  # of wide weights, sums leave too little room
    return min(32767, (2**31 - 1) // (UNIT // layout.parts * 127 * dot.largest(layout)))


class IntegerScales:
    """The scales of up to `rows` rows as integers, for a processor that multiplies by integers on the way.

    AVX2 adds neighbouring i16 sums by multiplying them with 1. That factor may as well be the unit's scale,
    if it is an integer: its sums then only need a conversion and one fma with the weights' scale. So the
    scales of a row are rounded to k · D with integers k, and D makes up for it in the row's result.

    A scale is off by D/2 at most. Where all units are about as large, that is 2⁻¹⁵ of it. Where one stands
    out, the others may lose more, which is small against what rounding that one's codes does.

    With `offsets`, there is also what sums of codes exceed those of the weights by.
    """

    def __init__(self, layout: PackedLayout, dot: Dot, x: Activations, rows: int, *, offsets: bool) -> None:
        self._x, self._lanes, self._most = x, dot.lanes, largest_factor(layout, dot)
        self._units = layout.columns // UNIT
        self._factors = local("int32", rows * self._units)  # k twice, as i16
        self._scales = local("float32", rows)
        self._sums = local("float32", rows * self._units) if layout.format.minimum else None
        self._zero = dot.offset(layout) if offsets else 0
        parts = layout.parts if self._zero else 0
        self._offsets = [local("int32", rows * self._units) for _ in range(parts)]

    def prepare(self, number: Expr, row: Expr) -> None:
        """Row `number`, which begins at word `row`."""
        # The bits of positive floats order like integers. One register for each size of vector.
        peaks = {n: Register("int32", n, const(0, "int32", n)) for _, n in pieces(self._units, self._lanes)}

        def compare(unit: Expr, n: int, _: int) -> None:
            scales = bits(self._x.scales(row, unit, n), typed("int32", n))
            peaks[n].set(tirx.max(peaks[n].get(), scales))

        for_pieces(self._units, self._lanes, 1, compare)
        peak = hold(functools.reduce(tirx.max, [_largest(register.get()) for register in peaks.values()]))
        peak = bind(bits(peak, "float32"))
        self._scales.store(number, peak * const(1 / self._most, "float32"))
        usable = peak > const(_TINY, "float32")
        by = hold(tirx.Select(usable, const(self._most, "float32") / peak, const(0.0, "float32")))

        def convert(unit: Expr, n: int, _: int) -> None:
            at = bind(number * self._units + unit)
            half = const(16, "int32", n)
            k = bind(round_to_int(self._x.scales(row, unit, n) * broadcast(by, n)))
            self._factors.store(at, k | k << half)
            if self._sums is None and not self._offsets:
                return
            words = bind(self._x.sums(row, unit, n))
            halves = [words << half >> half, words >> half]
            whole = bind(halves[0] + halves[1])
            if self._sums is not None:
                self._sums.store(at, cast(whole * k, "float32"))
            for i, offsets in enumerate(self._offsets):
                codes = halves[i] if len(self._offsets) > 1 else whole
                offsets.store(at, codes * k * const(self._zero, "int32", n))

        for_pieces(self._units, self._lanes, 1, convert)

    def factor(self, number: Expr, unit: Expr) -> Expr:
        """k in each member of i16 pairs."""
        return broadcast_pair(self._factors, number * self._units + unit, self._lanes)

    def less_offset(self, total: Expr, number: Expr, unit: Expr, part: int) -> Expr:
        """The sums over a part of the unit, of the weights in place of the codes."""
        if not self._offsets:
            return total
        return total - broadcast(self._offsets[part].load(number * self._units + unit), self._lanes)

    def sum(self, number: Expr, unit: Expr) -> Expr:
        """k · Σ codes; only for formats with a minimum."""
        if self._sums is None:
            raise IRError("no sums of activations were kept: the format has no minimum")
        return broadcast(self._sums.load(number * self._units + unit), self._lanes)

    def scale(self, number: Expr) -> Expr:
        """D."""
        return broadcast(self._scales.load(number), self._lanes)


def _largest(values: Expr) -> Expr:
    """Of the lanes of an i32 vector."""
    return values if lanes_of(values) == 1 else llvm("llvm.vector.reduce.smax", "int32", values)
