"""Rows of queries against blocks of keys of the KV cache, softmaxed online: what attention kernels share.

A row is one query head of one token; rows that share a kv head form tiles, so that every key and value is
read and converted once per tile. For each block of keys a tile computes scores (lanes are keys: the cache
interleaves them), rescales what it has to the new maximum and adds the block's values (Milakov & Gimelshein
2018, "Online normalizer calculation for softmax"; Dao et al. 2022, FlashAttention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx

from zllmc.codegen.attention_cache import Head
from zllmc.codegen.attention_float import FloatProducts
from zllmc.codegen.attention_pairs import PairProducts
from zllmc.codegen.attention_shape import BLOCK, Scratch, Shape, Tile, Tiles, tree
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
    local,
    serial,
    when,
)
from zllmc.codegen.vector_math import exp2, exp2_short, fma, max_lanes, sum_lanes, tanh

LOG2_E = 1 / math.log(2)
LOWEST = -3e38  # a running maximum before any key: finite, so that −∞ − LOWEST is −∞ and not NaN


class Unit:
    """Query rows of one kv head, in register tiles, with the running softmax of each row.

    Row i sees keys low[i] … high[i] − 1; both grow with i.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._scratch = Scratch(shape)
        self._products = (PairProducts if shape.pairs else FloatProducts)(shape, self._scratch)
        self.output = self._scratch.output
        self.maximum = local("float32", shape.rows)
        self.sum = local("float32", shape.rows * shape.lanes)  # Σ exp(s − max), lane by lane
        self.low, self.high = local("int32", shape.rows), local("int32", shape.rows)

    def start(self, i: Expr, q: Memory, at: Expr, low: Expr, high: Expr) -> None:
        """Begins row i with the query at q[at …]."""
        lanes, width = self.shape.lanes, self.shape.head_dim
        # Scores in units of log₂ e make exp a power of two; a softcap wants them as they are, and converts.
        self._products.query(i, q, at, self.shape.scale * (1.0 if self.shape.softcap else LOG2_E))
        zero = const(0.0, "float32", lanes)
        with serial(0, width // lanes) as v:
            self.output.store(i * width + v * lanes, zero)
        self.maximum.store(i, const(LOWEST, "float32"))
        self.sum.store(i * lanes, zero)
        self.low.store(i, low)
        self.high.store(i, high)

    def total(self, i: Expr) -> Expr:
        """Row i's Σ exp(s − max)."""
        return sum_lanes(self.sum.load(i * self.shape.lanes, self.shape.lanes))

    def attend(self, head: Head, begin: Expr, end: Expr, tiles: Sequence[Tiles]) -> None:
        """Takes keys begin … end − 1 in; `begin` is a multiple of KEY_BLOCK. No value at or after `end` is
        of consequence: what lies there may be NaN."""
        with serial(0, tirx.truncdiv(end - begin + (BLOCK - 1), BLOCK)) as step:
            key = hold(begin + step * BLOCK)
            self._products.load(head, key, hold(tirx.min(BLOCK, end - key)))
            for place, alike in enumerate(tiles):
                asks = range(place, 2, len(tiles))
                with serial(0, alike.count) as number:
                    row = hold(alike.first + number * alike.rows)
                    seen = hold(tirx.min(end, self.high.load(row + (alike.rows - 1))) - key)
                    with when(seen > 0):
                        count = hold(tirx.min(BLOCK, seen))
                        self._attend(head, Tile(row, alike.rows, count, asks), key)

    def _attend(self, head: Head, tile: Tile, key: Expr) -> None:
        self._products.score(head, tile, key)
        self._bound(tile, key)
        self._weigh(tile)
        self._products.add_values(head, tile, key)

    def _bound(self, tile: Tile, key: Expr) -> None:
        """Finds the block's largest score of each row, brings the rows' maxima up to date, and gives the
        factors of what was summed under the old ones and of what this block will sum under its own."""

        def bound(masked: bool) -> None:
            with serial(0, tile.rows) as m:
                self._bound_row(m, tile, key, masked)

        last = tile.row + (tile.rows - 1)
        all_visible = tirx.all(key + BLOCK <= self.high.load(tile.row), self.low.load(last) <= key)
        choose(all_visible, lambda: bound(False), lambda: bound(True))
        lanes = self.shape.lanes
        for factors in (self._scratch.rescale, self._scratch.gain):
            for i in range(0, tile.rows, lanes):
                factors.store(i, exp2(factors.load(i, lanes)))

    def _bound_row(self, m: Expr, tile: Tile, key: Expr, masked: bool) -> None:
        """Row m's scores are capped, and where `masked` made −∞ at keys that the row doesn't see."""
        lanes, scores, i = self.shape.lanes, self._scratch.scores, bind(tile.row + m)
        vectors = min(4, BLOCK // lanes)
        low = bind(self.low.load(i))
        # low ≤ key < high as one unsigned comparison: key − low < high − low
        seen = bind(cast(broadcast(self.high.load(i) - low, lanes), "uint32"))
        # Held, else TVM makes one ramp of the sum, which LLVM puts together from scalars.
        first = hold(broadcast(key - low, lanes)) + tirx.Ramp(const(0, "int32"), const(1, "int32"), lanes)
        peaks = [Register("float32", lanes, const(LOWEST, "float32", lanes)) for _ in range(vectors)]
        with serial(0, _pieces(tile.count, vectors * lanes)) as step:
            for v, peak in enumerate(peaks):
                at = bind((step * vectors + v) * lanes)
                score = bind(scores.load(m * BLOCK + at, lanes))
                if self.shape.softcap:
                    cap = const(self.shape.softcap * LOG2_E, "float32", lanes)
                    score = hold(tanh(score * const(1 / self.shape.softcap, "float32", lanes)) * cap)
                if masked:
                    place = cast(first + broadcast(at, lanes), "uint32")
                    score = hold(tirx.Select(place < seen, score, const(-math.inf, "float32", lanes)))
                if self.shape.softcap or masked:
                    scores.store(m * BLOCK + at, score)
                peak.set(tirx.max(peak.get(), score))
        highest = hold(max_lanes(tree(tirx.max, [p.get() for p in peaks])))
        before = hold(self.maximum.load(i))
        maximum = hold(tirx.max(before, highest))
        self.maximum.store(i, maximum)
        self._scratch.peaks.store(m, highest)
        self._scratch.rescale.store(m, before - maximum)
        self._scratch.gain.store(m, highest - maximum)

    def _weigh(self, tile: Tile) -> None:
        """Gives the products the weights exp(score − the block's largest), and adds these to the rows'
        sums."""
        lanes, scratch = self.shape.lanes, self._scratch
        vectors = min(4, BLOCK // lanes)
        with serial(0, tile.rows) as m:
            i = bind(tile.row + m)
            peak = bind(broadcast(scratch.peaks.load(m), lanes))
            sums = [Register("float32", lanes, const(0.0, "float32", lanes)) for _ in range(vectors)]
            with serial(0, _pieces(tile.count, vectors * lanes)) as step:
                key = bind(step * (vectors * lanes))
                weights = []
                for v, total in enumerate(sums):
                    score = scratch.scores.load(m * BLOCK + key + v * lanes, lanes)
                    weights.append(hold((exp2_short if self.shape.pairs else exp2)(score - peak)))
                    total.set(total.get() + weights[-1])
                self._products.weigh(m, key, weights)
            rescale, gain = (bind(broadcast(f.load(m), lanes)) for f in (scratch.rescale, scratch.gain))
            total = bind(tree(lambda a, b: a + b, [t.get() for t in sums]) * gain)
            self.sum.store(i * lanes, fma(self.sum.load(i * lanes, lanes), rescale, total))


def _pieces(count: Expr, size: int) -> Expr:
    """Pieces of `size` keys, of which the last may be a part."""
    return tirx.truncdiv(count + (size - 1), size)
