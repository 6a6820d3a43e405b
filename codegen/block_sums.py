"""What a group of packed weight rows adds to the sums of a few rows of x, block by block.

A block's contribution to a row of W and a row of x, with d, m the block's floats, sc, mn its small integers,
q the codes as `Dot.values` gives them, z what they exceed the weight by, and dx the activation's scale:

    d · Σ over units u of dx[u] · Σ_sub sc · (Σ q·x − z·Σx)  ±  m · Σ over units u of mn · dx[u] · Σx

Without sub-scales, d and m are multiplied with every unit. All that stands before dx is integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zllmc.codegen.activations import Activations, IntegerScales
from zllmc.codegen.dot import Dot, load_i32
from zllmc.codegen.grid_codes import load_scale
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout
from zllmc.codegen.tir import Expr, Memory, Register, bind, cast, const, serial
from zllmc.zllm_ir.block_format import Float
from zllmc.zllm_ir.errors import ZllmcError

Vectors = Callable[[Expr], list[Expr]]  # of a unit: its codes as the dot product wants them, or its scales


class BlockSums:
    """One group of `lanes` rows at `record`, against rows of x."""

    def __init__(self, layout: PackedLayout, dot: Dot, record: Memory, x: Memory) -> None:
        self.layout, self.dot, self.record = layout, dot, record
        self.x = Activations(layout, dot, x)
        self._scales = record.from_(const(layout.code_bytes, "int64"))
        self._indices = dot.row_indices(layout, record)

    # -- what the weights are made of ----------------------------------------------------------------------

    def prepare(self, block: Expr) -> None:
        """Before the `steps` of the units of this block."""
        if self._indices:
            self._indices.prepare(block)

    def steps(self, unit: Expr) -> list[Expr]:
        """The unit's codes, straight from the packed bytes."""
        rows = partial(self._indices.of, unit) if self._indices else None
        raw = self.dot.code_steps(self.layout, self.record, bind(unit * self.layout.unit_bytes), rows)
        return [self.dot.values(self.layout, step) for step in raw]

    @property
    def by_unit(self) -> bool:
        """Whether `unit_scales` gives all scales of a unit; else `half_scales` does."""
        return self.layout.format.sub_block >= UNIT or self.layout.parts > 1

    def unit_scales(self, unit: Expr) -> list[Expr]:
        """d · sc, and ± m · mn where the format has a minimum; or the d of each half that has its own."""
        layout, lanes = self.layout, self.dot.lanes
        scale = layout.format.scale
        units = layout.format.block // UNIT
        block = bind(unit // units)
        if scale is not None and scale.count > 1:
            size = lanes * scale.nbytes
            first = bind(self._record(block) + layout.scale_offset + unit % units * (2 * size))
            return [bind(self._float(first + part * size, scale)) for part in range(2)]
        d = self.block_scale(block)
        scales = [bind(d * cast(self._small(unit, 0, "int8"), "float32")) if layout.subs else d]
        if layout.format.minimum:
            m = self.block_minimum(block)
            scales.append(bind(m * self.sub_minimum(unit)) if layout.sub_mins else m)
        return scales

    def half_scales(self, unit: Expr) -> tuple[list[Expr], list[Expr]]:
        """As `unit_scales` where sub-blocks have 16 columns: d · sc of each half; ± m · mn of each half, or
        ± m where the unit has only that, or nothing."""
        block = bind(unit // (self.layout.format.block // UNIT))
        d = self.block_scale(block)
        scales = [bind(d * cast(sc, "float32")) for sc in self.sub_scales(unit)]
        if not self.layout.format.minimum:
            return scales, []
        m = self.block_minimum(block)
        if not self.layout.sub_mins:
            return scales, [m]
        mn = self.sub_minimum(unit)
        return scales, [bind(m * cast(self.dot.scale_vector(mn, half), "float32")) for half in range(2)]

    def block_scale(self, block: Expr) -> Expr:
        return bind(self._float(self._record(block) + self.layout.scale_offset, self.layout.format.scale))

    def block_minimum(self, block: Expr) -> Expr:
        """± m."""
        fmt = self.layout.format
        m = self._float(self._record(block) + self.layout.minimum_offset, fmt.minimum)
        return bind(m * const(fmt.min_sign, "float32", self.dot.lanes))

    def sub_scales(self, unit: Expr) -> list[Expr]:
        """The unit's sub-scale, or those of its halves, as `Dot.dot` takes them."""
        paired = self._paired_scales(unit)
        if paired is None:
            return [self.dot.scale_vector(self._small(unit, 0, "int8"))]
        return [self.dot.scale_vector(paired, half) for half in range(2)]

    def sub_minimum(self, unit: Expr) -> Expr:
        """The unit's mn as f32, or i16 pairs of those of its halves."""
        at = self.layout.subs * self.dot.lanes
        if self.layout.format.sub_block == UNIT:
            return bind(cast(self._small(unit, at, "uint8"), "float32"))
        return bind(cast(self._pair_bytes(unit, at, "uint8"), "int16"))

    def _paired_scales(self, unit: Expr) -> Expr | None:
        if self.layout.format.sub_block == UNIT:
            return None
        return bind(cast(self._pair_bytes(unit, 0, "int8"), "int16"))

    def _record(self, block: Expr) -> Expr:
        return block * self.layout.block_scale_bytes

    def _small(self, unit: Expr, at: int, dtype: str) -> Expr:
        units = self.layout.format.block // UNIT
        place = self._record(unit // units) + at + unit % units * self.dot.lanes
        return bind(load_i32(self._scales.view(dtype), place, self.dot.lanes))

    def _pair_bytes(self, unit: Expr, at: int, dtype: str) -> Expr:
        units, size = self.layout.format.block // UNIT, 2 * self.dot.lanes
        return self._scales.view(dtype).load(self._record(unit // units) + at + unit % units * size, size)

    def _float(self, at: Expr, number: Float | None) -> Expr:
        if number is None:
            raise ZllmcError(f"{self.layout.format.name} has no scale")
        return load_scale(self._scales, at, self.dot.lanes, number)

    # -- sums ----------------------------------------------------------------------------------------------

    def add_units(
        self,
        totals: Sequence[Register],
        rows: Sequence[Expr],
        begin: Expr,
        end: Expr,
        steps: Vectors,
        scales: Vectors,
        factors: IntegerScales | None = None,
    ) -> None:
        """Add units begin … end − 1 to the totals; `rows` are the word offsets of the rows of x, `scales`
        gives what `unit_scales` does. With `factors`, there is one row, whose total lacks their `scale`."""
        layout = self.layout
        parts = layout.parts
        with serial(begin, end) as unit:
            codes, given, x = steps(unit), scales(unit), self._steps_of(rows, unit)
            k = factors and bind(factors.factor(0, unit))
            sums = []
            for part in range(parts):
                of = slice(part * STEPS // parts, (part + 1) * STEPS // parts)
                sums.append(self.dot.dot(layout, codes[of], [each[of] for each in x], k))
            for i, (total, row) in enumerate(zip(totals, rows, strict=True)):
                values = []
                for part, d in enumerate(given[:parts]):
                    value = sums[part][i]
                    if factors:
                        value = factors.less_offset(value, 0, unit, part)
                    elif offset := self.dot.offset(layout):
                        value = value + self.x.times_sum(row, unit, -offset, part if parts > 1 else None)
                    values.append((cast(value, "float32"), d))
                minimum = given[parts] if layout.format.minimum else None
                dx, scaled_sum = self.x.unit_scale(row, unit, factors, 0)
                total.set(self.x.plus_unit(total.get(), values, dx, minimum, scaled_sum))

    def add_blocks(
        self, totals: Sequence[Register], rows: Sequence[Expr], begin: Expr, end: Expr, steps: Vectors
    ) -> None:
        """Add blocks begin … end − 1 to the totals: integers within a unit, d and m once a block."""
        fmt, lanes = self.layout.format, self.dot.lanes
        zero = const(0, "float32", lanes)
        with serial(begin, end) as block:
            scaled = [Register("float32", lanes, zero) for _ in rows]
            minima = [Register("float32", lanes, zero) for _ in rows] if fmt.minimum else []
            self.prepare(block)
            with serial(0, fmt.block // UNIT) as u:
                unit = bind(block * (fmt.block // UNIT) + u)
                sums = self._sub_sums(steps, rows, unit)
                for i, row in enumerate(rows):
                    dx = bind(self.x.scale(row, unit))
                    scaled[i].set(scaled[i].get() + cast(sums[i], "float32") * dx)
                if minima:
                    minimum = self.sub_minimum(unit)
                    for i, row in enumerate(rows):
                        minima[i].set(self.x.plus_minimum(minima[i].get(), minimum, row, unit))
            d = self.block_scale(block)
            for total, part in zip(totals, scaled, strict=True):
                total.set(total.get() + part.get() * d)
            if minima:
                m = self.block_minimum(block)
                for total, part in zip(totals, minima, strict=True):
                    total.set(total.get() + part.get() * m)

    def _steps_of(self, rows: Sequence[Expr], unit: Expr) -> list[list[Expr]]:
        return [[self.x.step(row, unit, s) for s in range(STEPS)] for row in rows]

    def _sub_sums(self, steps: Vectors, rows: Sequence[Expr], unit: Expr) -> list[Expr]:
        """Σ_sub sc · Σ (q − z) · x of a unit for each row of x; i32 lanes."""
        layout, dot = self.layout, self.dot
        codes, x = steps(unit), self._steps_of(rows, unit)
        scales = self.sub_scales(unit)
        sums: list[Expr] = []
        for part, scale in enumerate(scales):
            of = slice(part * STEPS // len(scales), (part + 1) * STEPS // len(scales))
            more = dot.dot(layout, codes[of], [each[of] for each in x], scale)
            sums = [bind(a + b) for a, b in zip(sums, more, strict=True)] if sums else more
        if offset := dot.offset(layout):
            paired = self._paired_scales(unit)
            if paired is None:
                paired = dot.twice(self._small(unit, 0, "int8"))
            by = const(offset, "int32", dot.lanes)
            pairs = [self.x.half_sums(row, unit) for row in rows]
            sums = [bind(s - dot.pair_sum(paired, p) * by) for s, p in zip(sums, pairs, strict=True)]
        return sums
