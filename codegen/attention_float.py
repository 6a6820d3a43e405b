"""q · k and Σ p · v in f32, as every target can: keys and values are converted as they are read."""

from __future__ import annotations

from tvm import tirx

from zllmc.codegen.attention_cache import LINE, Head
from zllmc.codegen.attention_shape import (
    BLOCK,
    SCALE_GROUP,
    Scratch,
    Shape,
    Tile,
    chunk_vectors,
    fits,
    tree,
    zeros,
)
from zllmc.codegen.tir import Expr, Memory, Register, bind, broadcast, const, hold, local, serial, when
from zllmc.codegen.vector_math import fma
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK

ROUND = 4  # elements of 16 keys, or values of one key each, between two looks at what to ask memory for


class FloatProducts:
    """The products of a unit's rows with a block of keys and values."""

    def __init__(self, shape: Shape, scratch: Scratch) -> None:
        self.shape, self._scratch = shape, scratch
        self._q = local("float32", shape.rows * shape.head_dim)  # scaled
        self._value_scales = local("float32", max(1, shape.cache.layout.groups) * BLOCK)  # [key][group]

    def query(self, i: Expr, q: Memory, at: Expr, scale: float) -> None:
        """Keeps q[at …] · scale as row i."""
        lanes, width = self.shape.lanes, self.shape.head_dim
        with serial(0, width // lanes) as v:
            scaled = q.load(at + v * lanes, lanes) * const(scale, "float32", lanes)
            self._q.store(i * width + v * lanes, scaled)

    def load(self, head: Head, key: Expr, count: Expr) -> None:
        """Turns to the keys key … key + count − 1."""
        if not head.groups:
            return
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, tirx.truncdiv(count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
            for i, scales in enumerate(head.value_scales(first + b)):
                self._value_scales.store(b * (KEY_BLOCK * head.groups) + i * self.shape.lanes, scales)

    def score(self, head: Head, tile: Tile, key: Expr) -> None:
        """scores[row][key] = q · k."""
        lanes, width = self.shape.lanes, self.shape.head_dim
        vectors = KEY_BLOCK // lanes
        sets = self._sets(tile.rows, vectors, 4)
        group = SCALE_GROUP if head.groups else width
        q = bind(tile.row * width)
        first = hold(tirx.truncdiv(key, KEY_BLOCK))
        with serial(0, tirx.truncdiv(tile.count + (KEY_BLOCK - 1), KEY_BLOCK)) as b:
            for begin in range(0, width, group):
                sums = [zeros("float32", tile.rows, vectors, lanes) for _ in range(sets)]
                with serial(0, min(group, width - begin) // ROUND) as step:
                    for i in range(ROUND):
                        e = begin + step * ROUND + i
                        if i * KEY_BLOCK in _lines(tile, ROUND * KEY_BLOCK, head):
                            head.expect_keys(first + b, e)
                        keys = head.key(first + b, e)
                        for m in range(tile.rows):
                            x = bind(broadcast(self._q.load(q + m * width + e), lanes))
                            for total, k in zip(sums[i % sets][m], keys, strict=True):
                                total.set(fma(x, k, total.get()))
                scales = head.key_scales(first + b, begin // group) if head.groups else []
                for m in range(tile.rows):
                    for v in range(vectors):
                        at = m * BLOCK + b * KEY_BLOCK + v * lanes
                        score = tree(_add, [s[m][v].get() for s in sums])
                        if head.groups:
                            zero = const(0.0, "float32", lanes)
                            before = self._scratch.scores.load(at, lanes) if begin else zero
                            score = fma(score, scales[v], before)
                        self._scratch.scores.store(at, score)

    def weigh(self, m: Expr, key: Expr, weights: list[Expr]) -> None:
        """Takes the weights of row m of the tile at the keys from `key` of the block on, in vectors."""
        for v, weight in enumerate(weights):
            self._scratch.scores.store(m * BLOCK + key + v * self.shape.lanes, weight)

    def add_values(self, head: Head, tile: Tile, key: Expr) -> None:
        """output = output · rescale + gain · Σ weights[key] · value[key]."""
        lanes, width = self.shape.lanes, self.shape.head_dim
        vectors = chunk_vectors(self.shape, tile.rows)
        sets = self._sets(tile.rows, vectors, 2)
        chunk = vectors * lanes

        with serial(0, width // chunk) as c:
            start = bind(c * chunk)
            sums = [zeros("float32", tile.rows, vectors, lanes) for _ in range(sets)]

            def add(s: Expr, apart: list[list[Register]]) -> None:
                values = [head.value(key + s, start + v * lanes) for v in range(vectors)]
                if head.groups:
                    scale = self._value_scales.load(s * head.groups + tirx.truncdiv(start, SCALE_GROUP))
                    values = [bind(v * bind(broadcast(scale, lanes))) for v in values]
                for m in range(tile.rows):
                    weight = bind(broadcast(self._scratch.scores.load(m * BLOCK + s), lanes))
                    for total, value in zip(apart[m], values, strict=True):
                        total.set(fma(weight, value, total.get()))

            # Short vectors are so many that more values at a time would not all stay in registers.
            together = ROUND if lanes > 4 else sets
            with serial(0, tirx.truncdiv(tile.count, together)) as step:
                # As many bytes of the next block's values as these have, in their order in memory.
                ahead = bind((c * (BLOCK // together) + step) * (together * chunk))
                for element in _lines(tile, together * chunk, head):
                    head.expect_value(key + BLOCK, ahead + element)
                for i in range(together):
                    add(step * together + i, sums[i % sets])
            # Each key goes where it goes among more, so that a row is the same whatever others the tile has.
            rest = hold(tirx.truncmod(tile.count, together))
            for i in range(together - 1):
                with when(rest > i):
                    add(tile.count - rest + i, sums[i % sets])
            output = self._scratch.output
            for m in range(tile.rows):
                factors = (self._scratch.rescale, self._scratch.gain)
                rescale, gain = (bind(broadcast(f.load(m), lanes)) for f in factors)
                for v in range(vectors):
                    at = bind((tile.row + m) * width + start + v * lanes)
                    total = bind(tree(_add, [apart[m][v].get() for apart in sums]) * gain)
                    output.store(at, fma(output.load(at, lanes), rescale, total))

    def _sets(self, rows: int, vectors: int, most: int) -> int:
        """Over how many sets of sums, a power of two, a tile spreads its products: with few sums fma would
        wait for its last result."""
        sums, target = rows * vectors, self.shape.target
        return next(n for n in (4, 2, 1) if n == 1 or (n <= most and fits(target, n * sums, vectors)))


def _lines(tile: Tile, elements: int, head: Head) -> list[int]:
    """Where the cache lines begin that a tile asks for among that many elements."""
    size = LINE // head.itemsize
    return [i for i in range(0, elements, size) if i // size % 2 in tile.asks]


def _add(a: Expr, b: Expr) -> Expr:
    return a + b
