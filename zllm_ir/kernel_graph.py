"""The kernel graph: what the last pass gives, one node per kernel call.

A `KernelCall` says all that a kernel family needs to generate code, and nothing else: no value names, no
weights, no addresses. Equal calls share one kernel, and the call's text is the key of the kernel cache.

Calling convention of every kernel:

    kernel(thread, threads, control, *operands, *results)

`control` points to the i32 control block (`plan.CONTROL_*`); then one pointer for each present operand in the
op's order, then one for each result. A written state is an operand only: it is updated in place. Each thread
does its own share and never waits for another inside a kernel. Row 0 … T−1 of every value lie `stride`
elements (or `row_bytes`, for `a8`) apart. Rows at and after T are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.fused_ops import GROUP
from zllmc.zllm_ir.graph import Attr, Value
from zllmc.zllm_ir.types import Dim, KVType, TensorType

KEY_BLOCK = 16  # keys whose elements interleave in the cache: one score vector of every target


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes. `stride`: elements between rows (a view of a fused projection
    has a larger one than its width); 0 for weights and tables."""

    type: TensorType
    stride: int = 0

    @property
    def width(self) -> int:
        """Elements of one row: all axes but the first."""
        elements = 1
        for d in self.type.shape[1:]:
            elements *= int(d)
        return elements

    @property
    def single_row(self) -> bool:
        """Whether the first axis is 1 (the decode entry point)."""
        return bool(self.type.shape[0] == 1)


@dataclass(frozen=True)
class KVOperand:
    """A layer's KV state with room for `capacity` tokens."""

    type: KVType
    capacity: int

    @property
    def layout(self) -> KVLayout:
        return kv_layout(self.type, self.capacity)


@dataclass(frozen=True)
class KernelCall:
    op: str
    attrs: tuple[tuple[str, Attr], ...]
    operands: tuple[Operand | KVOperand | None, ...]
    results: tuple[Operand, ...]

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self.attrs)


@dataclass(frozen=True)
class KernelNode:
    """One kernel call with the graph's values that it reads and writes."""

    call: KernelCall
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]


def activation_row_bytes(width: int) -> int:
    """Bytes of one `a8` row of `width` elements: int8 codes (width), f32 scale of each group of 32
    (width/32), f32 scale · Σcodes of each group of 32 (width/32), i16 Σcodes of each 16 (width/16),
    in that order; rounded up to a cache line."""
    return -(-(width + 2 * 4 * (width // GROUP) + 2 * (width // 16)) // 64) * 64


def row_bytes(dtype: str, width: int) -> int:
    """Bytes of one row of a value in the arena."""
    match dtype:
        case "f32" | "i32":
            return 4 * width
        case "a8":
            return activation_row_bytes(width)
    raise IRError(f"{dtype} values have no row layout")


@dataclass(frozen=True)
class KVLayout:
    """Byte offsets within one layer's KV buffer. Keys interleave by KEY_BLOCK so that a vector of scores needs
    no horizontal sum; values lie row by row.

    f16: keys f16 [kv_heads][capacity/16][head_dim][16], values f16 [kv_heads][capacity][head_dim].
    q8: the same with int8 codes, and f16 scales of each 64 elements along head_dim: key scales
    [kv_heads][capacity/16][groups][16], value scales [kv_heads][capacity][groups].
    """

    keys: int
    values: int
    key_scales: int
    value_scales: int
    bytes: int
    groups: int  # scale groups per head (0 for f16)


def kv_layout(type: KVType, capacity: int) -> KVLayout:
    if capacity % KEY_BLOCK:
        raise IRError(f"KV capacity {capacity} is no multiple of {KEY_BLOCK}")
    elements = type.kv_heads * capacity * type.head_dim
    if type.storage == "f16":
        return KVLayout(0, 2 * elements, 0, 0, 4 * elements, 0)
    if type.storage == "q8":
        groups = -(-type.head_dim // 64)
        scales = 2 * type.kv_heads * capacity * groups
        start = 2 * elements
        return KVLayout(0, elements, start, start + scales, start + 2 * scales, groups)
    raise IRError(f"no kernel stores KV as {type.storage}: one of f16, q8")


def static_dim(dim: Dim) -> int | None:
    """The dimension as an int, or None where it is symbolic (T, R)."""
    return int(dim) if isinstance(dim, int) or dim.is_Integer else None
