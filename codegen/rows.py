"""What kernel families share: a call's signature, its rows, a thread's part of them, vectors with tails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from zllmc.codegen.tir import Expr, Kernel, Memory, bind, choose, serial
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.kernel_graph import KernelCall, KVOperand, Operand, static_dim
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.plan import CONTROL_FIRST_ROW, CONTROL_TOKENS
from zllmc.zllm_ir.types import R, T

BLOCK = 32  # elements that one thread takes at a time: two cache lines, and one group of activations


_ELEMENTS = {"f32": "float32", "i32": "int32", "a8": "int8", "a8_limited": "int8"}


def signature(call: KernelCall) -> dict[str, Any]:
    """The pointers of the calling convention with their element types, for `tir.Kernel`: control, the present
    operands by the op's names, the results."""
    present = [(n, o) for n, o in zip(OPS[call.op].operands, call.operands, strict=True) if o is not None]
    results = [(f"result{i}", r) for i, r in enumerate(call.results)]
    return {"control": "int32"} | {name: _element(operand) for name, operand in (*present, *results)}


def _element(operand: Operand | KVOperand) -> str:
    if isinstance(operand, KVOperand):
        return "uint8"
    if operand.type.dtype not in _ELEMENTS:
        raise IRError(f"no kernel of this family takes {operand.type}")
    return _ELEMENTS[operand.type.dtype]


def tensors(call: KernelCall) -> list[Operand]:
    """The present tensor operands, in the order of the kernel's arguments."""
    return [o for o in call.operands if isinstance(o, Operand)]


def row_count(operand: Operand, control: Memory) -> Expr:
    """Rows of this pass: an int where the first axis is static, else from the control block."""
    dim = operand.type.shape[0]
    if (rows := static_dim(dim)) is not None:
        return rows
    if dim == T:
        return bind(control.load(CONTROL_TOKENS))
    if dim == R:
        return bind(control.load(CONTROL_TOKENS) - control.load(CONTROL_FIRST_ROW))
    raise IRError(f"no kernel knows how many rows {operand.type} has")


def share(k: Kernel, units: Expr) -> tuple[Expr, Expr]:
    """This thread's contiguous range (begin, end) of `units` pieces of work; sizes differ by one at most."""
    each, rest = bind(tirx.truncdiv(units, k.threads)), bind(tirx.truncmod(units, k.threads))
    begin = bind(k.thread * each + tirx.min(k.thread, rest))
    return begin, bind(begin + each + tirx.Select(k.thread < rest, 1, 0))


def pieces(width: int, lanes: int) -> list[tuple[int, int]]:
    """(offset, lanes) of the vectors that cover `width` elements: full ones, then halves of them."""
    covered: list[tuple[int, int]] = []
    offset = 0
    while offset < width:
        while lanes > width - offset:
            lanes //= 2
        covered.append((offset, lanes))
        offset += lanes
    return covered


def for_pieces(width: int, lanes: int, unroll: int, body: Callable[[Expr, int, int], None]) -> None:
    """body(offset, lanes, i) for vectors that cover `width` elements, in a loop over `unroll` of them at a
    time; `i` counts within one round (to pick an accumulator)."""
    step = unroll * lanes
    if width >= step:
        with serial(0, width // step) as round:
            for i in range(unroll):
                body(round * step + i * lanes, lanes, i)
    start = width - width % step
    for i, (offset, n) in enumerate(pieces(width - start, lanes)):
        body(start + offset, n, i % unroll)


def for_blocks(
    k: Kernel, rows: Expr, width: int, lanes: int, body: Callable[[Expr, Expr, list[tuple[int, int]]], None]
) -> None:
    """This thread's share of `rows` rows in blocks of BLOCK elements, so that one row keeps all threads busy.

    body(row, column, vectors): `column` is where the block starts, `vectors` are (offset, lanes) within it.
    """
    full, rest = divmod(width, BLOCK)
    blocks = full + (rest > 0)
    begin, end = share(k, rows * blocks)
    with serial(begin, end) as unit:
        row = bind(tirx.truncdiv(unit, blocks))
        block = bind(unit - row * blocks)
        column = bind(block * BLOCK)

        def part(size: int) -> None:
            body(row, column, pieces(size, lanes))

        if rest and full:
            choose(block < full, lambda: part(BLOCK), lambda: part(rest))
        else:
            part(rest or BLOCK)
