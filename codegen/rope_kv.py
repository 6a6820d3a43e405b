"""Rotary position embedding and the KV cache's write side.

A unit of work is one head of one token: of the queries, the keys or the values. So one token's heads are
shared by the threads as well as many tokens' are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.norm import inverse_rms
from zllmc.codegen.quantize import max_magnitude, round_to_int
from zllmc.codegen.rows import for_blocks, for_pieces, pieces, row_count, share, signature, tensors
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    bind,
    broadcast,
    cast,
    choose,
    const,
    lanes_of,
    local,
    serial,
)
from zllmc.codegen.vector_math import fma, sin_cos, sin_cos_turns
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, QUAD, KernelCall, KVOperand, Operand
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.plan import CONTROL_CACHED
from zllmc.zllm_ir.rope import rope_frequencies

_SCALE_GROUP = 64  # elements of a q8 key or value that share a scale


def rope_table(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """cos and sin f32 (T, dims/2) at i32 positions (T,). Angles are reduced in float64, or in two float32
    where there is none."""
    attrs = OPS[call.op].bind_attrs(call.attributes)
    half = attrs["dims"] // 2
    # Factors divide θ, and every frequency is linear in θ: they can divide at run time what is made without.
    frequencies, magnitude = rope_frequencies(None, **attrs)
    double = target.float64
    with Kernel(name, **signature(call)) as k:
        control, positions, *factors, cos, sin = k.arguments
        if double:
            tables = [_constants(frequencies)]
        else:
            turns = frequencies / (2 * np.pi)
            high = turns.astype(np.float32)
            tables = [_constants(high), _constants((turns - high).astype(np.float32))]

        def block(row: Expr, column: Expr, vectors: list[tuple[int, int]]) -> None:
            position = bind(cast(positions.load(row), "float64" if double else "float32"))
            for offset, n in vectors:
                rate = [bind(table.load(column + offset, n)) for table in tables]
                factor = factors[0].load(column + offset, n) if factors else None
                of = sin_cos_of if double else sin_cos_of_turns
                for memory, operand, value in zip(
                    (cos, sin), call.results, reversed(of(broadcast(position, n), rate, factor)), strict=True
                ):
                    scaled = value * const(magnitude, "float64" if double else "float32", n)
                    memory.store(row * operand.stride + column + offset, cast(scaled, "float32"))

        lanes = target.lanes // 2 if double else target.lanes
        for_blocks(k, row_count(tensors(call)[0], control), half, lanes, block)
    return k.function


def sin_cos_of(position: Expr, rate: list[Expr], factor: Expr | None) -> tuple[Expr, Expr]:
    """sin and cos of position · rate (/ factor), f64."""
    (frequency,) = rate
    if factor is not None:
        frequency = frequency / cast(factor, "float64")
    return sin_cos(bind(position * frequency))


def sin_cos_of_turns(position: Expr, rate: list[Expr], factor: Expr | None) -> tuple[Expr, Expr]:
    """The same in f32, with the rate in turns per position as the sum of two f32.

    fma gives the rounding errors of the quotient and the product, so the fraction of a turn is right to
    2⁻²⁴ for positions below 2²⁴.
    """
    high, low = rate
    if factor is not None:
        quotient = bind(high / factor)
        low = bind((fma(const(0.0, "float32", lanes_of(high)) - quotient, factor, high) + low) / factor)
        high = quotient
    turns = bind(position * high)
    error = fma(position, high, const(0.0, "float32", lanes_of(high)) - turns)
    return sin_cos_turns(turns, bind(fma(position, low, error)))


def _constants(values: np.ndarray[Any, Any]) -> Memory:
    """A table on the stack: cheaper to fill than to find a place for in the calling convention."""
    table = local(str(values.dtype), len(values))
    for i, value in enumerate(values):
        table.store(i, const(float(value), str(values.dtype)))
    return table


@dataclass(frozen=True)
class _Rotation:
    """What happens to one head of queries or keys: an optional norm, then an optional rotation."""

    head_dim: int
    lanes: int
    style: str
    cos: Memory | None
    sin: Memory | None
    stride: int  # of the tables
    half: int  # pairs that turn; elements past 2 · half are kept
    eps: float

    def apply(
        self,
        x: Memory,
        start: Expr,
        gain: Memory | None,
        gain_start: Expr,
        token: Expr,
        y: Memory,
        sink: Expr,
    ) -> None:
        """y[sink …] = the head x[start …] of `token`."""
        inverse = None if gain is None else inverse_rms(x, start, self.head_dim, self.lanes, self.eps)
        angle = bind(token * self.stride)

        def load(index: Expr, n: int) -> Expr:
            value = x.load(start + index, n)
            if gain is None:
                return value
            return value * broadcast(inverse, n) * gain.load(gain_start + index, n)

        def turn(first: Expr, second: Expr, pair: Expr, n: int) -> None:
            a, b = bind(load(first, n)), bind(load(second, n))
            c, s = (bind(m.load(angle + pair, n)) for m in (self.cos, self.sin) if m is not None)
            y.store(sink + first, a * c - b * s)
            y.store(sink + second, fma(a, s, b * c))

        def neox(offset: Expr, n: int, _i: int) -> None:
            turn(offset, self.half + offset, offset, n)

        def adjacent(offset: Expr, n: int, _i: int) -> None:
            """Vectors of whole pairs: x · (c₀ c₀ c₁ c₁ …) + swapped x · (−s₀ s₀ −s₁ s₁ …)."""
            pair = tirx.truncdiv(offset, 2)
            if n == 2:
                turn(offset, offset + 1, pair, 1)
                return
            value = bind(load(offset, n))
            c, s = (bind(m.load(angle + pair, n // 2)) for m in (self.cos, self.sin) if m is not None)
            signed = _interleave(s, s) * _interleave(
                const(-1.0, "float32", n // 2), const(1.0, "float32", n // 2)
            )
            swapped = tirx.Shuffle([value], [i ^ 1 for i in range(n)])
            y.store(sink + offset, fma(value, _interleave(c, c), swapped * signed))

        if self.half:
            pairwise = self.style == "norm"
            for_pieces(self.half * (1 + pairwise), self.lanes, 2, adjacent if pairwise else neox)
        kept = 2 * self.half
        for_pieces(
            self.head_dim - kept, self.lanes, 2, lambda i, n, _: y.store(sink + kept + i, load(kept + i, n))
        )


def _interleave(a: Expr, b: Expr) -> Expr:
    """a₀ b₀ a₁ b₁ …"""
    n = lanes_of(a)
    return tirx.Shuffle([a, b], [i // 2 + i % 2 * n for i in range(2 * n)])


class _Cache:
    """One layer's KV buffer at one position of one head, for writing; see `kernel_graph.KVLayout`."""

    def __init__(self, state: Memory, operand: KVOperand, lanes: int) -> None:
        self._layout, self._width, self._capacity = operand.layout, operand.type.head_dim, operand.capacity
        self._lanes = lanes
        self._quantized = operand.type.storage == "q8"
        self._codes, self._halves = state.view("int8"), state.view("float16")

    def put_key(self, x: Memory, start: Expr, head: Expr, position: Expr) -> None:
        """The key x[start …]: its elements lie apart, between those of nearby positions."""
        block, slot = self._block(head, position)
        begin = bind(block * (KEY_BLOCK * self._width))
        if not self._quantized:
            self._put_halves(x, start, self._layout.keys // 2 + begin + slot, KEY_BLOCK)
            return
        scales = block * (KEY_BLOCK * self._layout.groups) + slot

        def place(element: int, n: int) -> Expr:
            elements = tirx.Ramp(const(element, "int32"), 1, n)
            quad, byte = elements >> const(2, "int32", n), elements & const(QUAD - 1, "int32", n)
            return quad * const(QUAD * KEY_BLOCK, "int32", n) + byte

        codes = self._codes.from_(self._layout.keys + begin + slot * QUAD)
        self._put_codes(x, start, codes, place, self._layout.key_scales // 2 + scales, KEY_BLOCK)

    def put_value(self, x: Memory, start: Expr, head: Expr, position: Expr) -> None:
        row = bind(_wide(head) * self._capacity + position)
        if not self._quantized:
            self._put_halves(x, start, self._layout.values // 2 + row * self._width, 1)
            return
        block, slot = self._block(head, position)
        rows = KEY_BLOCK // QUAD  # of values' elements in turn
        row_of_four = block * rows + tirx.truncmod(slot, rows)
        codes = self._codes.from_(
            self._layout.values + row_of_four * (QUAD * self._width) + tirx.truncdiv(slot, rows)
        )
        scales = self._layout.value_scales // 2 + row * self._layout.groups
        self._put_codes(x, start, codes, lambda element, n: T.ramp(element * QUAD, QUAD, n), scales, 1)

    def _block(self, head: Expr, position: Expr) -> tuple[Expr, Expr]:
        """The block of keys that a position of a head is in, and its place there."""
        block = bind(_wide(head) * (self._capacity // KEY_BLOCK) + tirx.truncdiv(position, KEY_BLOCK))
        return block, bind(tirx.truncmod(position, KEY_BLOCK))

    def _put_halves(self, x: Memory, start: Expr, at: Expr, apart: int) -> None:
        """x[start + i] goes to element at + i · apart."""
        halves = self._halves.from_(at)

        def put(i: Expr, n: int, _: int) -> None:
            value = cast(x.load(start + i, n), "float16")
            _scatter(halves, i * apart if n == 1 else T.ramp(i * apart, apart, n), value)

        for_pieces(self._width, self._lanes, 2, put)

    def _put_codes(
        self,
        x: Memory,
        start: Expr,
        codes: Memory,
        place: Callable[[int, int], Expr],
        scales_at: Expr,
        apart: int,
    ) -> None:
        """The code of x[start + i + j], j < n, goes to codes[place(i, n)[j]]; scales lie `apart`."""
        scales = self._halves.from_(scales_at)
        for group in range(self._layout.groups):
            first = group * _SCALE_GROUP
            vectors = pieces(min(_SCALE_GROUP, self._width - first), self._lanes)
            values = [bind(x.load(start + first + i, n)) for i, n in vectors]
            scale = bind(cast(max_magnitude(values) / const(127.0, "float32"), "float16"))
            scales.store(group * apart, scale)
            wide = bind(cast(scale, "float32"))
            # A scale that rounds to 0 belongs to values that round to 0 also when divided by 1.
            divisor = bind(tirx.Select(wide > const(0.0, "float32"), wide, const(1.0, "float32")))
            for (i, n), value in zip(vectors, values, strict=True):
                code = round_to_int(value / broadcast(divisor, n))
                code = tirx.max(tirx.min(code, const(127, "int32", n)), const(-127, "int32", n))
                _scatter(codes, place(first + i, n), cast(code, "int8"))


def _wide(index: Expr) -> Expr:
    """64 bits: a long cache has more than 2³¹ elements."""
    return cast(index, "int64")


def _scatter(memory: Memory, indices: Expr, value: Expr) -> None:
    T.buffer_store(memory.buffer, value, [indices])


def rope_append(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """q (T, H·E) normed and rotated → (T, H, E); k and v (T, K·E) into the cache, k normed and rotated."""
    names = OPS[call.op].operands
    types: dict[str, Any] = dict(zip(names, call.operands, strict=True))
    present = [n for n in names if types[n] is not None]
    (result,) = call.results
    state: KVOperand = types["state"]
    heads, kv_heads, head_dim = call.attributes["heads"], state.type.kv_heads, state.type.head_dim
    with Kernel(name, **signature(call)) as k:
        control, *given, out = k.arguments
        memory: dict[str, Memory] = dict(zip(present, given, strict=True))
        rotation = _rotation(call, target, head_dim, memory, types)
        cache = _Cache(memory["state"], state, target.lanes)
        cached = bind(control.load(CONTROL_CACHED))
        scratch = local("float32", head_dim)

        def start(operand: str, token: Expr, head: Expr) -> Expr:
            return bind(token * types[operand].stride + head * head_dim)

        def gain_start(operand: str, head: Expr) -> Expr:
            per_head = operand in memory and len(types[operand].type.shape) == 2
            return head * head_dim if per_head else 0

        def query(token: Expr, head: Expr) -> None:
            sink = bind(token * result.stride + head * head_dim)
            gain = memory.get("q_norm"), gain_start("q_norm", head)
            rotation.apply(memory["q"], start("q", token, head), *gain, token, out, sink)

        def key(token: Expr, head: Expr) -> None:
            gain = memory.get("k_norm"), gain_start("k_norm", head)
            rotation.apply(memory["k"], start("k", token, head), *gain, token, scratch, 0)
            cache.put_key(scratch, 0, head, cached + token)

        def value(token: Expr, head: Expr) -> None:
            cache.put_value(memory["v"], start("v", token, head), head, cached + token)

        begin, end = share(k, row_count(types["q"], control) * (heads + 2 * kv_heads))
        with serial(begin, end) as unit:
            token = bind(tirx.truncdiv(unit, heads + 2 * kv_heads))
            head = bind(unit - token * (heads + 2 * kv_heads))
            choose(
                head < heads,
                lambda: query(token, head),
                lambda: choose(
                    head < heads + kv_heads,
                    lambda: key(token, head - heads),
                    lambda: value(token, head - (heads + kv_heads)),
                ),
            )
    return k.function


def _rotation(
    call: KernelCall, target: VectorTarget, head_dim: int, memory: dict[str, Memory], types: dict[str, Any]
) -> _Rotation:
    table: Operand | None = types["cos"]
    style = call.attributes.get("style", "norm")
    if style not in ("norm", "neox"):
        raise IRError(f"unknown rope style {style!r}: one of norm, neox")
    return _Rotation(
        head_dim,
        target.lanes,
        style,
        memory.get("cos"),
        memory.get("sin"),
        table.stride if table else 0,
        table.width if table else 0,
        call.attributes.get("eps", 0.0),
    )


def rope(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """The rotation of x (T, heads, E) alone."""
    types: dict[str, Any] = dict(zip(OPS[call.op].operands, call.operands, strict=True))
    (result,) = call.results
    _, heads, head_dim = types["x"].type.shape
    with Kernel(name, **signature(call)) as k:
        control, x, cos, sin, y = k.arguments
        rotation = _rotation(call, target, head_dim, {"cos": cos, "sin": sin}, types)
        begin, end = share(k, row_count(types["x"], control) * heads)
        with serial(begin, end) as unit:
            token = bind(tirx.truncdiv(unit, heads))
            column = bind((unit - token * heads) * head_dim)
            source, sink = (bind(token * o.stride + column) for o in (types["x"], result))
            rotation.apply(x, source, None, 0, token, y, sink)
    return k.function


def kv_append(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """Keys and values (T, K, E) into the cache."""
    state: Any = call.operands[0]
    k_type, v_type = tensors(call)
    kv_heads, head_dim = state.type.kv_heads, state.type.head_dim
    with Kernel(name, **signature(call)) as k:
        control, buffer, keys, values = k.arguments
        cache = _Cache(buffer, state, target.lanes)
        cached = bind(control.load(CONTROL_CACHED))
        begin, end = share(k, row_count(k_type, control) * kv_heads)
        with serial(begin, end) as unit:
            token = bind(tirx.truncdiv(unit, kv_heads))
            head = bind(unit - token * kv_heads)
            position = bind(cached + token)
            cache.put_key(keys, bind(token * k_type.stride + head * head_dim), head, position)
            cache.put_value(values, bind(token * v_type.stride + head * head_dim), head, position)
    return k.function
