"""q · k and Σ p · v over a q8 cache by instructions that sum the products of pairs of i16 (x86).

One of these and an addition do as much as two f32 fma, in two thirds of the time on Zen 3. The codes of a
block of keys and values are widened and brought into pairs once for all rows of a unit. Queries and weights
are rounded to i16: a query to where its Euclidean norm is NORM, so that its elements and all partial sums fit
whatever comes; a row's weights, with the scales of their values, to where the largest that there can be in
the block is NORM. Either rounding errs by about a hundredth of what the codes of the cache did.

An f16 cache stays with f32: its keys would need rounding too, and those with a few large elements would lose
more by that than they did by f16.
"""

from __future__ import annotations

from tvm import tirx

from zllmc.codegen.attention_cache import LINE, Head
from zllmc.codegen.attention_shape import BLOCK, SCALE_GROUP, Scratch, Shape, Tile, chunk_vectors, tree, zeros
from zllmc.codegen.dot import Dot
from zllmc.codegen.tir import (
    Expr,
    Memory,
    Register,
    bind,
    bits,
    broadcast,
    cast,
    const,
    hold,
    local,
    serial,
)
from zllmc.codegen.vector_math import fma, max_lanes, sqrt, sum_lanes
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KVOperand

NORM = 32_700.0  # after rounding, elements still fit an i16
TINY = 1e-30  # a norm is at least this: nothing is divided by 0
SHIFT = 1.5 * 2**23  # added to |x| < 2²² it leaves x rounded to an integer in the low bits


def has_pairs(target: VectorTarget, cache: KVOperand) -> bool:
    return cache.type.storage == "q8" and target.dot in ("maddubs", "vnni")


class PairProducts:
    """The products of a unit's rows with a block of keys and values."""

    def __init__(self, shape: Shape, scratch: Scratch) -> None:
        self.shape, self._scratch = shape, scratch
        width, lanes, layout = shape.head_dim, shape.lanes, shape.cache.layout
        self._dot = Dot(shape.target)
        self._groups = layout.groups
        self._q = local("int32", shape.rows * width // 2)  # [row][pair of elements]
        self._q_scales = local("float32", shape.rows)
        self._keys = local("int32", BLOCK * width // 2)  # [16 keys][pair of elements][key]
        self._key_scales = local("float32", self._groups * BLOCK)  # [group][key]
        self._values = local("int32", BLOCK * width // 2)  # [pair of keys][element]
        self._value_scales = local("float32", self._groups * BLOCK)  # [group][key], of NORM
        self._weights = local("int32", self._groups * shape.tile_rows * BLOCK // 2)  # [group][row][pair]
        self._weight_scales = local("float32", self._groups)
        self._lanes = lanes

    def query(self, i: Expr, q: Memory, at: Expr, scale: float) -> None:
        """Keeps q[at …] · scale as row i."""
        lanes, width = self._lanes, self.shape.head_dim
        vectors = KEY_BLOCK // lanes
        (squares,) = zeros("float32", 1, vectors, lanes)
        with serial(0, width // KEY_BLOCK) as step:
            for v, square in enumerate(squares):
                x = bind(q.load(at + step * KEY_BLOCK + v * lanes, lanes))
                square.set(fma(x, x, square.get()))
        square = sum_lanes(tree(lambda a, b: a + b, [s.get() for s in squares]))
        norm = hold(sqrt(tirx.max(square, const(TINY, "float32"))))
        self._q_scales.store(i, norm * const(scale / NORM, "float32"))
        factor = bind(broadcast(const(NORM, "float32") / norm, lanes))
        codes = self._q.view("int16")
        with serial(0, width // lanes) as v:
            codes.store(i * width + v * lanes, cast(_rounded(q.load(at + v * lanes, lanes), factor), "int16"))

    def load(self, head: Head, key: Expr, count: Expr) -> None:
        """Brings the keys key … key + count − 1 and their values into pairs; later values get the scale 0."""
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, tirx.truncdiv(count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
            self._load_keys(head, first + b, b)
        with serial(0, self._pair_count(count)) as pair:
            self._load_values(head, key, pair, count)
        lanes = self._lanes
        seen = bind(broadcast(count, lanes))
        for group in range(self._groups):
            scales = []
            for at in range(0, BLOCK, lanes):
                place = tirx.Ramp(const(at, "int32"), const(1, "int32"), lanes)
                scale = self._value_scales.load(group * BLOCK + at, lanes)
                scales.append(hold(tirx.Select(place < seen, scale, const(0.0, "float32", lanes))))
            largest = hold(tirx.max(max_lanes(tree(tirx.max, scales)), const(TINY, "float32")))
            self._weight_scales.store(group, largest * const(1 / NORM, "float32"))
            factor = bind(broadcast(const(NORM, "float32") / largest, lanes))
            for v, scale in enumerate(scales):
                self._value_scales.store(group * BLOCK + v * lanes, scale * factor)

    def _load_keys(self, head: Head, source: Expr, b: Expr) -> None:
        """16 keys, and the scales of them and of their values."""
        lanes, width = self._lanes, self.shape.head_dim
        with serial(0, width // 2) as pair:
            head.expect_keys(source, pair * 2)
            even, odd = (head.key_codes(source, pair * 2 + i) for i in (0, 1))
            for v, both in enumerate(_interleaved(even, odd, lanes)):
                self._keys.store((b * (width // 2) + pair) * KEY_BLOCK + v * lanes, both)
        for group in range(self._groups):
            for v, scale in enumerate(head.key_scales(source, group)):
                self._key_scales.store(group * BLOCK + b * KEY_BLOCK + v * lanes, scale)
        for group in range(self._groups):
            for v, scale in enumerate(head.value_scales_of(source, group)):
                self._value_scales.store(group * BLOCK + b * KEY_BLOCK + v * lanes, scale)

    def _load_values(self, head: Head, key: Expr, pair: Expr, count: Expr) -> None:
        lanes, width = self._lanes, self.shape.head_dim
        rows = [hold(key + row) for row in self._pair_rows(pair, count)]
        for row in rows:
            for at in range(0, width, LINE):
                head.expect_value(row + BLOCK, at)
        for at in range(0, width, KEY_BLOCK):
            even, odd = (head.value_codes(row, at) for row in rows)
            for v, both in enumerate(_interleaved(even, odd, lanes)):
                self._values.store(pair * width + at + v * lanes, both)

    def score(self, head: Head, tile: Tile, key: Expr) -> None:
        """scores[row][key] = q · k."""
        lanes, width = self._lanes, self.shape.head_dim
        vectors = KEY_BLOCK // lanes
        q = bind(tile.row * (width // 2))
        with serial(0, tirx.truncdiv(tile.count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
            for group in range(self._groups):
                begin = group * SCALE_GROUP // 2
                pairs = min(SCALE_GROUP, width - 2 * begin) // 2
                sums = zeros("int32", tile.rows, vectors, lanes)
                with serial(begin, begin + pairs) as pair:
                    at = (b * (width // 2) + pair) * KEY_BLOCK
                    keys = [self._pairs(self._keys, at + v * lanes) for v in range(vectors)]
                    for m in range(tile.rows):
                        self._add_products(sums[m], keys, self._q.load(q + m * (width // 2) + pair))
                scales = [
                    bind(self._key_scales.load(group * BLOCK + b * KEY_BLOCK + v * lanes, lanes))
                    for v in range(vectors)
                ]
                for m in range(tile.rows):
                    scale = bind(broadcast(self._q_scales.load(tile.row + m), lanes))
                    for v in range(vectors):
                        at = m * BLOCK + b * KEY_BLOCK + v * lanes
                        score = cast(sums[m][v].get(), "float32") * scales[v]
                        if group:
                            score = fma(score, scale, self._scratch.scores.load(at, lanes))
                        else:
                            score = score * scale
                        self._scratch.scores.store(at, score)

    def weigh(self, m: Expr, key: Expr, weights: list[Expr]) -> None:
        """Takes the weights of row m of the tile at the keys from `key` of the block on, in vectors."""
        lanes = self._lanes
        for group in range(self._groups):
            rounded = []
            for v, weight in enumerate(weights):
                factors = self._value_scales.load(group * BLOCK + key + v * lanes, lanes)
                rounded.append(_rounded(weight, factors))
            at = bind((group * self.shape.tile_rows + m) * (BLOCK // 2) + tirx.truncdiv(key, 2))
            for i, both in enumerate(zip(rounded[::2], rounded[1::2], strict=True)):
                self._weights.store(at + i * lanes, _paired(*both))

    def _pair_count(self, count: Expr) -> Expr:
        """Pairs that `count` keys are in: key i of a vector of keys makes one with key i of the next."""
        full = hold(tirx.truncdiv(count, 2 * self._lanes) * self._lanes)
        return full + tirx.min(count - full * 2, self._lanes)

    def _pair_rows(self, pair: Expr, count: Expr) -> list[Expr]:
        """The two keys of a pair; the last one in place of one that isn't there."""
        first = hold(pair + tirx.truncdiv(pair, self._lanes) * self._lanes)
        return [first, hold(tirx.min(first + self._lanes, count - 1))]

    def add_values(self, head: Head, tile: Tile, key: Expr) -> None:
        """output = output · rescale + gain · Σ weights[key] · value[key]."""
        lanes, width = self._lanes, self.shape.head_dim
        vectors = chunk_vectors(self.shape, tile.rows)
        chunk = vectors * lanes
        output = self._scratch.output
        with serial(0, width // chunk) as c:
            start = bind(c * chunk)
            group = bind(tirx.truncdiv(start, SCALE_GROUP))
            first = bind(group * self.shape.tile_rows)
            sums = zeros("int32", tile.rows, vectors, lanes)
            with serial(0, self._pair_count(tile.count)) as pair:
                values = [self._pairs(self._values, pair * width + start + v * lanes) for v in range(vectors)]
                for m in range(tile.rows):
                    self._add_products(sums[m], values, self._weights.load((first + m) * (BLOCK // 2) + pair))
            for m in range(tile.rows):
                rescale = bind(broadcast(self._scratch.rescale.load(m), lanes))
                gain = self._scratch.gain.load(m) * self._weight_scales.load(group)
                scale = bind(broadcast(gain, lanes))
                for v in range(vectors):
                    at = bind((tile.row + m) * width + start + v * lanes)
                    before = bind(output.load(at, lanes) * rescale)
                    output.store(at, fma(cast(sums[m][v].get(), "float32"), scale, before))

    def _pairs(self, memory: Memory, at: Expr) -> Expr:
        return bind(bits(memory.load(at, self._lanes), f"int16x{2 * self._lanes}"))

    def _add_products(self, sums: list[Register], pairs: list[Expr], factor: Expr) -> None:
        """sums += a row's pair (as one i32) · each of `pairs`."""
        x = bind(bits(broadcast(factor, self._lanes), f"int16x{2 * self._lanes}"))
        for total, both in zip(sums, pairs, strict=True):
            total.set(total.get() + self._dot.pair_sum(both, x))


def _rounded(x: Expr, factor: Expr) -> Expr:
    """x · factor, rounded to an i16 in the low half of each i32 lane; what the high half has is left open."""
    lanes = x.ty.dtype.lanes
    return bind(bits(fma(x, factor, const(SHIFT, "float32", lanes)), f"int32x{lanes}"))


def _paired(low: Expr, high: Expr) -> Expr:
    """The low halves of the i32 lanes of both."""
    lanes = low.ty.dtype.lanes
    return (low & const(0xFFFF, "int32", lanes)) | (high << const(16, "int32", lanes))


def _interleaved(even: Expr, odd: Expr, lanes: int) -> list[Expr]:
    """16 bytes of each, as pairs of i16 in vectors of i32."""
    return [
        bits(cast(tirx.Shuffle([even, odd], order), "int16"), f"int32x{lanes}")
        for at in range(0, 16, lanes)
        for order in [[i + 16 * j for i in range(at, at + lanes) for j in (0, 1)]]
    ]
