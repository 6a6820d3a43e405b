"""The KV cache's read side: keys and values of one kv head as f32 vectors."""

from __future__ import annotations

from tvm import tirx

from zllmc.codegen.tir import Expr, Memory, bind, cast, prefetch
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KVOperand

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
        return self._vector(self._values, key * self.head_dim + element)

    def expect_value(self, key: Expr, element: Expr) -> None:
        prefetch(self._values, key * self.head_dim + element)

    def key_codes(self, block: Expr, element: Expr) -> Expr:
        """Element `element` of the 16 q8 keys of key block `block`, as i8."""
        return bind(self._keys.load((block * self.head_dim + element) * KEY_BLOCK, KEY_BLOCK))

    def value_codes(self, key: Expr, element: Expr) -> Expr:
        """16 elements of a q8 value, as i8."""
        return bind(self._values.load(key * self.head_dim + element, KEY_BLOCK))

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
