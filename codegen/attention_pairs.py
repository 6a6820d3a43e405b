"""q · k and Σ p · v over a q8 cache by instructions that sum the products of pairs of i16 (x86).

One of these and an addition do as much as two f32 fma, in two thirds of the time on Zen 3. The cache has
codes in words of four, of which shifts make two pairs: the first with the third, the second with the fourth.
Queries and weights are paired alike, and rounded to i16: a query to where its Euclidean norm is NORM, so that
its elements and all partial sums fit whatever comes; a row's weights, with the scales of their values, to
where the largest that there can be in the block is NORM. Either rounding errs by about a hundredth of what
the codes of the cache did.

An f16 cache stays with f32: its keys would need rounding too, and those with a few large elements would lose
more by that than they did by f16.
"""

from __future__ import annotations

from tvm import tirx

from zllmc.codegen.attention_cache import Head
from zllmc.codegen.attention_shape import (
    BLOCK,
    SCALE_GROUP,
    Scratch,
    Shape,
    Tile,
    chunk_vectors,
    fits,
    register_rows,
    tree,
    zeros,
)
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
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, QUAD, KVOperand

NORM = 32_700.0  # after rounding, elements still fit an i16
TINY = 1e-30  # a norm is at least this: nothing is divided by 0
SHIFT = 1.5 * 2**23  # added to |x| < 2²² it leaves x rounded to an integer in the low bits


def has_pairs(target: VectorTarget, cache: KVOperand) -> bool:
    return cache.type.storage == "q8" and target.dot in ("maddubs", "vnni")


def token_rows(target: VectorTarget, head_dim: int) -> int:
    """Rows of a tile of one token, at most: seven or eight rows of short queries are faster together, with
    half a block of keys at a time, than in two tiles."""
    return max(register_rows(target), 8 if head_dim <= 128 else 0)


class PairProducts:
    """The products of a unit's rows with a block of keys and values."""

    def __init__(self, shape: Shape, scratch: Scratch) -> None:
        self.shape, self._scratch = shape, scratch
        width, lanes, layout = shape.head_dim, shape.lanes, shape.cache.layout
        self._dot = Dot(shape.target)
        self._groups = layout.groups
        # With fewer keys at a time than 16, a pair of a query would be broadcast for one product: it is kept
        # in all lanes, so that the product can load it itself.
        self._spread = not self._takes_block(shape.tile_rows)
        copies = lanes if self._spread else 1
        self._q = local("int32", shape.rows * width // 2 * copies)  # [row][quad of elements][pair][copy]
        self._q_scales = local("float32", shape.rows)
        self._value_scales = local("float32", self._groups * BLOCK)  # [group][key], of NORM
        # [group][row][16 keys][pair]
        self._weights = local("int32", self._groups * shape.tile_rows * BLOCK // 2)
        self._weight_scales = local("float32", self._groups)
        self._lanes = lanes

    def _takes_block(self, rows: int) -> bool:
        """Whether a tile sums the products with 16 keys at a time."""
        vectors = KEY_BLOCK // self.shape.lanes
        return fits(self.shape.target, rows * vectors, vectors)

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
        paired = [quad + e for quad in range(0, lanes, QUAD) for e in (0, 2, 1, 3)]
        with serial(0, width // lanes) as v:
            codes = cast(_rounded(q.load(at + v * lanes, lanes), factor), "int16")
            pairs = bind(bits(tirx.Shuffle([bind(codes)], paired), f"int32x{lanes // 2}"))
            place = bind((i * width + v * lanes) // 2)
            if self._spread:
                for pair in range(lanes // 2):
                    one = tirx.Shuffle([pairs], [pair])
                    self._q.store((place + pair) * lanes, broadcast(one, lanes))
            else:
                self._q.store(place, pairs)

    def load(self, head: Head, key: Expr, count: Expr) -> None:
        """Turns to the keys key … key + count − 1. Values after them get the scale 0."""
        lanes = self._lanes
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, tirx.truncdiv(count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
            for group in range(self._groups):
                for v, scale in enumerate(head.value_scales_of(first + b, group)):
                    self._value_scales.store(group * BLOCK + b * KEY_BLOCK + v * lanes, scale)
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

    def score(self, head: Head, tile: Tile, key: Expr) -> None:
        """scores[row][key] = q · k."""
        vectors = KEY_BLOCK // self._lanes
        together = vectors if self._takes_block(tile.rows) else 1
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, tirx.truncdiv(tile.count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
            for group in range(self._groups):
                scales = head.key_scales(first + b, group)
                for v in range(0, vectors, together):
                    self._score(head, tile, first + b, b, group, range(v, v + together), scales)

    def _score(
        self, head: Head, tile: Tile, block: Expr, b: Expr, group: int, vectors: range, scales: list[Expr]
    ) -> None:
        lanes, width = self._lanes, self.shape.head_dim
        begin = group * SCALE_GROUP // QUAD
        quads = min(SCALE_GROUP // QUAD, width // QUAD - begin)
        sums = zeros("int32", tile.rows, len(vectors), lanes)
        with serial(begin, begin + quads) as quad:
            if tile.leads and vectors[0] == 0:
                head.expect_keys(block, quad * QUAD)
                head.expect_values(block, quad * QUAD)
            words = head.key_quads(block, quad)
            keys = [_pairs(words[v]) for v in vectors]
            for m in range(tile.rows):
                at = (tile.row + m) * (width // 2) + quad * 2
                self._add_products(sums[m], keys, [self._query_pair(at + pair) for pair in (0, 1)])
        for m in range(tile.rows):
            scale = bind(broadcast(self._q_scales.load(tile.row + m), lanes))
            for v, total in zip(vectors, sums[m], strict=True):
                at = m * BLOCK + b * KEY_BLOCK + v * lanes
                score = cast(total.get(), "float32") * scales[v]
                before = self._scratch.scores.load(at, lanes)
                self._scratch.scores.store(at, fma(score, scale, before) if group else score * scale)

    def _query_pair(self, at: Expr) -> Expr:
        """A pair of elements of a query in every lane."""
        if self._spread:
            return self._q.load(at * self._lanes, self._lanes)
        return broadcast(self._q.load(at), self._lanes)

    def weigh(self, m: Expr, key: Expr, weights: list[Expr]) -> None:
        """Takes the weights of row m of the tile at the keys from `key` of the block on, in vectors."""
        lanes = self._lanes
        for group in range(self._groups):
            rounded = []
            for v, weight in enumerate(weights):
                factors = self._value_scales.load(group * BLOCK + key + v * lanes, lanes)
                rounded += _eights(_rounded(weight, factors))
            at = bind((group * self.shape.tile_rows + m) * (BLOCK // 2) + tirx.truncdiv(key, 2))
            for i, both in enumerate(zip(rounded[::2], rounded[1::2], strict=True)):
                self._weights.store(at + i * (KEY_BLOCK // 2), _paired(*both))

    def add_values(self, head: Head, tile: Tile, key: Expr) -> None:
        """output = output · rescale + gain · Σ weights[key] · value[key]."""
        lanes, width = self._lanes, self.shape.head_dim
        vectors = chunk_vectors(self.shape, tile.rows)
        chunk = vectors * lanes
        rows = KEY_BLOCK // QUAD
        output = self._scratch.output
        block = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, width // chunk) as c:
            start = bind(c * chunk)
            group = bind(tirx.truncdiv(start, SCALE_GROUP))
            first = bind(group * self.shape.tile_rows)
            sums = zeros("int32", tile.rows, vectors, lanes)
            with serial(0, tirx.truncdiv(tile.count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
                for r in range(rows):
                    words = head.value_quads((block + b) * rows + r, start, chunk)
                    values = [_pairs(word) for word in words]
                    for m in range(tile.rows):
                        at = (first + m) * (BLOCK // 2) + b * (KEY_BLOCK // 2) + r
                        weights = [broadcast(self._weights.load(at + rows * pair), lanes) for pair in (0, 1)]
                        self._add_products(sums[m], values, weights)
            for m in range(tile.rows):
                rescale = bind(broadcast(self._scratch.rescale.load(m), lanes))
                gain = self._scratch.gain.load(m) * self._weight_scales.load(group)
                scale = bind(broadcast(gain, lanes))
                for v in range(vectors):
                    at = bind((tile.row + m) * width + start + v * lanes)
                    before = bind(output.load(at, lanes) * rescale)
                    output.store(at, fma(cast(sums[m][v].get(), "float32"), scale, before))

    def _add_products(
        self, sums: list[Register], quads: list[tuple[Expr, Expr]], factors: list[Expr]
    ) -> None:
        """sums += a row's two pairs (as an i32 each) · those of each of `quads`."""
        low, high = (bind(bits(f, f"int16x{2 * self._lanes}")) for f in factors)
        for total, (first, second) in zip(sums, quads, strict=True):
            total.set(self._dot.plus_pair_sum(self._dot.plus_pair_sum(total.get(), first, low), second, high))


def _pairs(word: Expr) -> tuple[Expr, Expr]:
    """Of the four codes in an i32 lane, the first and third, and the second and fourth, as i16."""
    lanes = 2 * word.ty.dtype.lanes
    codes, byte = bits(word, f"int16x{lanes}"), const(8, "int16", lanes)
    return bind((codes << byte) >> byte), bind(codes >> byte)


def _eights(x: Expr) -> list[Expr]:
    """A vector of lanes in vectors of eight."""
    lanes = x.ty.dtype.lanes
    return [x] if lanes == 8 else [tirx.Shuffle([x], list(range(i, i + 8))) for i in range(0, lanes, 8)]


def _rounded(x: Expr, factor: Expr) -> Expr:
    """x · factor, rounded to an i16 in the low half of each i32 lane; what the high half has is left open."""
    lanes = x.ty.dtype.lanes
    return bind(bits(fma(x, factor, const(SHIFT, "float32", lanes)), f"int32x{lanes}"))


def _paired(low: Expr, high: Expr) -> Expr:
    """The low halves of the i32 lanes of both."""
    lanes = low.ty.dtype.lanes
    return (low & const(0xFFFF, "int32", lanes)) | (high << const(16, "int32", lanes))
