"""The KV cache's read side: keys and values of one kv head as f32 vectors."""

from __future__ import annotations

from tvm import tirx

from zllmc.codegen.tir import Expr, Memory, bind, bits, broadcast, cast, const, lanes_of, prefetch
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, QUAD, KVOperand

LINE = 64  # bytes of a cache line
AHEAD = 6 << 10  # bytes between a key that is read and the one asked for: some 500 ns of work


class Head:
    """The cached keys and values of one kv head, as f32 vectors."""

    def __init__(self, cache: KVOperand, memory: Memory, head: Expr, lanes: int) -> None:
        layout, self.head_dim, self.lanes = cache.layout, cache.type.head_dim, lanes
        self.groups = layout.groups
        code, self.itemsize = {"f16": ("float16", 2), "q8": ("int8", 1)}[cache.type.storage]

        def part(offset: int, width: int, dtype: str, size: int) -> Memory:
            elements = cast(head, "int64") * (cache.capacity * width) + offset // size
            return memory.view(dtype).from_(elements)

        self._keys = part(layout.keys, self.head_dim, code, self.itemsize)
        self._values = part(layout.values, self.head_dim, code, self.itemsize)
        if self.groups:
            self._key_scales = part(layout.key_scales, self.groups, "float16", 2)
            self._value_scales = part(layout.value_scales, self.groups, "float16", 2)

    def key(self, block: Expr, element: Expr) -> list[Expr]:
        """Element `element` of the 16 keys of key block `block`, before their scales."""
        if self.groups:
            quad, byte = tirx.truncdiv(element, QUAD), tirx.truncmod(element, QUAD)
            return [_byte(word, byte) for word in self.key_quads(block, quad)]
        at = (block * self.head_dim + element) * KEY_BLOCK
        return [self._vector(self._keys, at + i) for i in range(0, KEY_BLOCK, self.lanes)]

    def expect_keys(self, block: Expr, element: Expr) -> None:
        """Asks for the keys that come AHEAD bytes after these."""
        prefetch(self._keys, (block * self.head_dim + element) * KEY_BLOCK + AHEAD // self.itemsize)

    def key_scales(self, block: Expr, group: int) -> list[Expr]:
        at = (block * self.groups + group) * KEY_BLOCK
        return [self._vector(self._key_scales, at + i) for i in range(0, KEY_BLOCK, self.lanes)]

    def value(self, key: Expr, element: Expr) -> Expr:
        """`lanes` elements of a value, before their scale."""
        if self.groups:
            rows = KEY_BLOCK // QUAD
            block, slot = tirx.truncdiv(key, KEY_BLOCK), tirx.truncmod(key, KEY_BLOCK)
            (word,) = self.value_quads(block * rows + tirx.truncmod(slot, rows), element, self.lanes)
            return _byte(word, tirx.truncdiv(slot, rows))
        return self._vector(self._values, key * self.head_dim + element)

    def expect_value(self, key: Expr, element: Expr) -> None:
        """Asks for as much as a value has after `element`, of those around `key`."""
        prefetch(self._values, key * self.head_dim + element)

    def expect_values(self, block: Expr, element: Expr) -> None:
        """Asks for a part of the values of key block `block`, as large as that element of its keys."""
        prefetch(self._values, (block * self.head_dim + element) * KEY_BLOCK)

    def key_quads(self, block: Expr, quad: Expr) -> list[Expr]:
        """Elements 4 quad … 4 quad + 3 of the 16 q8 keys of key block `block`, as bytes of i32 lanes."""
        return self._quads(self._keys, (block * self.head_dim + quad * QUAD) * KEY_BLOCK, KEY_BLOCK)

    def value_quads(self, row: Expr, element: Expr, count: int) -> list[Expr]:
        """`count` elements of the q8 values r, r + 4, r + 8 and r + 12 of key block b, with row = 4b + r, as
        bytes of i32 lanes."""
        return self._quads(self._values, (row * self.head_dim + element) * QUAD, count)

    def _quads(self, codes: Memory, at: Expr, count: int) -> list[Expr]:
        size = QUAD * self.lanes
        return [
            bind(bits(codes.load(at + i * QUAD, size), f"int32x{self.lanes}"))
            for i in range(0, count, self.lanes)
        ]

    def value_scales(self, block: Expr) -> list[Expr]:
        """The scales of the 16 values of a key block: [key][group], in vectors."""
        size = KEY_BLOCK * self.groups
        return [self._vector(self._value_scales, block * size + i) for i in range(0, size, self.lanes)]

    def value_scales_of(self, block: Expr, group: int) -> list[Expr]:
        """The scales of one group of the 16 values of a key block."""
        size = self.lanes * self.groups
        rows = [
            bind(self._value_scales.load((block * KEY_BLOCK + i) * self.groups, size))
            for i in range(0, KEY_BLOCK, self.lanes)
        ]
        if self.groups > 1:
            rows = [tirx.Shuffle([row], list(range(group, size, self.groups))) for row in rows]
        return [bind(cast(row, "float32")) for row in rows]

    def _vector(self, memory: Memory, at: Expr) -> Expr:
        return bind(cast(memory.load(at, self.lanes), "float32"))


def _byte(word: Expr, number: Expr) -> Expr:
    """That byte of every i32 lane, a code, as f32."""
    lanes = lanes_of(word)
    above = broadcast(const(24, "int32") - number * 8, lanes)
    return bind(cast((word << above) >> const(24, "int32", lanes), "float32"))
