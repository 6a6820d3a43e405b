"""What a group of packed weight rows adds to the sums of a few rows of x, block by block.

A block's contribution to a row of W and a row of x, with d, m the block's floats, sc, mn its small integers,
q the codes as `Dot.values` gives them, z what they exceed the weight by, and dx the activation's scale:

    Σ over units u of dx[u] · d · Σ_sub sc · (Σ q·x − z·Σx)  ±  m · mn · dx[u] · Σx

`add_units` takes d·sc and m·mn as floats of each unit, which prefill prepares once for many rows;
`add_blocks` multiplies by sc and mn as integers: cheaper for one row, and what sub-blocks of 16 need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zllmc.codegen.dot import Dot, broadcast_pair, broadcast_step, load_i32
from zllmc.codegen.grid_codes import load_scale
from zllmc.codegen.packing import STEPS, UNIT, PackedLayout
from zllmc.codegen.tir import Expr, Memory, Register, bind, broadcast, cast, const, serial
from zllmc.zllm_ir.block_format import Float
from zllmc.zllm_ir.errors import ZllmcError

Vectors = Callable[[Expr], list[Expr]]  # of a unit: its codes as the dot product wants them, or its scales


class BlockSums:
    """One group of `lanes` rows at `record`, against rows of x, which are `a8` rows as i32 words."""

    def __init__(self, layout: PackedLayout, dot: Dot, record: Memory, x: Memory) -> None:
        self.layout, self.dot, self.record = layout, dot, record
        self._scales = record.from_(const(layout.code_bytes, "int64"))
        self._words, self._halves, self._floats = x.view("int32"), x.view("int16"), x.view("float32")
        # Words from the start of a row of x, see `activation_row_bytes`.
        self._scale_at = layout.columns // 4
        self._sum_at = self._scale_at + layout.columns // UNIT
        self._pair_at = self._sum_at + layout.columns // UNIT

    def steps(self, unit: Expr) -> list[Expr]:
        """The unit's codes, straight from the packed bytes."""
        raw = self.dot.code_steps(self.layout, self.record, bind(unit * self.layout.unit_bytes))
        return [self.dot.values(self.layout, step) for step in raw]

    @property
    def parts(self) -> int:
        """Parts of a unit that have a float scale of their own."""
        scale = self.layout.format.scale
        return 2 if scale is not None and scale.count > 1 else 1

    @property
    def by_unit(self) -> bool:
        """Whether `unit_scales` has all scales of a unit, so that `add_units` can do all its work."""
        return self.layout.format.sub_block >= UNIT or self.parts > 1

    @property
    def scale_vectors(self) -> int:
        """How many vectors `unit_scales` gives."""
        if self.parts > 1:
            return self.parts
        return 1 + (self.layout.format.minimum is not None or self.dot.offset(self.layout) != 0)

    def unit_scales(self, unit: Expr) -> list[Expr]:
        """Per row of W, what multiplies the unit's Σ q·x and Σ x as f32: d · sc, and ± m · mn or −z · d · sc.
        The second is absent where the format has neither minimum nor offset. Where each half of a unit has
        its own scale: both scales, for Σ (q − z)·x."""
        layout, lanes = self.layout, self.dot.lanes
        fmt = layout.format
        units = fmt.block // UNIT
        record = bind(unit // units * layout.block_scale_bytes)
        d_at = record + layout.scale_offset
        if fmt.scale is not None and self.parts > 1:
            size = lanes * fmt.scale.nbytes
            first = bind(d_at + unit % units * (self.parts * size))
            return [bind(self._float(first + part * size, fmt.scale)) for part in range(self.parts)]
        inside = record + unit % units * lanes
        d = self._float(d_at, fmt.scale)
        if layout.subs:
            d = d * cast(load_i32(self._scales.view("int8"), inside, lanes), "float32")
        d = bind(d)
        if fmt.minimum:
            m_at = record + layout.minimum_offset
            m = self._float(m_at, fmt.minimum) * const(fmt.min_sign, "float32", lanes)
            if layout.sub_mins:
                m = m * cast(load_i32(self._scales, inside + layout.subs * lanes, lanes), "float32")
            return [d, bind(m)]
        if self.scale_vectors == 1:
            return [d]
        return [d, bind(d * const(-self.dot.offset(layout), "float32", lanes))]

    def add_units(
        self,
        totals: Sequence[Register],
        rows: Sequence[Expr],
        begin: Expr,
        end: Expr,
        steps: Vectors,
        scales: Vectors,
    ) -> None:
        """Add units begin … end − 1 to the totals; `rows` are the word offsets of the rows of x, `scales`
        gives what `unit_scales` does."""
        lanes = self.dot.lanes
        with serial(begin, end) as unit:
            if self.parts > 1:
                self._add_halves(totals, rows, unit, steps(unit), scales(unit))
                return
            d, *m = scales(unit)
            sums = self.dot.dot(self.layout, steps(unit), self._activations(rows, unit), None)
            for total, acc, row in zip(totals, sums, rows, strict=True):
                dx = broadcast(self._floats.load(row + self._scale_at + unit), lanes)
                value = total.get() + cast(acc, "float32") * dx * d
                if m:
                    value = value + m[0] * broadcast(self._floats.load(row + self._sum_at + unit), lanes)
                total.set(value)

    def _add_halves(
        self,
        totals: Sequence[Register],
        rows: Sequence[Expr],
        unit: Expr,
        codes: list[Expr],
        scales: list[Expr],
    ) -> None:
        lanes, offset = self.dot.lanes, self.dot.offset(self.layout)
        x = self._activations(rows, unit)
        half = STEPS // 2
        scaled: list[Expr] = [const(0, "float32", lanes)] * len(rows)
        for part, d in enumerate(scales):
            of = slice(part * half, (part + 1) * half)
            sums = self.dot.dot(self.layout, codes[of], [steps[of] for steps in x], None)
            for i, row in enumerate(rows):
                acc = sums[i]
                if offset:
                    x_sum = self._halves.load((row + self._pair_at + unit) * 2 + part)
                    acc = acc - broadcast(cast(x_sum, "int32") * const(offset, "int32"), lanes)
                scaled[i] = bind(scaled[i] + cast(acc, "float32") * d)
        for i, (total, row) in enumerate(zip(totals, rows, strict=True)):
            total.set(
                total.get() + scaled[i] * broadcast(self._floats.load(row + self._scale_at + unit), lanes)
            )

    def add_blocks(
        self, totals: Sequence[Register], rows: Sequence[Expr], begin: Expr, end: Expr, steps: Vectors
    ) -> None:
        """Add blocks begin … end − 1 to the totals: integers within a unit, d and m once a block."""
        with serial(begin, end) as block:
            record = bind(block * self.layout.block_scale_bytes)
            self._add_block(totals, rows, block, record, steps)

    def _activations(self, rows: Sequence[Expr], unit: Expr) -> list[list[Expr]]:
        first = bind(unit * STEPS)
        return [
            [broadcast_step(self._words, row + first + s, self.dot.lanes) for s in range(STEPS)]
            for row in rows
        ]

    def _add_block(
        self,
        totals: Sequence[Register],
        rows: Sequence[Expr],
        block: Expr,
        record: Expr,
        steps: Vectors,
    ) -> None:
        fmt, lanes = self.layout.format, self.dot.lanes
        zero = const(0, "float32", lanes)
        scaled = [Register("float32", lanes, zero) for _ in rows]
        minima = [Register("float32", lanes, zero) for _ in rows] if fmt.minimum else []
        with serial(0, fmt.block // UNIT) as u:
            unit = bind(block * (fmt.block // UNIT) + u)
            sums, mins = self._unit(steps, rows, record, unit, u)
            for i, row in enumerate(rows):
                dx = bind(broadcast(self._floats.load(row + self._scale_at + unit), lanes))
                scaled[i].set(scaled[i].get() + cast(sums[i], "float32") * dx)
                if mins:
                    minima[i].set(minima[i].get() + cast(mins[i], "float32") * dx)
        d = bind(self._float(record + self.layout.scale_offset, fmt.scale))
        for total, part in zip(totals, scaled, strict=True):
            total.set(total.get() + part.get() * d)
        if minima:
            m_at = record + self.layout.minimum_offset
            m = bind(self._float(m_at, fmt.minimum) * const(fmt.min_sign, "float32", lanes))
            for total, part in zip(totals, minima, strict=True):
                total.set(total.get() + part.get() * m)

    def _float(self, at: Expr, number: Float | None) -> Expr:
        if number is None:
            raise ZllmcError(f"{self.layout.format.name} has no scale")
        return load_scale(self._scales, at, self.dot.lanes, number)

    def _unit(
        self, steps: Vectors, rows: Sequence[Expr], record: Expr, unit: Expr, unit_in_block: Expr
    ) -> tuple[list[Expr], list[Expr]]:
        """Of 32 columns, per row of x: Σ_sub sc · Σ (q − z) · x, and Σ_sub mn · Σ x; i32 lanes."""
        layout, dot, lanes = self.layout, self.dot, self.dot.lanes
        fmt = layout.format
        codes = steps(unit)
        x = self._activations(rows, unit)
        offset = dot.offset(layout)
        pairs: list[Expr] = []  # Σx of both halves of the unit
        if offset or fmt.sub_mins:
            pairs = [bind(broadcast_pair(self._words, row + self._pair_at + unit, lanes)) for row in rows]

        signed = self._scales.view("int8")
        if fmt.sub_block == UNIT:
            sc = bind(load_i32(signed, record + unit_in_block * lanes, lanes))
            sums = dot.dot(layout, codes, x, dot.scale_vector(sc))
            paired = dot.twice(sc) if offset else None
        else:
            at = record + unit_in_block * (2 * lanes)
            paired = bind(cast(signed.load(at, 2 * lanes), "int16"))
            half = STEPS // 2
            low = dot.dot(layout, codes[:half], [r[:half] for r in x], dot.scale_vector(paired, 0))
            high = dot.dot(layout, codes[half:], [r[half:] for r in x], dot.scale_vector(paired, 1))
            sums = [bind(a + b) for a, b in zip(low, high, strict=True)]
        if offset:
            by = const(offset, "int32", lanes)
            sums = [bind(s - dot.pair_sum(paired, p) * by) for s, p in zip(sums, pairs, strict=True)]

        if not layout.sub_mins:
            return sums, []
        mins_at = record + layout.subs * lanes
        if fmt.sub_block == UNIT:
            mn = bind(dot.twice(load_i32(self._scales, mins_at + unit_in_block * lanes, lanes)))
        else:
            mn = bind(cast(self._scales.load(mins_at + unit_in_block * (2 * lanes), 2 * lanes), "int16"))
        return sums, [bind(dot.pair_sum(mn, p)) for p in pairs]
