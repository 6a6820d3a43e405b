"""Attention within a GPU's block: tiles of keys, then of values, in shared memory, and a unit's query rows.

A unit has a few query rows of one kv head: query heads of one token or of several. Their scores and outputs
stay in registers, and every key and value that is read serves all of them. Lanes are a score's keys, and an
output's elements. The softmax is the online one of `attention_unit`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.attention_gpu_shape import CHUNK, AttentionShape
from zllmc.codegen.attention_shape import SCALE_GROUP
from zllmc.codegen.attention_unit import LOG2_E, LOWEST
from zllmc.codegen.rows import pieces
from zllmc.codegen.tir import (
    Expr,
    Memory,
    Register,
    barrier,
    bind,
    broadcast,
    call,
    cast,
    const,
    lanes_of,
    rolled,
)
from zllmc.codegen.vector_math import exp2, fma, tanh
from zllmc.targets.gpu import LANES
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, QUAD

_ELEMENTS = 8  # of a query, or weights, one after another: so few loads are enough


class Tile:
    """Keys of one kv head in shared memory as [element][key], then their values as [key][element]; of a q8
    cache [4 elements][key][4] and [4 keys][element][4], in the order that `KVLayout` says.

    `unit` of `crew` units loads its share; `meet` waits for the others.
    """

    def __init__(
        self, shape: AttentionShape, state: Memory, tile: Memory, head: Expr, unit: Expr, crew: int
    ) -> None:
        cache, layout = shape.cache, shape.cache.layout
        self.shape, self._tile, self._unit, self._crew = shape, tile, unit, crew
        # What follows is about `first` … `first + count − 1`; `begin` gives both.
        self.first: Expr = 0
        self.count: Expr = 0
        row = shape.head_dim * shape.itemsize

        def part(offset: int, width: int) -> Memory:
            return state.from_(cast(head, "int64") * (cache.capacity * width) + offset)

        self._keys, self._values = part(layout.keys, row), part(layout.values, row)
        self._groups = layout.groups
        if layout.groups:
            self._key_scales = part(layout.key_scales, 2 * layout.groups).view("float16")
            self._value_scales = part(layout.value_scales, 2 * layout.groups).view("float16")

    def begin(self, first: Expr, end: Expr) -> None:
        self.first = bind(first)
        self.count = bind(tirx.min(self.shape.keys, end - first))
        self._block = bind(tirx.truncdiv(first, KEY_BLOCK))
        self._blocks = bind(tirx.truncdiv(self.count + (KEY_BLOCK - 1), KEY_BLOCK))

    def meet(self) -> None:
        barrier() if self.shape.shared else call("unit_sync")

    # The chunks past the last key or value repeat it: what lies there may be anything, or no memory at all.

    def put_keys(self) -> None:
        shape = self.shape
        chunks = KEY_BLOCK * shape.itemsize * shape.together // CHUNK  # of a row of a key block
        rows, blocks = shape.head_dim // shape.together, shape.keys // KEY_BLOCK

        def source(chunk: Expr) -> Expr:
            place = bind(chunk >> _lanes(chunks.bit_length() - 1))
            block = tirx.min(place & _lanes(blocks - 1), _all(self._blocks - 1)) + _all(self._block)
            row = place >> _lanes(blocks.bit_length() - 1)
            line = (block * _lanes(rows) + row) * _lanes(chunks)
            return (line + (chunk & _lanes(chunks - 1))) * _lanes(CHUNK)

        for part in self._parts:
            self.put(self._load(self._keys, source, part))

    def load_values(self) -> list[tuple[Expr, Expr]]:
        """The first of the values that `put_values` puts."""
        return self._load(self._values, self._value_source(), self._parts[0])

    def put_values(self, loaded: list[tuple[Expr, Expr]]) -> None:
        self.put(loaded)
        for part in self._parts[1:]:
            self.put(self._load(self._values, self._value_source(), part))

    def _value_source(self) -> Callable[[Expr], Expr]:
        row = self.shape.head_dim * self.shape.itemsize
        count = self.count if self.shape.together == 1 else self._blocks * KEY_BLOCK
        last = bind(count * (row // CHUNK) - 1)
        start = bind(self.first * row)
        return lambda chunk: tirx.min(chunk, _all(last)) * _lanes(CHUNK) + _all(start)

    @property
    def _vectors(self) -> int:
        """Of a chunk in each lane, that the tile has."""
        return self.shape.tile_bytes // (CHUNK * LANES)

    @property
    def _parts(self) -> list[range]:
        """A unit's share of them, as many at once as there are registers for."""
        each = range(-(-self._vectors // self._crew))
        return [each[i : i + self.shape.at_once] for i in each[:: self.shape.at_once]]

    def _load(self, memory: Memory, source: Callable[[Expr], Expr], part: range) -> list[tuple[Expr, Expr]]:
        """These of this unit's chunks, each with its place in the tile."""
        vectors, loaded = self._vectors, []
        for i in part:
            vector = i * self._crew + self._unit
            if vectors % self._crew:
                vector = tirx.min(vector, vectors - 1)
            chunk = bind(_ramp(bind(vector) * LANES))
            data = T.call_pure_extern(f"uint8x{CHUNK * LANES}", "load16", memory.address(source(chunk)))
            loaded.append((bind(chunk * _lanes(CHUNK)), bind(data)))
        return loaded

    def put(self, loaded: Sequence[tuple[Expr, Expr]]) -> None:
        for place, data in loaded:
            call("store16", self._tile.view("uint8").address(place), data)

    def codes(self, index: Expr, lanes: int) -> Expr:
        """What lies together there, for each lane: see `code`."""
        return bind(self._tile.view("float16" if self.shape.together == 1 else "int32").load(index, lanes))

    def code(self, together: Expr, number: int) -> Expr:
        if self.shape.together > 1:
            together = cast(together >> const(8 * number, "int32", lanes_of(together)), "int8")
        return bind(cast(together, "float32"))

    def key_scales(self) -> list[list[Expr]]:
        """[group][vector of keys]"""

        def place(key: Expr) -> Expr:
            block = tirx.min(key >> _lanes(4), _all(self._blocks - 1)) + _all(self._block)
            return block * _lanes(self._groups * KEY_BLOCK) + (key & _lanes(KEY_BLOCK - 1))

        return self._scales(self._key_scales, place, KEY_BLOCK) if self._groups else []

    def value_scales(self) -> list[list[Expr]]:
        """[group][vector of keys]"""

        def place(key: Expr) -> Expr:
            return (tirx.min(key, _all(self.count - 1)) + _all(self.first)) * _lanes(self._groups)

        return self._scales(self._value_scales, place, 1) if self._groups else []

    def _scales(self, memory: Memory, place: Callable[[Expr], Expr], apart: int) -> list[list[Expr]]:
        """From memory[place(key)] on, where groups are that far apart."""
        places = [bind(place(bind(_ramp(key)))) for key in range(0, self.shape.keys, LANES)]
        return [
            [bind(cast(memory.buffer[p + _lanes(group * apart)], "float32")) for p in places]
            for group in range(self._groups)
        ]


class Rows:
    """A unit's query rows and what they have seen. Row i sees those of the window before high[i]."""

    def __init__(self, shape: AttentionShape, q: Memory, q_at: Expr, weights: Memory, at: Expr) -> None:
        self.shape = shape
        self._q, self._q_at, self._weights, self._at = q, q_at, weights, at
        self.places = pieces(shape.head_dim, LANES)
        rows = range(shape.rows)
        self.high: list[Expr] = []
        self.maximum = [Register("float32", 1) for _ in rows]
        self.sum = [Register("float32", LANES) for _ in rows]
        self.output = [[Register("float32", n) for _, n in self.places] for _ in rows]

    def start(self, high: list[Expr]) -> None:
        self.high = high
        for i in range(self.shape.rows):
            self.maximum[i].set(const(LOWEST, "float32"))
            for register in (self.sum[i], *self.output[i]):
                register.set(const(0.0, "float32", register.lanes))

    def put_query(self, i: int, q: Memory, at: Expr) -> None:
        """Row i's query is q[at …]. Scores in units of log₂ e make exp a power of two; a softcap wants them
        as they are, and converts."""
        scale = self.shape.scale * (1.0 if self.shape.softcap else LOG2_E)
        for offset, n in self.places:
            value = q.load(at + offset, n) * const(scale, "float32", n)
            self._q.store(self._q_at + (i * self.shape.head_dim + offset), value)

    def attend(self, tile: Tile) -> None:
        """Takes in the tile's keys and values."""
        tile.meet()  # nobody needs the values before any more
        tile.put_keys()
        tile.meet()
        values = tile.load_values()  # while there is no room for them
        self._weigh(tile, self._scores(tile, tile.key_scales()), tile.value_scales())
        tile.meet()
        tile.put_values(values)
        tile.meet()
        self._add_values(tile)

    def _scores(self, tile: Tile, scales: list[list[Expr]]) -> list[list[Expr]]:
        """q · k of every row: vectors of keys."""
        shape = self.shape
        rows, vectors, width = range(shape.rows), range(shape.keys // LANES), shape.head_dim
        scores: list[list[Any]] = [[None for _ in vectors] for _ in rows]
        size = SCALE_GROUP if scales else width
        for group, begin in enumerate(range(0, width, size)):
            sums = [[Register("float32", LANES, const(0.0, "float32", LANES)) for _ in vectors] for _ in rows]
            with rolled(0, min(size, width - begin) // _ELEMENTS) as step:
                for i in range(_ELEMENTS):
                    element = bind(begin + step * _ELEMENTS + i)
                    if i % shape.together == 0:
                        row = (begin + i) // shape.together + step * (_ELEMENTS // shape.together)
                        codes = [tile.codes(row * shape.keys + v * LANES, LANES) for v in vectors]
                    keys = [tile.code(c, i % shape.together) for c in codes]
                    for m in rows:
                        x = bind(self._q.load(self._q_at + m * width + element))
                        for total, k in zip(sums[m], keys, strict=True):
                            total.set(fma(broadcast(x, LANES), k, total.get()))
            for m in rows:
                for v in vectors:
                    score = sums[m][v].get()
                    if scales:
                        score = score * scales[group][v]
                    scores[m][v] = bind(score if group == 0 else scores[m][v] + score)
        return scores

    def _weigh(self, tile: Tile, scores: list[list[Expr]], scales: list[list[Expr]]) -> None:
        """weights = exp(scores − maximum), after all is rescaled to the new maximum; times the values' scales
        where they are stored."""
        shape = self.shape
        for m, row in enumerate(scores):
            low = shape.low_of(self.high[m])
            seen = _all(cast(self.high[m] - low, "uint32"))
            for v, score in enumerate(row):
                if shape.softcap:
                    capped = tanh(score * const(1 / shape.softcap, "float32", LANES))
                    score = capped * const(shape.softcap * LOG2_E, "float32", LANES)
                # low ≤ key < high as one unsigned comparison: key − low < high − low
                place = cast(_ramp(tile.first + v * LANES - low), "uint32")
                row[v] = bind(tirx.Select(place < seen, score, const(-math.inf, "float32", LANES)))
            before = bind(self.maximum[m].get())
            maximum = bind(tirx.max(before, over_lanes("unit_max", functools.reduce(tirx.max, row))))
            rescale = bind(exp2(before - maximum))
            self.maximum[m].set(maximum)
            weights = [bind(exp2(score - _all(maximum))) for score in row]
            total = functools.reduce(lambda a, b: a + b, weights)
            self.sum[m].set(fma(self.sum[m].get(), _all(rescale), total))
            for output in self.output[m]:
                output.set(output.get() * broadcast(rescale, output.lanes))
            for group in range(shape.scale_groups):
                for v, weight in enumerate(weights):
                    at = self._at + ((m * shape.scale_groups + group) * shape.keys + v * LANES)
                    if shape.together == 1:
                        self._weights.store(at, weight)
                    else:
                        T.buffer_store(self._weights.buffer, weight * scales[group][v], [_turned(at)])

    def _add_values(self, tile: Tile) -> None:
        """output += Σ weights[key] · value[key]. Keys that no row sees have weight 0."""
        shape = self.shape
        with rolled(0, shape.keys // _ELEMENTS) as step:
            for i in range(_ELEMENTS):
                key = bind(step * _ELEMENTS + i)
                if i % shape.together == 0:
                    row = i // shape.together + step * (_ELEMENTS // shape.together)
                    codes = [tile.codes(row * shape.head_dim + offset, n) for offset, n in self.places]
                values = [tile.code(c, i % shape.together) for c in codes]
                for m in range(shape.rows):
                    weights = [
                        bind(self._weights.load(self._at + (m * shape.scale_groups + g) * shape.keys + key))
                        for g in range(shape.scale_groups)
                    ]
                    for (offset, n), value, output in zip(self.places, values, self.output[m], strict=True):
                        weight = weights[offset // SCALE_GROUP if len(weights) > 1 else 0]
                        output.set(fma(broadcast(weight, n), value, output.get()))


def over_lanes(function: str, value: Expr) -> Expr:
    """A reduction by the prelude. It has a statement of its own, by which all lanes come."""
    return bind(T.call_pure_extern("float32", function, value))


def _ramp(first: Expr) -> Expr:
    return tirx.Ramp(const(0, "int32"), 1, LANES) + _all(first)


def _turned(first: Expr) -> Expr:
    """The places of LANES keys from `first` on, in the order in which a q8 cache has values."""
    lane = _ramp(const(0, "int32"))
    within = (lane & _lanes(3)) * _lanes(QUAD) + ((lane >> _lanes(2)) & _lanes(3))
    return _all(first) + (lane & _lanes(LANES - KEY_BLOCK)) + within


def _all(value: Expr) -> Expr:
    return broadcast(value, LANES)


def _lanes(value: int) -> Expr:
    return const(value, "int32", LANES)
