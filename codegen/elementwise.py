"""Elementwise kernels, and the copy of the rows whose logits are wanted.

Work is shared by blocks of 32 elements across all rows, so one row keeps every thread busy too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zllmc.codegen.quantize import ActivationRows
from zllmc.codegen.rows import for_blocks, row_count, signature, tensors
from zllmc.codegen.tir import Expr, Kernel, bind, const, lanes_of
from zllmc.codegen.vector_math import activate, tanh
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.kernel_graph import KernelCall


def _map(call: KernelCall, target: VectorTarget, name: str, function: Callable[..., Expr]) -> Any:
    """A kernel that applies `function` to vectors of all operands: f32 rows of equal width, any strides."""
    types, (result,) = tensors(call), call.results
    with Kernel(name, **signature(call)) as k:
        control, *operands, out = k.arguments

        def block(row: Expr, column: Expr, vectors: list[tuple[int, int]]) -> None:
            starts = [bind(row * t.stride + column) for t in types]
            sink = bind(row * result.stride + column)
            for offset, n in vectors:
                values = [x.load(at + offset, n) for x, at in zip(operands, starts, strict=True)]
                out.store(sink + offset, function(*values))

        for_blocks(k, row_count(result, control), result.width, target.lanes, block)
    return k.function


def add(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """a + b."""
    return _map(call, target, name, lambda a, b: a + b)


def scale(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """x · value."""
    value = call.attributes["value"]
    return _map(call, target, name, lambda x: x * const(value, "float32", lanes_of(x)))


def softcap(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """cap · tanh(x / cap)."""
    cap = call.attributes["cap"]

    def function(x: Expr) -> Expr:
        lanes = lanes_of(x)
        return tanh(x * const(1 / cap, "float32", lanes)) * const(cap, "float32", lanes)

    return _map(call, target, name, function)


def activation(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """act(x)."""
    act = call.attributes["act"]
    return _map(call, target, name, lambda x: activate(x, act))


def glu(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """act(gate) · up."""
    act = call.attributes["act"]
    return _map(call, target, name, lambda gate, up: activate(gate, act) * up)


def glu_quantize(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """a8 of act(gate) · up."""
    act = call.attributes["act"]
    gate_type, up_type = tensors(call)
    (y_type,) = call.results
    with Kernel(name, **signature(call)) as k:
        control, gate, up, y = k.arguments
        out = ActivationRows(y, y_type)

        def block(row: Expr, column: Expr, vectors: list[tuple[int, int]]) -> None:
            a, b = (bind(row * t.stride + column) for t in (gate_type, up_type))
            out.write(
                row, column, [activate(gate.load(a + i, n), act) * up.load(b + i, n) for i, n in vectors]
            )

        for_blocks(k, row_count(y_type, control), y_type.width, target.lanes, block)
    return k.function


def select_rows(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """Rows first … T−1 of f32 (T, D), copied to (R, D)."""
    x_type, _ = tensors(call)
    (y_type,) = call.results
    with Kernel(name, **signature(call)) as k:
        control, x, first_row, y = k.arguments
        first = bind(first_row.load(0))

        def block(row: Expr, column: Expr, vectors: list[tuple[int, int]]) -> None:
            source = bind((row + first) * x_type.stride + column)
            sink = bind(row * y_type.stride + column)
            for offset, n in vectors:
                y.store(sink + offset, x.load(source + offset, n))

        for_blocks(k, row_count(y_type, control), y_type.width, target.lanes, block)
    return k.function
