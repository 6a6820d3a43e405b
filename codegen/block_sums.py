"""What a group of packed weight rows adds to the sums of a few rows of x, block by block.

A block's contribution to a row of W and a row of x, with d, m the block's floats, sc, mn its small integers,
q the codes as `Dot.values` gives them, z what they exceed the weight by, and dx the activation's scale:

    d · Σ over units u of dx[u] · Σ_sub sc · (Σ q·x − z·Σx)  ±  m · Σ over units u of mn · dx[u] · Σx

Without sub-scales, d and m are multiplied with every unit. All that stands before dx is integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zllmc.codegen.activations import Activations, IntegerScales
from zllmc.codegen.dot import Dot, load_i32
from zllmc.codegen.grid_codes import load_scale
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout
from zllmc.codegen.tir import Expr, Memory, Register, bind, cast, const, serial
from zllmc.zllm_ir.block_format import Float
from zllmc.zllm_ir.errors import ZllmcError


class BlockSums:
    """One group of `lanes` rows at `record`, against rows of x."""

    def __init__(self, layout: PackedLayout, dot: Dot, record: Memory, x: Memory) -> None:
        self.layout, self.dot, self.record = layout, dot, record
        self.x = Activations(layout, dot, x)
        self._indices = dot.row_indices(layout, record)

    # -- what the weights are made of ----------------------------------------------------------------------

    def prepare(self, block: Expr) -> None:
        """Before the `steps` of the units of this block."""
        if self._indices:
            self._indices.prepare(block)

    def steps(self, unit: Expr) -> list[Expr]:
        """The unit's codes, straight from the packed bytes."""
        rows = partial(self._indices.of, unit) if self._indices else None
        raw = self.dot.code_steps(self.layout, self.record, bind(self.layout.codes_at(unit)), rows)
        return [self.dot.values(self.layout, step) for step in raw]

    @property
    def by_unit(self) -> bool:
        """Whether `unit_scales` gives all scales of a unit; else `half_scales` does."""
        return self.layout.format.sub_block >= UNIT or self.layout.parts > 1

    def unit_scales(self, unit: Expr) -> list[Expr]:
        """d · sc, and ± m · mn where the format has a minimum; or the d of each half that has its own."""
        layout, lanes = self.layout, self.dot.lanes
        scale = layout.format.scale
        units = layout.units
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
        block = bind(unit // self.layout.units)
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
        return block * self.layout.block_bytes

    def _small(self, unit: Expr, at: int, dtype: str) -> Expr:
        units = self.layout.units
        place = self._record(unit // units) + at + unit % units * self.dot.lanes
        return bind(load_i32(self.record.view(dtype), place, self.dot.lanes))

    def _pair_bytes(self, unit: Expr, at: int, dtype: str) -> Expr:
        units, size = self.layout.units, 2 * self.dot.lanes
        return self.record.view(dtype).load(self._record(unit // units) + at + unit % units * size, size)

    def _float(self, at: Expr, number: Float | None) -> Expr:
        if number is None:
            raise ZllmcError(f"{self.layout.format.name} has no scale")
        return load_scale(self.record, at, self.dot.lanes, number)

    # -- sums ----------------------------------------------------------------------------------------------

    def add_unit(
        self,
        totals: Sequence[Register],
        rows: Sequence[Expr],
        unit: Expr,
        factors: IntegerScales | None = None,
    ) -> None:
        """Add a unit to the totals where `unit_scales` gives all that it needs; `rows` are the word offsets
        of the rows of x. With `factors`, there is one row, whose total lacks their `scale`."""
        layout = self.layout
        parts = layout.parts
        codes, given, x = self.steps(unit), self.unit_scales(unit), self._steps_of(rows, unit)
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

    def _steps_of(self, rows: Sequence[Expr], unit: Expr) -> list[list[Expr]]:
        return [[self.x.step(row, unit, s) for s in range(STEPS)] for row in rows]

    def sub_sums(self, rows: Sequence[Expr], unit: Expr) -> list[Expr]:
        """Σ_sub sc · Σ (q − z) · x of a unit for each row of x; i32 lanes."""
        layout, dot = self.layout, self.dot
        codes, x = self.steps(unit), self._steps_of(rows, unit)
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


def add_block(
    groups: Sequence[BlockSums], totals: Sequence[Sequence[Register]], rows: Sequence[Expr], block: Expr
) -> None:
    """Add a block that has sub-scales, of some groups of weights and rows of x, to totals[group][row]:
    integers within a unit, d and m once."""
    layout, x, lanes = groups[0].layout, groups[0].x, groups[0].dot.lanes

    def zeros() -> list[list[Register]]:
        return [[Register("float32", lanes, const(0, "float32", lanes)) for _ in rows] for _ in groups]

    scaled, minima = zeros(), zeros() if layout.format.minimum else None
    for group in groups:
        group.prepare(block)
    with serial(0, layout.units) as u:
        unit = bind(block * layout.units + u)
        for g, group in enumerate(groups):
            for total, row, sums in zip(scaled[g], rows, group.sub_sums(rows, unit), strict=True):
                total.set(total.get() + cast(sums, "float32") * bind(x.scale(row, unit)))
            if minima:
                minimum = group.sub_minimum(unit)
                for total, row in zip(minima[g], rows, strict=True):
                    total.set(x.plus_minimum(total.get(), minimum, row, unit))
    for g, group in enumerate(groups):
        d = group.block_scale(block)
        for total, part in zip(totals[g], scaled[g], strict=True):
            total.set(total.get() + part.get() * d)
        if minima:
            m = group.block_minimum(block)
            for total, part in zip(totals[g], minima[g], strict=True):
                total.set(total.get() + part.get() * m)
