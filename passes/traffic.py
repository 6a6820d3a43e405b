"""How many bytes a pass moves."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from zllmc.zllm_ir.formats import FORMATS, row_bytes
from zllmc.zllm_ir.kernel_graph import KernelGraph, KernelNode, KVOperand, Operand, value_bytes
from zllmc.zllm_ir.op import OPS


@dataclass(frozen=True)
class Traffic:
    """Bytes that one launch reads and writes, each counted once."""

    op: str
    weights: int
    activations: int
    state: int


def bytes_moved(graph: KernelGraph, *, tokens: int = 1, rows: int = 1, cached: int = 0) -> list[Traffic]:
    """The traffic of every launch, in order, for a pass of `tokens` tokens after `cached` ones with logits of
    `rows` rows. Matrices count as packed as in the model file; an embedding reads its tokens' rows only."""
    declared = {*graph.inputs, *graph.weights}

    def traffic(node: KernelNode) -> Traffic:
        call = node.call
        read = rows if call.op == "select_rows" else tokens

        def unpadded(operand: Operand) -> int:
            return value_bytes(Operand(operand.type, operand.width), read, rows)

        weights = state = 0
        activations = sum(unpadded(r) for r in call.results)
        for value, operand in zip(node.inputs, call.operands, strict=True):
            if isinstance(operand, KVOperand):
                window = call.attributes.get("window") or tokens + cached
                seen = tokens if OPS[call.op].writes else min(tokens + cached, tokens - 1 + window)
                state += seen * operand.type.bytes_per_token
            elif operand is not None and value in graph.weights:
                weights += _weight_bytes(operand, only_rows=tokens if call.op == "embedding" else None)
            elif operand is not None and value not in declared:
                activations += unpadded(operand)
        return Traffic(call.op, weights, activations, state)

    return [traffic(node) for node in graph.nodes]


def _weight_bytes(operand: Operand, only_rows: int | None) -> int:
    *rows, columns = (int(d) for d in operand.type.shape)
    row = 4 * columns if operand.type.dtype == "f32" else row_bytes(FORMATS[operand.type.dtype], columns)
    return row * (prod(rows) if only_rows is None else only_rows)
