"""Attention of one token, split over its keys so that every thread has work, and the merge of the parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tvm import tirx

from zllmc.codegen.attention_cache import Head
from zllmc.codegen.attention_pairs import has_pairs, token_rows
from zllmc.codegen.attention_shape import Shape, Tiles, check, register_rows
from zllmc.codegen.attention_unit import LOWEST, Unit
from zllmc.codegen.quantize import ActivationRows
from zllmc.codegen.rows import pieces, share, signature
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    Register,
    bind,
    broadcast,
    cast,
    const,
    hold,
    lanes_of,
    local,
    serial,
)
from zllmc.codegen.vector_math import exp2, fma, max_lanes, sum_lanes
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.attention_ops import SPLIT_KEYS
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.fused_ops import GROUP
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KernelCall, KVOperand, Operand
from zllmc.zllm_ir.plan import CONTROL_CACHED


def attention_partial(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """The kernel of `attention_partial`: q (1, H, E) and a KV state → f32 (H, splits · (E + 2)).

    A unit of work is one part of one kv head's keys, for all query heads that share it. Few keys leave parts
    empty: threads share those that aren't.
    """
    q_operand, cache = call.operands
    if not isinstance(q_operand, Operand) or not isinstance(cache, KVOperand):
        raise IRError("attention_partial takes queries and a state")
    heads, head_dim = check(q_operand, cache)
    attributes = call.attributes
    splits, window = attributes["splits"], attributes["window"]
    kv_heads = cache.type.kv_heads
    group = heads // kv_heads
    pairs = has_pairs(target, cache)
    tiles = tiles_of(group, token_rows(target, head_dim) if pairs else register_rows(target))
    shape = Shape(
        target,
        cache,
        rows=group,
        tile_rows=tiles[0].rows,
        scale=attributes["scale"],
        softcap=attributes["softcap"],
        pairs=pairs,
    )

    with Kernel(name, **signature(call)) as k:
        control, q, memory, out = k.arguments
        total = hold(control.load(CONTROL_CACHED) + 1)
        low = hold(tirx.max(total - window, 0)) if window else 0
        start = hold(tirx.truncdiv(low, KEY_BLOCK) * KEY_BLOCK) if window else 0
        per_split = tirx.truncdiv(total - start + (splits - 1), splits)
        part = hold(tirx.truncdiv(per_split + (SPLIT_KEYS - 1), SPLIT_KEYS) * SPLIT_KEYS)
        unit = Unit(shape)
        parts = hold(tirx.truncdiv(total - start + (part - 1), part))  # those with keys

        def give(head: Expr, split: Expr, output: Callable[[Expr], Expr], maximum: Expr, sum: Expr) -> None:
            at = bind(head * call.results[0].stride)
            with serial(0, head_dim // shape.lanes) as v:
                out.store(at + split * head_dim + v * shape.lanes, output(v * shape.lanes))
            out.store(at + splits * head_dim + split, maximum)
            out.store(at + splits * (head_dim + 1) + split, sum)

        first, last = share(k, kv_heads * parts)
        with serial(first, last) as number:
            kv_head = hold(tirx.truncdiv(number, parts))
            split = hold(number - kv_head * parts)
            begin = hold(start + split * part)
            end = hold(tirx.min(begin + part, total))
            with serial(0, group) as i:
                unit.start(i, q, (kv_head * group + i) * head_dim, low, total)
            unit.attend(Head(cache, memory, kv_head, shape.lanes), begin, end, tiles)
            with serial(0, group) as i:

                def output(element: Expr, i: Expr = i) -> Expr:
                    return unit.output.load(i * head_dim + element, shape.lanes)

                give(kv_head * group + i, split, output, unit.maximum.load(i), unit.total(i))

        zero, nothing = const(0.0, "float32"), const(-math.inf, "float32")
        empty = hold(tirx.max(splits - parts, 1))
        first, last = share(k, heads * (splits - parts))
        with serial(first, last) as number:
            head = hold(tirx.truncdiv(number, empty))
            split = hold(parts + number - head * empty)
            give(head, split, lambda _: broadcast(zero, shape.lanes), nothing, zero)
    return k.function


def tiles_of(rows: int, most: int) -> list[Tiles]:
    """`rows` in as few tiles of at most `most` rows as there can be, whose sizes differ by one at most."""
    count = -(-rows // most)
    small, large = divmod(rows, count)
    tiles = [Tiles(0, small + 1, large), Tiles(large * (small + 1), small, count - large)]
    return [t for t in tiles if t.count]


class _Parts:
    """The parts of `attention_partial`, read one head at a time."""

    def __init__(self, call: KernelCall, memory: Memory, lanes: int) -> None:
        (parts,) = call.operands
        if not isinstance(parts, Operand):
            raise IRError(f"{call.op} takes the parts of an attention_partial")
        self.splits: int = call.attributes["splits"]
        self.head_dim = parts.width // self.splits - 2
        self._stride, self._memory, self._lanes = parts.stride, memory, lanes
        self._weights = local("float32", self.splits)
        self._end: Expr = 0

    def select(self, head: Expr) -> None:
        """Weights the parts of a head: 2^(max − the largest max) / Σ of the sums so weighted. Those after
        the last one with keys are left out."""
        self._at = hold(head * self._stride)
        maxima_at = hold(self._at + self.splits * self.head_dim)
        places = pieces(self.splits, self._lanes)
        maxima = [hold(self._memory.load(maxima_at + i, n)) for i, n in places]
        largest = hold(
            functools.reduce(tirx.max, [const(LOWEST, "float32"), *(max_lanes(m) for m in maxima)])
        )
        ends = [
            max_lanes(tirx.Select(m > const(LOWEST, "float32", n), _ramp(i + 1, n), const(0.0, "float32", n)))
            for m, (i, n) in zip(maxima, places, strict=True)
        ]
        self._end = hold(cast(functools.reduce(tirx.max, ends), "int32"))
        weights = [hold(exp2(m - broadcast(largest, lanes_of(m)))) for m in maxima]
        sums = [self._memory.load(maxima_at + self.splits + i, n) for i, n in places]
        total = hold(
            sum((sum_lanes(w * s) for w, s in zip(weights, sums, strict=True)), const(0.0, "float32"))
        )
        for (i, n), w in zip(places, weights, strict=True):
            self._weights.store(i, w / broadcast(total, n))

    def merged(self, element: Expr, count: int) -> list[Expr]:
        """`count` elements of the selected head's output from `element` on, as vectors."""
        places = pieces(count, self._lanes)
        sums = [Register("float32", n, const(0.0, "float32", n)) for _, n in places]
        with serial(0, self._end) as p:
            weight = bind(self._weights.load(p))
            at = bind(self._at + p * self.head_dim + element)
            for (i, n), s in zip(places, sums, strict=True):
                s.set(fma(broadcast(weight, n), self._memory.load(at + i, n), s.get()))
        return [s.get() for s in sums]


def attention_merge(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """The kernel of `attention_merge`: parts (H, splits · (E + 2)) → f32 (1, H·E). A thread of a CPU takes
    whole heads, whose weights it needs once; a GPU has a unit for each vector."""
    with Kernel(name, **signature(call)) as k:
        _, memory, out = k.arguments
        parts = _Parts(call, memory, target.lanes)
        gpu = target.lanes > KEY_BLOCK  # which divides every head_dim that has a kernel
        step = target.lanes if gpu and parts.head_dim % target.lanes == 0 else KEY_BLOCK
        size = step if gpu else parts.head_dim
        begin, end = share(k, call.results[0].width // size)
        with serial(begin, end) as piece:
            head = hold(tirx.truncdiv(piece * size, parts.head_dim))
            start = hold(piece * size - head * parts.head_dim)
            parts.select(head)
            with serial(0, size // step) as c:
                merged = parts.merged(start + c * step, step)
                for (i, _), value in zip(pieces(step, target.lanes), merged, strict=True):
                    out.store(piece * size + c * step + i, value)
    return k.function


def attention_merge_quantize(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """The kernel of `attention_merge_quantize`: parts (H, splits · (E + 2)) → a8 (1, H·E), group by group."""
    width = call.results[0].width
    with Kernel(name, **signature(call)) as k:
        _, memory, out = k.arguments
        parts = _Parts(call, memory, target.lanes)
        rows = ActivationRows(out, call.results[0])
        # A group lies within one head, or may straddle two at a multiple of 16.
        step = GROUP if parts.head_dim % GROUP == 0 else KEY_BLOCK
        begin, end = share(k, width // GROUP)
        with serial(begin, end) as group:
            values = []
            for offset in range(0, GROUP, step):
                element = hold(group * GROUP + offset)
                head = hold(tirx.truncdiv(element, parts.head_dim))
                parts.select(head)
                values += [hold(v) for v in parts.merged(element - head * parts.head_dim, step)]
            rows.write(0, group * GROUP, values)
    return k.function


def _ramp(first: int, lanes: int) -> Expr:
    """first, first + 1, … as f32."""
    start = const(first, "float32", lanes)
    return start if lanes == 1 else start + cast(tirx.Ramp(0, 1, lanes), "float32")
