"""Quantized activations (`a8`): how one group of 32 is written, and the kernel that only quantizes.

The row's layout is `kernel_graph.activation_row_bytes`: codes, scales, scale · Σcodes, Σcodes of each 16. The
sums let a dot product take out a weight's zero point without touching the codes again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tvm import tirx

from zllmc.codegen.rows import for_blocks, row_count, signature, tensors
from zllmc.codegen.tir import Expr, Kernel, Memory, bind, bits, broadcast, cast, const, lanes_of, llvm
from zllmc.codegen.vector_math import absolute, typed
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.fused_ops import GROUP, LIMITED_FOUR
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, activation_row_bytes

_NEGLIGIBLE = 1e-36  # a smaller peak counts as 0: 127 / peak must not overflow


class ActivationRows:
    """The rows of an `a8` or `a8_limited` value in memory, written group by group."""

    def __init__(self, memory: Memory, operand: Operand) -> None:
        self._width = width = operand.width
        self._limited = operand.type.dtype == "a8_limited"
        self._codes = memory
        self._scales = memory.view("float32")
        self._sums = memory.view("int16")
        self._row_bytes = activation_row_bytes(width)

    def write(self, row: Expr, column: Expr, values: Sequence[Expr]) -> None:
        """Quantizes one group as `fused_ops.quantize` does: the 32 elements from `column` of `row`, given as
        f32 vectors in order."""
        values = [bind(v) for v in values]
        peak = max_magnitude([*values, *_limits(values)] if self._limited else values)
        limit = const(127.0, "float32")
        usable = peak > const(_NEGLIGIBLE, "float32")
        inverse = bind(tirx.Select(usable, limit / peak, const(0.0, "float32")))
        scale = bind(peak / limit)
        codes = [bind(round_to_int(v * broadcast(inverse, lanes_of(v)))) for v in values]

        groups = self._width // GROUP
        group = bind(tirx.truncdiv(column, GROUP))
        code_index = row * self._row_bytes + column
        scale_index = row * (self._row_bytes // 4) + self._width // 4 + group
        sum_index = row * (self._row_bytes // 2) + (self._width + 2 * 4 * groups) // 2 + 2 * group
        for i, c in enumerate(codes):
            self._codes.store(code_index + i * lanes_of(c), cast(c, "int8"))
        if len(codes) == 1:  # all in one vector
            middle = lanes_of(codes[0]) // 2
            codes = [tirx.Shuffle(codes, [*range(start, start + middle)]) for start in (0, middle)]
        halves = [bind(_sum(codes[: len(codes) // 2])), bind(_sum(codes[len(codes) // 2 :]))]
        self._scales.store(scale_index, scale)
        self._scales.store(scale_index + groups, scale * cast(halves[0] + halves[1], "float32"))
        for i, half in enumerate(halves):
            self._sums.store(sum_index + i, cast(half, "int16"))


def _limits(values: Sequence[Expr]) -> list[Expr]:
    """What bounds the scale of `a8_limited` beside the magnitudes, see `fused_ops.quantize`."""
    limits = []
    for value in values:
        if lanes_of(value) % 8:
            raise IRError(f"no kernel gives a8_limited from vectors of {lanes_of(value)}")
        neighbour = bind(_lanes_xor(value, 1))
        limits.append(value + neighbour)
        two = bind(absolute(value) + absolute(neighbour))
        four = two + _lanes_xor(two, 4)
        limits.append(four * const(127 / (LIMITED_FOUR - 2), "float32", lanes_of(value)))
    return limits


def _lanes_xor(value: Expr, by: int) -> Expr:
    return tirx.Shuffle([value], [i ^ by for i in range(lanes_of(value))])


def max_magnitude(values: Sequence[Expr]) -> Expr:
    """max |x| over all elements of f32 vectors of any widths: the bits of magnitudes order like integers."""
    by_lanes: dict[int, Expr] = {}
    for value in values:
        lanes = lanes_of(value)
        magnitude = bits(absolute(value), typed("int32", lanes))
        by_lanes[lanes] = tirx.max(by_lanes[lanes], magnitude) if lanes in by_lanes else magnitude
    peaks = [m if n == 1 else llvm("llvm.vector.reduce.smax", "int32", m) for n, m in by_lanes.items()]
    return bind(bits(functools.reduce(tirx.max, peaks), "float32"))


def round_to_int(x: Expr) -> Expr:
    """The nearest i32, ties to even."""
    return llvm("llvm.lrint", typed("int32", lanes_of(x)), x)


def _sum(codes: Sequence[Expr]) -> Expr:
    return llvm("llvm.vector.reduce.add", "int32", functools.reduce(lambda a, b: a + b, codes))


def quantize(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """f32 (T, D) → a8 or a8_limited."""
    (x_type,) = tensors(call)
    with Kernel(name, **signature(call)) as k:
        control, x, y = k.arguments
        out = ActivationRows(y, call.results[0])

        def block(row: Expr, column: Expr, vectors: list[tuple[int, int]]) -> None:
            start = bind(row * x_type.stride + column)
            out.write(row, column, [x.load(start + offset, n) for offset, n in vectors])

        for_blocks(k, row_count(x_type, control), x_type.width, target.lanes, block)
    return k.function
