"""Rows of queries against blocks of keys of the KV cache, softmaxed online: what attention kernels share.

A row is one query head of one token; rows that share a kv head form tiles, so that every key and value is
read and converted once per tile. For each block of keys a tile computes scores (lanes are keys: the cache
interleaves them), rescales what it has to the new maximum and adds the block's values (Milakov & Gimelshein
2018, "Online normalizer calculation for softmax"; Dao et al. 2022, FlashAttention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from zllmc.codegen.attention_cache import LINE, SCALE_GROUP, Head
from zllmc.codegen.tir import (
    Expr,
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
    when,
)
from zllmc.codegen.vector_math import exp2, fma, sum_lanes, tanh
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KVOperand, Operand

BLOCK = 64  # keys per step of the online softmax
LOG2_E = 1 / math.log(2)
LOWEST = -3e38  # a running maximum before any key: finite, so that −∞ − LOWEST is −∞ and not NaN
ELEMENTS = 4  # of 16 keys each, in one round of scores


@dataclass(frozen=True)
class Tiles:
    """`count` register tiles of `rows` query rows each, from a unit's row `first` on."""

    first: int
    rows: int
    count: Expr = 1


@dataclass(frozen=True)
class Shape:
    """What is fixed at compile time. `rows`: that share a pass over the keys; `tile_rows`: of the largest
    register tile."""

    target: VectorTarget
    cache: KVOperand
    rows: int
    tile_rows: int
    scale: float
    softcap: float

    @property
    def lanes(self) -> int:
        return self.target.lanes

    @property
    def head_dim(self) -> int:
        return self.cache.type.head_dim


def register_rows(target: VectorTarget) -> int:
    """Rows of a register tile: as many as can sum the scores of KEY_BLOCK keys in registers."""
    vectors = KEY_BLOCK // target.lanes
    return max(rows for rows in range(1, 13) if fits(target, rows * vectors, vectors))


def fits(target: VectorTarget, sums: int, shared: int) -> bool:
    """Whether the sums of a tile have registers, with the `shared` keys or values that all rows take and one
    row's broadcast factor."""
    return sums + shared + 1 <= target.registers


def check(q: Operand, cache: KVOperand) -> tuple[int, int]:
    """(heads, head_dim); an IRError where no kernel fits."""
    heads, head_dim = (int(d) for d in q.type.shape[1:])
    if head_dim != cache.type.head_dim or heads % cache.type.kv_heads:
        raise IRError(f"attention: q is {q.type} and the state {cache.type}")
    if head_dim % 16:
        raise IRError(f"no attention kernel for head_dim {head_dim}: a multiple of 16 is needed")
    return heads, head_dim


class Unit:
    """Query rows of one kv head, in register tiles, with the running softmax of each row.

    Row i sees keys low[i] … high[i] − 1; both grow with i.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rows, width, lanes = shape.rows, shape.head_dim, shape.lanes
        self.q = local("float32", rows * width)  # scaled
        self.output = local("float32", rows * width)  # Σ exp(s − max) · v
        self.maximum = local("float32", rows)
        self.sum = local("float32", rows * lanes)  # Σ exp(s − max), lane by lane
        self.low, self.high = local("int32", rows), local("int32", rows)
        # One tile's, within a block of keys:
        self._weights = local("float32", shape.tile_rows * BLOCK)  # scores, then exp(s − max)
        self._rescale = local("float32", -(-shape.tile_rows // lanes) * lanes)  # old max − new max, then exp
        self._value_scales = local("float32", max(1, shape.cache.layout.groups) * BLOCK)  # [key][group]

    def start(self, i: Expr, q: Memory, at: Expr, low: Expr, high: Expr) -> None:
        """Begins row i with the query at q[at …]."""
        lanes, width = self.shape.lanes, self.shape.head_dim
        # Scores in units of log₂ e make exp a power of two; a softcap wants them as they are, and converts.
        unit = 1.0 if self.shape.softcap else LOG2_E
        scale = const(self.shape.scale * unit, "float32", lanes)
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

    def attend(self, head: Head, begin: Expr, end: Expr, tiles: Sequence[Tiles]) -> None:
        """Takes keys begin … end − 1 in; `begin` is a multiple of KEY_BLOCK. No value at or after `end` is
        read: what lies there may be NaN."""
        with serial(0, tirx.truncdiv(end - begin + (BLOCK - 1), BLOCK)) as step:
            key = hold(begin + step * BLOCK)
            count = hold(tirx.min(BLOCK, end - key))
            if head.groups:
                self._load_value_scales(head, key, count)
            for alike in tiles:
                with serial(0, alike.count) as number:
                    tile = _Tile(hold(alike.first + number * alike.rows), alike.rows, alike is tiles[0])
                    self._score(head, tile, key, count)
                    self._bound(tile, key)
                    self._weigh(tile)
                    self._add_values(head, tile, key, count)

    def _load_value_scales(self, head: Head, key: Expr, count: Expr) -> None:
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, tirx.truncdiv(count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
            for i, scales in enumerate(head.value_scales(first + b)):
                self._value_scales.store(b * (KEY_BLOCK * head.groups) + i * self.shape.lanes, scales)

    def _score(self, head: Head, tile: _Tile, key: Expr, count: Expr) -> None:
        """weights[row][key] = q · k."""
        lanes, width = self.shape.lanes, self.shape.head_dim
        vectors = KEY_BLOCK // lanes
        sets = _sets(self.shape, tile.rows, vectors, 4)
        group = SCALE_GROUP if head.groups else width
        q = bind(tile.row * width)
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, tirx.truncdiv(count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
            for begin in range(0, width, group):
                sums = _sums(sets, tile.rows, vectors, lanes)
                with serial(0, min(group, width - begin) // ELEMENTS) as step:
                    for i in range(ELEMENTS):
                        e = begin + step * ELEMENTS + i
                        if tile.leads and i * KEY_BLOCK * head.itemsize % LINE == 0:
                            head.expect_keys(first + b, e)
                        keys = head.key(first + b, e)
                        for m in range(tile.rows):
                            x = bind(broadcast(self.q.load(q + m * width + e), lanes))
                            for total, k in zip(sums[i % sets][m], keys, strict=True):
                                total.set(fma(x, k, total.get()))
                scales = head.key_scales(first + b, begin // group) if head.groups else []
                for m in range(tile.rows):
                    for v in range(vectors):
                        at = m * BLOCK + b * KEY_BLOCK + v * lanes
                        score = _tree(_add, [s[m][v].get() for s in sums])
                        if head.groups:
                            before = self._weights.load(at, lanes) if begin else _zero(lanes)
                            score = fma(score, scales[v], before)
                        self._weights.store(at, score)

    def _bound(self, tile: _Tile, key: Expr) -> None:
        """Brings the rows' maxima up to date with their scores, and gives the factors of what was summed
        under the old ones."""

        def bound(masked: bool) -> None:
            with serial(0, tile.rows) as m:
                self._bound_row(m, tile.row + m, key, masked)

        last = tile.row + (tile.rows - 1)
        all_visible = tirx.all(key + BLOCK <= self.high.load(tile.row), self.low.load(last) <= key)
        choose(all_visible, lambda: bound(False), lambda: bound(True))
        lanes = self.shape.lanes
        for i in range(0, tile.rows, lanes):
            self._rescale.store(i, exp2(self._rescale.load(i, lanes)))

    def _bound_row(self, m: Expr, i: Expr, key: Expr, masked: bool) -> None:
        """Row i's scores are capped, and where `masked` made −∞ at keys that the row doesn't see."""
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
                    cap = const(self.shape.softcap * LOG2_E, "float32", lanes)
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

    def _weigh(self, tile: _Tile) -> None:
        """weights = exp(weights − maximum), added to the rows' sums after rescaling those."""
        lanes = self.shape.lanes
        vectors = min(4, BLOCK // lanes)
        with serial(0, tile.rows) as m:
            i = bind(tile.row + m)
            maximum = bind(broadcast(self.maximum.load(i), lanes))
            sums = [Register("float32", lanes, _zero(lanes)) for _ in range(vectors)]
            with serial(0, BLOCK // (vectors * lanes)) as step:
                for v, total in enumerate(sums):
                    key = bind((step * vectors + v) * lanes)
                    weight = hold(exp2(self._weights.load(m * BLOCK + key, lanes) - maximum))
                    total.set(total.get() + weight)
                    self._weights.store(m * BLOCK + key, weight)
            rescale = bind(broadcast(self._rescale.load(m), lanes))
            total = _tree(_add, [t.get() for t in sums])
            self.sum.store(i * lanes, fma(self.sum.load(i * lanes, lanes), rescale, total))

    def _add_values(self, head: Head, tile: _Tile, key: Expr, count: Expr) -> None:
        """output = output · rescale + Σ weights[key] · value[key]."""
        lanes, width = self.shape.lanes, self.shape.head_dim
        vectors = _chunk_vectors(self.shape, tile.rows)
        sets = _sets(self.shape, tile.rows, vectors, 2)
        chunk = vectors * lanes

        with serial(0, width // chunk) as c:
            start = bind(c * chunk)
            sums = _sums(sets, tile.rows, vectors, lanes)

            def add(s: Expr, apart: list[list[Register]]) -> None:
                if tile.leads:
                    head.expect_value(key + s + BLOCK, start)
                values = [head.value(key + s, start + v * lanes) for v in range(vectors)]
                if head.groups:
                    scale = self._value_scales.load(s * head.groups + tirx.truncdiv(start, SCALE_GROUP))
                    values = [bind(v * bind(broadcast(scale, lanes))) for v in values]
                for m in range(tile.rows):
                    weight = bind(broadcast(self._weights.load(m * BLOCK + s), lanes))
                    for total, value in zip(apart[m], values, strict=True):
                        total.set(fma(weight, value, total.get()))

            with serial(0, tirx.truncdiv(count, sets)) as s:
                for i in range(sets):
                    add(s * sets + i, sums[i])
            if sets > 1:
                with when(tirx.NE(tirx.truncmod(count, sets), 0)):
                    add(count - 1, sums[0])
            for m in range(tile.rows):
                rescale = bind(broadcast(self._rescale.load(m), lanes))
                for v in range(vectors):
                    at = bind((tile.row + m) * width + start + v * lanes)
                    total = _tree(_add, [apart[m][v].get() for apart in sums])
                    self.output.store(at, fma(self.output.load(at, lanes), rescale, total))


@dataclass(frozen=True)
class _Tile:
    """Rows row … row + rows − 1 of a unit. `leads`: it is the first to read a block of keys."""

    row: Expr
    rows: int
    leads: bool


def _chunk_vectors(shape: Shape, rows: int) -> int:
    """Vectors of a value that are summed at a time: as many as there are registers, within one scale."""
    vectors = shape.head_dim // shape.lanes
    one_scale = shape.cache.layout.groups <= 1
    return max(
        n
        for n in range(1, vectors + 1)
        if vectors % n == 0
        and fits(shape.target, rows * n, n)
        and (one_scale or SCALE_GROUP % (n * shape.lanes) == 0)
    )


def _sets(shape: Shape, rows: int, vectors: int, most: int) -> int:
    """Over how many sets of sums, a power of two, a tile spreads its products: with few sums fma would wait
    for its last result."""
    sums = rows * vectors
    return next(n for n in (4, 2, 1) if n == 1 or (n <= most and fits(shape.target, n * sums, vectors)))


def _sums(sets: int, rows: int, vectors: int, lanes: int) -> list[list[list[Register]]]:
    def zero() -> Register:
        return Register("float32", lanes, _zero(lanes))

    return [[[zero() for _ in range(vectors)] for _ in range(rows)] for _ in range(sets)]


def _zero(lanes: int) -> Expr:
    return const(0.0, "float32", lanes)


def _add(a: Expr, b: Expr) -> Expr:
    return a + b


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
