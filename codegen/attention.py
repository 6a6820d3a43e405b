"""Attention over the KV cache: rows of queries against blocks of keys, softmaxed online.

A row is one query head of one token; rows that share a kv head form tiles, so that every key and value is
read and converted once per tile. For each block of keys a tile computes scores (lanes are keys: the cache
interleaves them), rescales what it has to the new maximum and adds the block's values (Milakov & Gimelshein
2018, "Online normalizer calculation for softmax"; Dao et al. 2022, FlashAttention).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from zllmc.codegen.rows import row_count, signature
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    Register,
    bind,
    broadcast,
    cast,
    choose,
    const,
    hold,
    lanes_of,
    local,
    serial,
)
from zllmc.codegen.vector_math import exp, fma, sum_lanes, tanh
from zllmc.targets.cpu import CpuTarget
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KernelCall, KVOperand, Operand
from zllmc.zllm_ir.plan import CONTROL_CACHED

BLOCK = 64  # keys per step of the online softmax
LOWEST = -3e38  # a running maximum before any key: finite, so that −∞ − LOWEST is −∞ and not NaN
SCALE_GROUP = 64  # elements of a q8 key or value that share a scale
STACK = 24 << 10  # bytes for the queries and outputs of the tiles in flight


@dataclass(frozen=True)
class Shape:
    """What is fixed at compile time. `rows`: of a register tile; `tiles`: that share a pass over the keys;
    `accumulators`: vector registers for sums."""

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    tiles: int
    lanes: int
    accumulators: int
    scale: float
    softcap: float

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def unit(self) -> int:
        return self.rows * self.tiles


def accumulators(target: CpuTarget) -> int:
    """Vector registers for sums; the rest hold keys or values, and a broadcast query or weight."""
    return target.registers * 3 // 4


def register_rows(target: CpuTarget) -> int:
    """Rows of a register tile. Each sums a block's KEY_BLOCK scores; 12 sums hide the latency of fma."""
    return min(12, accumulators(target) // (KEY_BLOCK // target.lanes))


def check(q: Operand, cache: KVOperand) -> tuple[int, int]:
    """(heads, head_dim); an IRError where no kernel fits."""
    heads, head_dim = (int(d) for d in q.type.shape[1:])
    if head_dim != cache.type.head_dim or heads % cache.type.kv_heads:
        raise IRError(f"attention: q is {q.type} and the state {cache.type}")
    if head_dim % 16:
        raise IRError(f"no attention kernel for head_dim {head_dim}: a multiple of 16 is needed")
    return heads, head_dim


class Head:
    """The cached keys and values of one kv head, as f32 vectors."""

    def __init__(self, cache: KVOperand, memory: Memory, head: Expr, lanes: int) -> None:
        layout, self.head_dim, self.lanes = cache.layout, cache.type.head_dim, lanes
        self.groups = layout.groups
        code = {"f16": ("float16", 2), "q8": ("int8", 1)}[cache.type.storage]

        def part(offset: int, width: int, dtype: str, size: int) -> Memory:
            elements = cast(head, "int64") * (cache.capacity * width) + offset // size
            return memory.view(dtype).from_(elements)

        self._keys = part(layout.keys, self.head_dim, *code)
        self._values = part(layout.values, self.head_dim, *code)
        if self.groups:
            self._key_scales = part(layout.key_scales, self.groups, "float16", 2)
            self._value_scales = part(layout.value_scales, self.groups, "float16", 2)

    def key(self, block: Expr, element: Expr) -> list[Expr]:
        """Element `element` of the 16 keys of key block `block`, before their scales."""
        at = (block * self.head_dim + element) * KEY_BLOCK
        return [self._vector(self._keys, at + i) for i in range(0, KEY_BLOCK, self.lanes)]

    def key_scales(self, block: Expr, group: int) -> list[Expr]:
        at = (block * self.groups + group) * KEY_BLOCK
        return [self._vector(self._key_scales, at + i) for i in range(0, KEY_BLOCK, self.lanes)]

    def value(self, key: Expr, element: Expr) -> Expr:
        """`lanes` elements of a value, before their scale."""
        return self._vector(self._values, key * self.head_dim + element)

    def value_scales(self, block: Expr) -> list[Expr]:
        """The scales of the 16 values of a key block: [key][group], in vectors."""
        size = KEY_BLOCK * self.groups
        return [self._vector(self._value_scales, block * size + i) for i in range(0, size, self.lanes)]

    def _vector(self, memory: Memory, at: Expr) -> Expr:
        return bind(cast(memory.load(at, self.lanes), "float32"))


class Unit:
    """`tiles` tiles of query rows of one kv head, with the running softmax of each row.

    Row i of the unit sees keys low[i] … high[i] − 1; both grow with i.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rows, width = shape.unit, shape.head_dim
        self.q = local("float32", rows * width)  # scaled
        self.output = local("float32", rows * width)  # Σ exp(s − max) · v
        self.maximum = local("float32", rows)
        self.sum = local("float32", rows * shape.lanes)  # Σ exp(s − max), lane by lane
        self.low, self.high = local("int32", rows), local("int32", rows)
        # One tile's, within a block of keys:
        self._weights = local("float32", shape.rows * BLOCK)  # scores s, then exp(s − max)
        self._rescale = local("float32", shape.rows)  # old max − new max, then its exp
        self._value_scales = local("float32", BLOCK * 4)  # [key][group]

    def start(self, i: Expr, q: Memory, at: Expr, low: Expr, high: Expr) -> None:
        """Begins row i with the query at q[at …]."""
        lanes, width = self.shape.lanes, self.shape.head_dim
        scale = const(self.shape.scale, "float32", lanes)
        with serial(0, width // lanes) as v:
            self.q.store(i * width + v * lanes, q.load(at + v * lanes, lanes) * scale)
            self.output.store(i * width + v * lanes, const(0.0, "float32", lanes))
        self.maximum.store(i, const(LOWEST, "float32"))
        self.sum.store(i * lanes, const(0.0, "float32", lanes))
        self.low.store(i, low)
        self.high.store(i, high)

    def total(self, i: Expr) -> Expr:
        """Row i's Σ exp(s − max)."""
        return sum_lanes(self.sum.load(i * self.shape.lanes, self.shape.lanes))

    def attend(self, head: Head, begin: Expr, end: Expr, tiles: Expr) -> None:
        """Takes keys begin … end − 1 in; `begin` is a multiple of KEY_BLOCK. No value at or after `end` is
        read: what lies there may be NaN."""
        rows = self.shape.rows
        with serial(0, tirx.truncdiv(end - begin + (BLOCK - 1), BLOCK)) as step:
            key = hold(begin + step * BLOCK)
            count = hold(tirx.min(BLOCK, end - key))
            blocks = hold(tirx.truncdiv(count + (KEY_BLOCK - 1), KEY_BLOCK))
            if head.groups:
                self._load_value_scales(head, key, blocks)
            with serial(0, tiles) as tile:
                self._score(head, tile, key, blocks)
                all_visible = tirx.all(
                    key + BLOCK <= self.high.load(tile * rows), self.low.load(tile * rows + rows - 1) <= key
                )
                with serial(0, rows) as m:
                    bound = functools.partial(self._bound, m, tile * rows + m, key)
                    choose(
                        all_visible,
                        functools.partial(bound, masked=False),
                        functools.partial(bound, masked=True),
                    )
                    self._weigh(m, tile * rows + m)
                self._add_values(head, tile, key, count)

    def _load_value_scales(self, head: Head, key: Expr, blocks: Expr) -> None:
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, blocks) as b:
            for i, scales in enumerate(head.value_scales(first + b)):
                self._value_scales.store(b * (KEY_BLOCK * head.groups) + i * self.shape.lanes, scales)

    def _score(self, head: Head, tile: Expr, key: Expr, blocks: Expr) -> None:
        """weights[row][key] = q · k."""
        shape = self.shape
        rows, lanes, width = shape.rows, shape.lanes, shape.head_dim
        vectors = KEY_BLOCK // lanes
        # Few rows leave fma waiting for itself: sum several elements' products apart.
        sets = max(1, min(4, 8 // (rows * vectors)))
        group = SCALE_GROUP if head.groups else width
        q = bind(tile * (rows * width))
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, blocks) as b:
            for begin in range(0, width, group):
                sums = [
                    [[Register("float32", lanes, _zero(lanes)) for _ in range(vectors)] for _ in range(rows)]
                    for _ in range(sets)
                ]
                with serial(0, min(group, width - begin) // sets) as step:
                    for i, apart in enumerate(sums):
                        e = begin + step * sets + i
                        k = head.key(first + b, e)
                        for m in range(rows):
                            x = bind(broadcast(self.q.load(q + m * width + e), lanes))
                            for total, keys in zip(apart[m], k, strict=True):
                                total.set(fma(x, keys, total.get()))
                scales = head.key_scales(first + b, begin // group) if head.groups else []
                for m in range(rows):
                    for v in range(vectors):
                        at = m * BLOCK + b * KEY_BLOCK + v * lanes
                        score = sum((s[m][v].get() for s in sums[1:]), sums[0][m][v].get())
                        if head.groups:
                            before = self._weights.load(at, lanes) if begin else _zero(lanes)
                            score = fma(score, scales[v], before)
                        self._weights.store(at, score)

    def _bound(self, m: Expr, i: Expr, key: Expr, masked: bool) -> None:
        """Brings row i's maximum up to date with its scores, which are capped first and, where `masked`, made
        −∞ at keys that the row doesn't see."""
        lanes = self.shape.lanes
        vectors = min(4, BLOCK // lanes)
        low = bind(self.low.load(i))
        seen = bind(cast(broadcast(self.high.load(i) - low, lanes), "uint32"))
        before = hold(self.maximum.load(i))
        peaks = [Register("float32", lanes, broadcast(before, lanes)) for _ in range(vectors)]
        with serial(0, BLOCK // (vectors * lanes)) as step:
            for v, peak in enumerate(peaks):
                at = bind((step * vectors + v) * lanes)
                score = bind(self._weights.load(m * BLOCK + at, lanes))
                if self.shape.softcap:
                    cap = const(self.shape.softcap, "float32", lanes)
                    score = hold(tanh(score * const(1 / self.shape.softcap, "float32", lanes)) * cap)
                if masked:
                    # low ≤ key < high as one unsigned comparison: key − low < high − low
                    place = cast(broadcast(key - low + at, lanes) + tirx.Ramp(0, 1, lanes), "uint32")
                    score = hold(tirx.Select(place < seen, score, const(-math.inf, "float32", lanes)))
                if self.shape.softcap or masked:
                    self._weights.store(m * BLOCK + at, score)
                peak.set(tirx.max(peak.get(), score))
        maximum = hold(max_lanes(_tree(tirx.max, [p.get() for p in peaks])))
        self.maximum.store(i, maximum)
        self._rescale.store(m, before - maximum)

    def _weigh(self, m: Expr, i: Expr) -> None:
        """weights = exp(weights − maximum), added to row i's sum after rescaling it."""
        lanes = self.shape.lanes
        vectors = min(4, BLOCK // lanes)
        maximum = bind(broadcast(self.maximum.load(i), lanes))
        sums = [Register("float32", lanes, _zero(lanes)) for _ in range(vectors)]
        with serial(0, BLOCK // (vectors * lanes)) as step:
            for v, total in enumerate(sums):
                at = bind(m * BLOCK + (step * vectors + v) * lanes)
                weight = hold(exp(self._weights.load(at, lanes) - maximum))
                self._weights.store(at, weight)
                total.set(total.get() + weight)
        rescale = hold(exp(broadcast(self._rescale.load(m), lanes)))
        self._rescale.store(m, tirx.Shuffle([rescale], [0]))
        total = _tree(lambda a, b: a + b, [t.get() for t in sums])
        self.sum.store(i * lanes, fma(self.sum.load(i * lanes, lanes), rescale, total))

    def _add_values(self, head: Head, tile: Expr, key: Expr, count: Expr) -> None:
        """output = output · rescale + Σ weights[key] · value[key]."""
        shape = self.shape
        rows, lanes, width = shape.rows, shape.lanes, shape.head_dim
        chunk = lanes * _chunk_vectors(shape, scaled=bool(head.groups))
        with serial(0, width // chunk) as c:
            at = [
                [(tile * rows + m) * width + c * chunk + v for v in range(0, chunk, lanes)]
                for m in range(rows)
            ]
            sums = []
            for m in range(rows):
                rescale = bind(broadcast(self._rescale.load(m), lanes))
                sums.append([Register("float32", lanes, self.output.load(i, lanes) * rescale) for i in at[m]])
            with serial(0, count) as s:
                values = [head.value(key + s, c * chunk + v) for v in range(0, chunk, lanes)]
                if head.groups:
                    scale = self._value_scales.load(s * head.groups + tirx.truncdiv(c * chunk, SCALE_GROUP))
                    values = [bind(v * bind(broadcast(scale, lanes))) for v in values]
                for m in range(rows):
                    weight = bind(broadcast(self._weights.load(m * BLOCK + s), lanes))
                    for total, value in zip(sums[m], values, strict=True):
                        total.set(fma(weight, value, total.get()))
            for m in range(rows):
                for i, total in zip(at[m], sums[m], strict=True):
                    self.output.store(i, total.get())


def _chunk_vectors(shape: Shape, scaled: bool) -> int:
    """Vectors of a value that are summed at a time: as many as there are registers, within one scale."""
    most = shape.accumulators // shape.rows
    vectors = shape.head_dim // shape.lanes
    fits = [
        n
        for n in range(1, most + 1)
        if vectors % n == 0 and (not scaled or shape.head_dim <= 64 or SCALE_GROUP % (n * shape.lanes) == 0)
    ]
    return fits[-1]


def _zero(lanes: int) -> Expr:
    return const(0.0, "float32", lanes)


def _tree(combine: Any, values: list[Expr]) -> Expr:
    while len(values) > 1:
        values = [bind(combine(a, b)) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def max_lanes(x: Expr) -> Expr:
    """The largest of an f32 vector's elements, by halves."""
    lanes = lanes_of(x)
    while lanes > 1:
        lanes //= 2
        x = bind(x)
        x = tirx.max(*(tirx.Shuffle([x], list(range(i, i + lanes))) for i in (0, lanes)))
    return x


def attention_rows(call: KernelCall, target: CpuTarget, name: str) -> Any:
    """The kernel of `attention_rows`: q (T, H, E) and a KV state → f32 (T, H·E).

    Units of rows of one kv head go round the threads; every other head counts them backwards, since later
    ones see more keys.
    """
    q_operand, cache = call.operands
    if not isinstance(q_operand, Operand) or not isinstance(cache, KVOperand):
        raise IRError("attention_rows takes queries and a state")
    heads, head_dim = check(q_operand, cache)
    attributes = call.attributes
    rows = register_rows(target)
    shape = Shape(
        heads=heads,
        kv_heads=cache.type.kv_heads,
        head_dim=head_dim,
        rows=rows,
        tiles=max(1, min(4, STACK // (2 * 4 * head_dim * rows))),
        lanes=target.lanes,
        accumulators=accumulators(target),
        scale=attributes["scale"],
        softcap=attributes["softcap"],
    )
    window, group = attributes["window"], shape.group

    with Kernel(name, **signature(call)) as k:
        control, q, memory, out = k.arguments
        tokens, cached = row_count(q_operand, control), bind(control.load(CONTROL_CACHED))
        rows_per_head = tokens * group
        units_per_head = hold(tirx.truncdiv(rows_per_head + (shape.unit - 1), shape.unit))
        unit = Unit(shape)
        units = bind(units_per_head * shape.kv_heads)
        with serial(0, tirx.truncdiv(units - k.thread + k.threads - 1, k.threads)) as turn:
            number = hold(k.thread + turn * k.threads)
            kv_head = hold(tirx.truncdiv(number, units_per_head))
            place = bind(number - kv_head * units_per_head)
            backwards = tirx.EQ(tirx.truncmod(kv_head, 2), 1)
            first = hold(tirx.Select(backwards, units_per_head - 1 - place, place) * shape.unit)
            count = hold(tirx.min(shape.unit, rows_per_head - first))
            tiles = hold(tirx.truncdiv(count + (rows - 1), rows))

            with serial(0, tiles * rows) as i:
                row = hold(tirx.min(first + i, rows_per_head - 1))  # a last tile's spare rows repeat the last
                token = hold(tirx.truncdiv(row, group))
                high = bind(cached + token + 1)
                low = tirx.max(high - window, 0) if window else 0
                at = token * q_operand.stride + (kv_head * group + row - token * group) * head_dim
                unit.start(i, q, at, low, high)

            begin = hold(tirx.truncdiv(unit.low.load(0), KEY_BLOCK) * KEY_BLOCK)
            unit.attend(Head(cache, memory, kv_head, shape.lanes), begin, unit.high.load(count - 1), tiles)

            with serial(0, count) as i:
                token = hold(tirx.truncdiv(first + i, group))
                at = bind(
                    token * call.results[0].stride + (kv_head * group + first + i - token * group) * head_dim
                )
                inverse = bind(broadcast(const(1.0, "float32") / unit.total(i), shape.lanes))
                with serial(0, head_dim // shape.lanes) as v:
                    o = unit.output.load(i * head_dim + v * shape.lanes, shape.lanes)
                    out.store(at + v * shape.lanes, o * inverse)
    return k.function
