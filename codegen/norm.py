"""Norm kernels: a row's statistics, then its elements.

Threads share rows. The single row of a decode step is shared by elements instead: every thread sums the whole
row, which costs less than meeting for it. On a GPU the units of a block do meet: they share a row's sums, so
that more loads are in flight.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from zllmc.codegen.quantize import ActivationRows
from zllmc.codegen.rows import for_pieces, pieces, row_count, share, signature, tensors
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    Register,
    barrier,
    bind,
    block_array,
    broadcast,
    const,
    llvm,
    serial,
    when,
)
from zllmc.codegen.vector_math import fma, sum_lanes
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.fused_ops import GROUP
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand

_ACCUMULATORS = 4


@dataclass(frozen=True)
class Team:
    """The units of a GPU's block, which take parts of a row and meet over `sums`."""

    units: int
    unit: Expr
    sums: Memory

    @classmethod
    def of(cls, k: Kernel, units: int) -> Team | None:
        """None where a unit has its rows to itself."""
        if units == 1:
            return None
        return cls(units, bind(tirx.truncmod(k.thread, units)), block_array("float32", units))

    def reduce(self, width: int, lanes: int, add: Callable[[Expr, Expr, int], Expr]) -> Expr:
        """`reduce_row`, the same in all units."""
        total = Register("float32", lanes, const(0.0, "float32", lanes))
        full, rest = divmod(width // lanes, self.units)

        def step(vector: Expr) -> None:
            total.set(add(total.get(), bind(vector * lanes), lanes))

        with serial(0, full) as round:
            step(round * self.units + self.unit)
        if rest:
            with when(self.unit < rest):
                step(full * self.units + self.unit)
        tail = Register("float32", 1, sum_lanes(total.get()))
        if width % lanes:
            with when(tirx.EQ(self.unit, self.units - 1)):  # which has the least to do
                for offset, n in pieces(width % lanes, lanes):
                    last = add(const(0.0, "float32", n), const(width - width % lanes + offset, "int32"), n)
                    tail.set(tail.get() + sum_lanes(last))
        barrier()  # all have read what was met over before
        self.sums.store(self.unit, tail.get())
        barrier()
        return bind(functools.reduce(operator.add, [self.sums.load(i) for i in range(self.units)]))


def reduce_row(
    width: int, lanes: int, add: Callable[[Expr, Expr, int], Expr], team: Team | None = None
) -> Expr:
    """Σ over a row: `add(sum, offset, lanes)` gives the vector sum plus its term at `offset`."""
    if team is not None:
        return team.reduce(width, lanes, add)
    sums = [Register("float32", lanes, const(0.0, "float32", lanes)) for _ in range(_ACCUMULATORS)]
    tail = Register("float32", 1, const(0.0, "float32"))

    def step(offset: Expr, n: int, i: int) -> None:
        if n == lanes:
            sums[i].set(add(sums[i].get(), offset, n))
        else:  # at most one vector of each smaller width
            tail.set(tail.get() + sum_lanes(add(const(0.0, "float32", n), offset, n)))

    for_pieces(width, lanes, _ACCUMULATORS, step)
    a, b, c, d = (s.get() for s in sums)
    return bind(sum_lanes((a + b) + (c + d)) + tail.get())


def inverse_rms(x: Memory, start: Expr, width: int, lanes: int, eps: float, team: Team | None = None) -> Expr:
    """1 / sqrt(mean(x²) + eps) of the `width` elements from `start`."""

    def add(total: Expr, offset: Expr, n: int) -> Expr:
        value = bind(x.load(start + offset, n))
        return fma(value, value, total)

    return _inverse_root(reduce_row(width, lanes, add, team), width, eps)


def _inverse_root(squares: Expr, width: int, eps: float) -> Expr:
    mean = squares * const(1.0 / width, "float32") + const(eps, "float32")
    return bind(const(1.0, "float32") / llvm("llvm.sqrt", "float32", mean))


class _Rows:
    """The rows that a norm normalises one by one: tokens, or the heads within each token."""

    def __init__(self, x: Operand, weights: Sequence[Operand], target: VectorTarget) -> None:
        self.width = int(x.type.shape[-1])
        self.heads = x.width // self.width
        self.lanes, self._units = target.lanes, target.units
        self.team: Team | None = None
        self.blocks = -(-self.width // GROUP)
        self._x = x
        axes = {len(w.type.shape) for w in weights}
        if max(axes, default=1) > 2:
            raise IRError(f"no kernel norms {x.type} with a weight of {max(axes)} axes")
        self._gain_per_head = 2 in axes

    def each(self, k: Kernel, control: Memory, body: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """body(token, head, first block, last block): this thread's rows, or its blocks of the only one. What
        it has of rows that its block's units share."""
        tokens = row_count(self._x, control)
        self.team = Team.of(k, self._units)
        if self.heads == 1 and isinstance(tokens, int) and tokens == 1:
            body(0, 0, *share(k, self.blocks))
            return
        if self.team is not None:
            unit, units = self.team.unit, self._units
            block, blocks = bind(tirx.truncdiv(k.thread, units)), tirx.truncdiv(k.threads, units)
            begin, end = (bind(tirx.truncdiv((unit + i) * self.blocks, units)) for i in (0, 1))
            with serial(0, tirx.truncdiv(tokens - 1 - block + blocks, blocks)) as round:
                body(bind(block + round * blocks), 0, begin, end)
            return
        begin, end = share(k, tokens * self.heads)
        with serial(begin, end) as unit:
            token = bind(tirx.truncdiv(unit, self.heads))
            body(token, bind(unit - token * self.heads), 0, self.blocks)

    def start(self, operand: Operand, token: Expr, head: Expr) -> Expr:
        return bind(token * operand.stride + head * self.width)

    def weight_start(self, head: Expr) -> Expr:
        return head * self.width if self._gain_per_head else 0

    def blockwise(self, begin: Expr, end: Expr, body: Callable[[Expr, int], None]) -> None:
        """body(offset, lanes) for every vector of blocks begin … end−1; the last block may be a short one."""
        full = self.width // GROUP
        with serial(begin, tirx.min(end, full) if self.width % GROUP else end) as block:
            for offset, n in pieces(GROUP, self.lanes):
                body(block * GROUP + offset, n)
        if self.width % GROUP:
            with serial(tirx.max(begin, full), end):
                for offset, n in pieces(self.width % GROUP, self.lanes):
                    body(full * GROUP + offset, n)


def rms_norm(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """f32 (T, D) or (T, heads, E) → the same, normalised along the last axis."""
    x_type, *weight_types = tensors(call)
    (y_type,) = call.results
    eps = call.attributes["eps"]
    rows = _Rows(x_type, weight_types, target)
    with Kernel(name, **signature(call)) as k:
        control, x, *weight, y = k.arguments

        def one(token: Expr, head: Expr, begin: Expr, end: Expr) -> None:
            source, sink = rows.start(x_type, token, head), rows.start(y_type, token, head)
            inverse = inverse_rms(x, source, rows.width, target.lanes, eps, rows.team)

            def write(offset: Expr, n: int) -> None:
                value = x.load(source + offset, n) * broadcast(inverse, n)
                if weight:
                    value = value * weight[0].load(rows.weight_start(head) + offset, n)
                y.store(sink + offset, value)

            rows.blockwise(begin, end, write)

        rows.each(k, control, one)
    return k.function


def norm_add(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """residual + rms_norm(y, weight), f32 (T, D)."""
    y_type, residual_type, *weight_types = tensors(call)
    (out_type,) = call.results
    eps = call.attributes["eps"]
    rows = _Rows(y_type, weight_types, target)
    with Kernel(name, **signature(call)) as k:
        control, y, residual, *weight, out = k.arguments

        def one(token: Expr, head: Expr, begin: Expr, end: Expr) -> None:
            source, base, sink = (rows.start(o, token, head) for o in (y_type, residual_type, out_type))
            inverse = inverse_rms(y, source, rows.width, target.lanes, eps, rows.team)

            def write(offset: Expr, n: int) -> None:
                gain = broadcast(inverse, n)
                if weight:
                    gain = gain * weight[0].load(rows.weight_start(head) + offset, n)
                out.store(
                    sink + offset, fma(y.load(source + offset, n), gain, residual.load(base + offset, n))
                )

            rows.blockwise(begin, end, write)

        rows.each(k, control, one)
    return k.function


def rms_norm_quantize(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """f32 (T, D) → a8 of rms_norm(x, weight)."""
    x_type, *weight_types = tensors(call)
    eps = call.attributes["eps"]
    rows = _Rows(x_type, weight_types, target)
    if rows.heads != 1 or rows.width % GROUP:
        raise IRError(f"rms_norm_quantize: no kernel for {x_type.type}")
    with Kernel(name, **signature(call)) as k:
        control, x, *weight, y = k.arguments
        out = ActivationRows(y, call.results[0])

        def one(token: Expr, head: Expr, begin: Expr, end: Expr) -> None:
            source = rows.start(x_type, token, head)
            inverse = inverse_rms(x, source, rows.width, target.lanes, eps, rows.team)
            with serial(begin, end) as group:
                column = bind(group * GROUP)
                values = []
                for offset, n in pieces(GROUP, target.lanes):
                    value = x.load(source + column + offset, n) * broadcast(inverse, n)
                    values.append(value * weight[0].load(column + offset, n) if weight else value)
                out.write(token, column, values)

        rows.each(k, control, one)
    return k.function


def layer_norm(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """f32 (T, D) → (x − mean) / sqrt(var + eps) · weight + bias."""
    x_type, *weight_types = tensors(call)
    (y_type,) = call.results
    eps = call.attributes["eps"]
    rows = _Rows(x_type, weight_types, target)
    with Kernel(name, **signature(call)) as k:
        control, x, weight, *bias, y = k.arguments

        def one(token: Expr, head: Expr, begin: Expr, end: Expr) -> None:
            source, sink = rows.start(x_type, token, head), rows.start(y_type, token, head)

            def load(offset: Expr, n: int) -> Expr:
                return x.load(source + offset, n)

            total = reduce_row(rows.width, target.lanes, lambda s, offset, n: s + load(offset, n), rows.team)
            mean = bind(total * const(1.0 / rows.width, "float32"))

            def add_square(s: Expr, offset: Expr, n: int) -> Expr:
                centred = bind(load(offset, n) - broadcast(mean, n))
                return fma(centred, centred, s)

            # A second pass over the row: E[x²] − mean² would cancel where the mean is large.
            squares = reduce_row(rows.width, target.lanes, add_square, rows.team)
            inverse = _inverse_root(squares, rows.width, eps)

            def write(offset: Expr, n: int) -> None:
                at = rows.weight_start(head) + offset
                value = (load(offset, n) - broadcast(mean, n)) * broadcast(inverse, n) * weight.load(at, n)
                y.store(sink + offset, value + bias[0].load(at, n) if bias else value)

            rows.blockwise(begin, end, write)

        rows.each(k, control, one)
    return k.function
