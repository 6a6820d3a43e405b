"""The kernel graph: what the last pass gives, one node per kernel call.

A `KernelCall` says all that a kernel family needs to generate code, and nothing else: no value names, no
weights, no addresses. Equal calls share one kernel, and the call's text is the key of the kernel cache.

Calling convention of every kernel:

    kernel(thread, threads, control, *operands, *results)

`control` points to the i32 control block (`plan.CONTROL_*`); then one pointer for each present operand in the
op's order, then one for each result. A written state is an operand only: it is updated in place. Each thread
does its own share and never waits for another inside a kernel. Row 0 … T−1 of every value lie `stride`
elements (or `row_bytes`, for `a8`) apart. Rows at and after T are never touched.

Values start at a multiple of 64 bytes and their strides are multiples of 16 elements (ROW_PAD); a kernel may
write anything to the padding after a row of its results. A linear's residual may be the memory of its result.
Weights that aren't the matrix of a `linear` or `embedding` are kept as f32, padded like a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.fused_ops import GROUP, is_a8
from zllmc.zllm_ir.graph import Attr, Value
from zllmc.zllm_ir.types import Dim, KVType, R, T, TensorType, fixed

ROW_PAD = 16  # elements that rows in memory are padded to
KEY_BLOCK = 16  # keys whose elements interleave in the cache: one score vector of every target
QUAD = 4  # codes of a q8 cache that share a word


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes. `stride`: elements between rows (a view of a fused projection
    has a larger one than its width); 0 for weights and tables."""

    type: TensorType
    stride: int = 0

    @property
    def width(self) -> int:
        """Elements of one row: all axes but the first."""
        return prod(int(d) for d in self.type.shape[1:])

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


@cache
def symbol(call: KernelCall) -> str:
    """The name of the call's kernel: equal calls have equal names, in every process."""
    operands = (o.type.dtype for o in call.operands if isinstance(o, Operand))
    formats = [dtype for dtype in dict.fromkeys(operands) if dtype not in ("f32", "i32") and not is_a8(dtype)]
    return "_".join([call.op, *formats, hashlib.sha256(repr(call).encode()).hexdigest()[:12]])


@dataclass(frozen=True)
class KernelNode:
    """One kernel call with the graph's values that it reads and writes. A state is always the graph's own
    (`kv.0`), whichever version of it the model graph names.

    With a `slot`, the call is about one sequence of a batch: that row of every value, and its states.
    """

    call: KernelCall
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    slot: int | None = None


@dataclass(frozen=True)
class View:
    """A value that is part of another: it starts `offset` elements into each row of `base`."""

    base: Value
    offset: int


@dataclass(frozen=True)
class KernelGraph:
    """One entry point as kernel calls in order. `inputs`, `weights` and `states` are the model graph's;
    `outputs` are its tensors, without the states.

    `joined` are those of the `weights` that aren't the model's: several of these, which lie one after the
    other in memory.
    `max_tokens` and `max_rows` are the largest T and R that buffers have room for.
    """

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Value, ...]
    states: tuple[Value, ...]
    nodes: tuple[KernelNode, ...]
    outputs: tuple[Value, ...]
    views: Mapping[Value, View]
    max_tokens: int
    max_rows: int
    joined: Mapping[Value, tuple[Value, ...]] = field(default_factory=dict)

    def parts(self, weight: Value) -> tuple[Value, ...]:
        """The model's weights that `weight` consists of: itself, unless it is joined."""
        return self.joined.get(weight, (weight,))

    def place(self, value: Value) -> View:
        """The value that owns the memory, and where `value` starts in its rows."""
        return self.views.get(value, View(value, 0))

    def results(self) -> dict[Value, Operand]:
        """What the kernels compute, in order, and how it lies in memory."""
        return {
            v: r if node.slot is None else stacked(r)
            for node in self.nodes
            for v, r in zip(node.outputs, node.call.results, strict=True)
        }

    def bytes_of(self, operand: Operand) -> int:
        """Bytes that a computed value takes at most."""
        return value_bytes(operand, self.max_tokens, self.max_rows)


def print_kernels(graph: KernelGraph) -> str:
    """The kernel graph as text, one call a line; `%7+64` starts 64 elements into the rows of %7."""
    declared = {*graph.inputs, *graph.weights, *graph.states}

    def reference(value: Value | None) -> str:
        if value is None:
            return "-"
        if value in graph.joined:
            return "|".join(map(reference, graph.joined[value]))
        place = graph.place(value)
        offset = f"+{place.offset}" if place.offset else ""
        return f"{'@' if place.base in declared else '%'}{place.base.name}{offset}"

    lines = [f"kernels {graph.name}: {graph.max_tokens} tokens, {graph.max_rows} rows"]
    for node in graph.nodes:
        results = ", ".join(
            f"%{v.name}: {r.type} / {r.stride}" for v, r in zip(node.outputs, node.call.results, strict=True)
        )
        operands = ", ".join(map(reference, node.inputs))
        attrs = f" {node.call.attributes!r}" if node.call.attrs else ""
        slot = "" if node.slot is None else f" slot {node.slot}"
        lines.append(f"{results or '()'} = {symbol(node.call)}({operands}){attrs}{slot}")
    return "\n".join([*lines, "return " + ", ".join(map(reference, graph.outputs))]) + "\n"


def activation_row_bytes(width: int) -> int:
    """Bytes of one `a8` row of `width` elements: int8 codes (width), f32 scale of each group of 32
    (width/32), f32 scale · Σcodes of each group of 32 (width/32), i16 Σcodes of each 16 (width/16),
    in that order; rounded up to a cache line."""
    return -(-(width + 2 * 4 * (width // GROUP) + 2 * (width // 16)) // 64) * 64


def row_bytes(operand: Operand) -> int:
    """Bytes from a row of a value to the next."""
    match operand.type.dtype:
        case "f32" | "i32":
            return 4 * operand.stride
        case "a8" | "a8_limited":
            return activation_row_bytes(operand.width)
    raise IRError(f"{operand.type} is no value that kernels compute")


def value_bytes(operand: Operand, tokens: int, rows: int) -> int:
    """Bytes of a computed value, padding included, when T is `tokens` and R is `rows`."""
    return int(fixed(operand.type.shape[0], {T: tokens, R: rows})) * row_bytes(operand)


def stacked(result: Operand) -> Operand:
    """How the results of one call for each of T sequences lie: each in a row, whose elements may have rows of
    their own (the parts of a split attention)."""
    dtype, shape = result.type.dtype, result.type.shape
    if result.single_row:
        return Operand(TensorType(dtype, (T, *shape[1:])), result.stride)
    return Operand(TensorType(dtype, (T, *shape)), int(shape[0]) * result.stride)


@dataclass(frozen=True)
class KVLayout:
    """Byte offsets within one layer's KV buffer. Keys interleave by KEY_BLOCK so that a vector of scores
    needs no horizontal sum; values lie row by row. Codes of a q8 cache lie in words of four that are summed
    over, elements of a key or of as many values: shifts make pairs of i16 of them, where no bytes move.

    f16: keys f16 [kv_heads][capacity/16][head_dim][16], values f16 [kv_heads][capacity][head_dim].
    q8: keys int8 [kv_heads][capacity/16][head_dim/4][16][4], values int8
    [kv_heads][capacity/16][4][head_dim][4], where row r of a block has its values r, r + 4, r + 8 and r + 12;
    and f16 scales of each 64 elements along head_dim: key scales [kv_heads][capacity/16][groups][16], value
    scales [kv_heads][capacity][groups].
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
        if type.head_dim % QUAD:
            raise IRError(f"no q8 cache for head_dim {type.head_dim}: a multiple of {QUAD} is needed")
        groups = -(-type.head_dim // 64)
        scales = 2 * type.kv_heads * capacity * groups
        start = 2 * elements
        return KVLayout(0, elements, start, start + scales, start + 2 * scales, groups)
    raise IRError(f"no kernel stores KV as {type.storage}: one of f16, q8")


def static_dim(dim: Dim) -> int | None:
    """The dimension as an int, or None where it is symbolic (T, R)."""
    return dim if isinstance(dim, int) else None
