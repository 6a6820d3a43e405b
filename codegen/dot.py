"""Integer dot products on each CPU's own instructions, for rows interleaved by `codegen.packing`.

A vector holds `lanes` rows × 4 columns of int8. What differs between machines is how four products become one
i32 lane: AVX2 has pairs of u8·i8 that saturate in i16, VNNI quads of u8·i8, Arm quads of i8·i8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

from zllmc.codegen.grid_codes import RowIndices, bit_field, grid_steps
from zllmc.codegen.packing import STEPS, PackedLayout
from zllmc.codegen.tir import Expr, Memory, bind, bits, broadcast, cast, const, llvm
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.block_format import Field, Grid
from zllmc.zllm_ir.fused_ops import LIMITED_PAIR

LARGEST_PAIR = 2 * 127  # of two activations that are not limited


class Dot:
    """The instructions of `target`, and how codes must be represented for them. `exact`: `values` are the
    weights' integers, whatever that costs."""

    def __init__(self, target: VectorTarget, *, exact: bool = False) -> None:
        self._exact = exact
        self.kind = "sdot" if target.dot == "dot4" else target.dot
        self._gpu = target.dot == "dot4"  # the same products, as functions of the prelude
        self.lanes, self.registers = target.lanes, target.registers
        self._signed = exact or self.kind == "sdot"  # `values` are i8
        self._wide = target.lanes == 16  # AVX-512 names its instructions differently

    # -- codes ---------------------------------------------------------------------------------------------

    def code_steps(
        self,
        layout: PackedLayout,
        codes: Memory,
        at: Expr,
        rows: Callable[[int], Sequence[Expr]] | None = None,
    ) -> list[Expr]:
        """The unit's 8 vectors of codes, as u8 bits, from its bytes at `at`; the weights' integers are these
        less the codes' `zero`, which a grid with signs and a table have none of. `rows`: see `grid_steps`."""
        if isinstance(layout.codes, Grid):
            return grid_steps(layout, layout.codes, codes, at, rows)
        steps: list[Expr] = [None] * STEPS
        below = 0  # bits of the planes so far
        for plane in layout.plane_bits:
            size = 4 * self.lanes
            run = min(layout.run, plane)
            vectors = [
                vector
                for v in range(0, plane, run)
                for vector in self._vectors(codes, at + (below + v) * size, run)
            ]
            for step in range(STEPS):
                part = bit_field(vectors[step % plane], step // plane * plane, plane, below)
                steps[step] = part if steps[step] is None else steps[step] | part
            below += plane
        if isinstance(layout.codes, Field) and layout.codes.table is not None:
            return [self._lookup(layout.codes.table, step) for step in steps]
        return steps

    def _vectors(self, codes: Memory, at: Expr, run: int) -> list[Expr]:
        """`run` vectors of codes, whose bytes of one row lie side by side."""
        size = 4 * self.lanes
        loaded = bind(codes.load(at, run * size))
        if run == 1:
            return [loaded]
        words = bits(loaded, f"uint32x{run * self.lanes}")
        return [
            bind(bits(T.Shuffle([words], [*range(i, run * self.lanes, run)]), f"uint8x{size}"))
            for i in range(run)
        ]

    def row_indices(self, layout: PackedLayout, codes: Memory) -> RowIndices | None:
        """Of a grid's codes, where a processor has no fast loads from a vector of addresses."""
        if self._gpu or not isinstance(layout.codes, Grid):
            return None
        return RowIndices(layout, layout.codes, codes)

    def values(self, layout: PackedLayout, step: Expr) -> Expr:
        """A step's codes as the dot product wants them; see `offset` for what they exceed the weights by."""
        size = 4 * self.lanes
        if self._signed:
            values = bits(step, f"int8x{size}")
            return values if self.offset(layout) else values - const(layout.codes.zero, "int8", size)
        return step + const(lift, "uint8", size) if (lift := self._lift(layout)) else step

    def _lift(self, layout: PackedLayout) -> int:
        """What is added to signed codes where only u8 can be multiplied with the activations."""
        return layout.codes.largest if not self._signed and layout.format.signed else 0

    def offset(self, layout: PackedLayout) -> int:
        """`values` minus the weight's integer: a constant that the sums of activations take out again."""
        if self._signed:
            # On a GPU, taking bytes apart to subtract costs more than the sums do.
            unsigned = self._gpu and not self._exact and not layout.format.signed
            return layout.codes.zero if unsigned else 0
        return self._lift(layout) or layout.codes.zero

    def largest(self, layout: PackedLayout) -> int:
        """At most, of `values` where these are u8."""
        return min(255, layout.codes.largest + self._lift(layout))

    def _lookup(self, table: Sequence[int], index: Expr) -> Expr:
        size = 4 * self.lanes
        packed = bytes(v & 0xFF for v in table)
        if self._gpu:
            words = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, 16, 4)]
            entries = [const(word, "uint32") for word in words]
            return T.call_pure_extern(f"uint8x{size}", "lookup16", index, *entries)
        if self.kind == "sdot":
            entries = self._repeat(packed, 16)
            return llvm("llvm.aarch64.neon.tbl1.v16i8", "uint8x16", bits(entries, "uint8x16"), index)
        name = "llvm.x86.avx512.pshuf.b.512" if self._wide else "llvm.x86.avx2.pshuf.b"
        return llvm(name, f"uint8x{size}", bits(self._repeat(packed, size), f"uint8x{size}"), index)

    def _repeat(self, sixteen: bytes, size: int) -> Expr:
        """16 constant bytes, repeated to `size` of them, as a vector of i64."""
        halves = [int.from_bytes(sixteen[i : i + 8], "little", signed=True) for i in (0, 8)]
        words = size // 8
        return T.Shuffle([const(halves[i % 2], "int64") for i in range(words)], list(range(words)))

    # -- products ------------------------------------------------------------------------------------------

    def dot(
        self, layout: PackedLayout, steps: Sequence[Expr], x: Sequence[Sequence[Expr]], scale: Expr | None
    ) -> list[Expr]:
        """Σ over `steps` of values · x, for each row of x; times `scale` (see `scale_vector`) → i32 lanes.

        `steps` are `values`, `x[row][step]` broadcast activations (i8).
        """
        if self.kind == "maddubs":
            return self._dot_maddubs(layout, steps, x, scale)
        sums = []
        for row in x:
            total = const(0, "int32", self.lanes)
            for w, activation in zip(steps, row, strict=True):
                total = self._dot_quad(total, w, activation)
            sums.append(bind(total if scale is None else total * scale))
        return sums

    def _dot_quad(self, total: Expr, w: Expr, x: Expr) -> Expr:
        dtype = f"int32x{self.lanes}"
        if self._gpu:
            return T.call_pure_extern(dtype, "dot4", bits(w, dtype), bits(x, dtype), total)
        if self.kind == "sdot":
            return llvm("llvm.aarch64.neon.sdot.v4i32.v16i8", dtype, total, w, x)
        width = 32 * self.lanes
        return llvm(f"llvm.x86.avx512.vpdpbusd.{width}", dtype, total, w, x)

    def _dot_maddubs(
        self, layout: PackedLayout, steps: Sequence[Expr], x: Sequence[Sequence[Expr]], scale: Expr | None
    ) -> list[Expr]:
        """Pairs are summed in i16 for as many steps as cannot overflow, then widened with the scale."""
        pair = LIMITED_PAIR if layout.format.wide else LARGEST_PAIR
        limit = 32767 // (pair * self.largest(layout))
        sums: list[Any] = [None] * len(x)
        for start in range(0, len(steps), limit):
            narrow: list[Any] = [None] * len(x)
            for s in range(start, min(start + limit, len(steps))):
                w = bind(steps[s])
                for row in range(len(x)):
                    narrow[row] = bind(self.plus_products(narrow[row], w, x[row][s]))
            for row in range(len(x)):
                wide = self.widened(narrow[row], scale)
                sums[row] = bind(wide if sums[row] is None else sums[row] + wide)
        return sums

    # Step by step, for sums that outlive one unit's steps: i16 lanes with maddubs, else i32.

    def plus_products(self, total: Expr | None, w: Expr, x: Expr) -> Expr:
        """total (None is zero) + a step's products of `values` and activations."""
        if self.kind != "maddubs":
            return self._dot_quad(const(0, "int32", self.lanes) if total is None else total, w, x)
        pairs = llvm("llvm.x86.avx2.pmadd.ub.sw", f"int16x{2 * self.lanes}", w, x)
        return pairs if total is None else total + pairs

    def widened(self, total: Expr, scale: Expr | None) -> Expr:
        """Such a total as i32 lanes, times `scale`."""
        if self.kind == "maddubs":
            return self.pair_sum(total, const(1, "int16", 2 * self.lanes) if scale is None else scale)
        return total if scale is None else total * scale

    def pair_sum(self, a: Expr, b: Expr) -> Expr:
        """i16 pairs: a₀·b₀ + a₁·b₁ → i32 lanes."""
        dtype = f"int32x{self.lanes}"
        if self.kind == "sdot":
            a, b = bits(a, dtype), bits(b, dtype)
            half = const(16, "int32", self.lanes)
            return ((a << half) >> half) * ((b << half) >> half) + (a >> half) * (b >> half)
        name = "llvm.x86.avx512.pmaddw.d.512" if self._wide else "llvm.x86.avx2.pmadd.wd"
        return llvm(name, dtype, a, b)

    def plus_pair_sum(self, total: Expr, a: Expr, b: Expr) -> Expr:
        """total + `pair_sum`, i32 lanes."""
        if self.kind != "vnni":
            return total + self.pair_sum(a, b)
        dtype = f"int32x{self.lanes}"
        return llvm(f"llvm.x86.avx512.vpdpwssd.{32 * self.lanes}", dtype, total, a, b)

    # -- scales --------------------------------------------------------------------------------------------

    def twice(self, value: Expr, part: int | None = None) -> Expr:
        """i16 pairs with equal members: an i32 lane's value (part None), or one member of its pair."""
        dtype, pairs = f"int32x{self.lanes}", f"int16x{2 * self.lanes}"
        if self.kind == "sdot":
            half = const(16, "int32", self.lanes)
            low = const(0xFFFF, "int32", self.lanes)
            value = bits(value, dtype)
            kept = (value >> half) & low if part == 1 else value & low
            return bits(kept | (kept << half), pairs)
        size = 4 * self.lanes
        # pshufb picks within 16 bytes by the low 4 bits of each index, so the ramp may run past 16.
        first = 0x03020302 if part == 1 else 0x01000100
        index = bits(T.ramp(const(first, "int32"), const(0x04040404, "int32"), self.lanes), f"uint8x{size}")
        name = "llvm.x86.avx512.pshuf.b.512" if self._wide else "llvm.x86.avx2.pshuf.b"
        return bits(llvm(name, f"uint8x{size}", bits(value, f"uint8x{size}"), index), pairs)

    def scale_vector(self, value: Expr, part: int | None = None) -> Expr:
        """A sub-scale (i32 lanes, or one member of i16 pairs) as `dot` takes it."""
        if self.kind == "maddubs":
            return bind(self.twice(value, part))
        if part is None:
            return bind(value)
        half = const(16, "int32", self.lanes)
        value = bits(value, f"int32x{self.lanes}")
        return bind(value >> half if part else (value << half) >> half)


def broadcast_step(x: Memory, at: Expr, lanes: int) -> Expr:
    """Four consecutive activations (one i32 at index `at`) in every lane, as i8."""
    return bits(broadcast(x.load(at), lanes), f"int8x{4 * lanes}")


def broadcast_pair(x: Memory, at: Expr, lanes: int) -> Expr:
    """Two i16 (one i32 at index `at`) in every lane."""
    return bits(broadcast(x.load(at), lanes), f"int16x{2 * lanes}")


def load_i32(memory: Memory, at: Expr, lanes: int) -> Expr:
    """`lanes` bytes widened to i32."""
    return cast(memory.load(at, lanes), "int32")
