"""Decoding one token of each of several sequences in one pass."""

from __future__ import annotations

from dataclasses import replace

from zllmc.zllm_ir.graph import Value
from zllmc.zllm_ir.kernel_graph import KernelCall, KernelGraph, KernelNode, KVOperand, Operand
from zllmc.zllm_ir.types import Dim, R, T, TensorType

_MERGES = ("attention_merge", "attention_merge_quantize")  # of the parts of one sequence
_CHOICE = ("top_k_partial", "choose")  # of the next token: a batch leaves it to the host


def batch(decode: KernelGraph, prefill: KernelGraph, slots: int) -> KernelGraph:
    """The decode step of up to `slots` sequences: row i of every value belongs to the sequence in slot i.

    What has no part in a sequence's cache takes all rows at once, and so reads its weights once for all; the
    rest runs slot by slot, as in decode:

    before:  %1: f32[1, 8] = linear(%0, @w)            after:  %1: f32[T, 8] = linear(%0, @w)
             %2: f32[1, 2, 4] = rope_append(%1, @kv)           %2: f32[1, 2, 4] = rope_append(%1, @kv) slot 0
                                                               %2: f32[1, 2, 4] = rope_append(%1, @kv) slot 1

    Every call is one of `decode` or, where that has the same for more rows, of `prefill`: a batch needs
    hardly any kernels of its own.
    """
    known = {node.call for node in prefill.nodes}
    weights, results = set(decode.weights), decode.results()

    def stride(value: Value, operand: Operand) -> int:
        """Between rows of the value; the operand's own had no effect for its single row."""
        base = decode.place(value).base
        return results[base].stride if base in results else operand.stride

    def with_rows(node: KernelNode, rows: Dim) -> KernelCall:
        def given(value: Value | None, operand: Operand | KVOperand | None) -> Operand | KVOperand | None:
            if value is None or value in weights or not isinstance(operand, Operand):
                return operand
            return _widen(operand, rows, stride(value, operand))

        return replace(
            node.call,
            operands=tuple(map(given, node.inputs, node.call.operands)),
            results=tuple(_widen(result, rows, result.stride) for result in node.call.results),
        )

    nodes: list[KernelNode] = []
    for node in decode.nodes:
        if node.call.op in _CHOICE:
            continue
        if node.call.op in _MERGES or any(isinstance(o, KVOperand) for o in node.call.operands):
            nodes += [replace(node, slot=slot) for slot in range(slots)]
        else:
            # Every row has logits, so R rows are as good as T.
            call = next((c for rows in (T, R) if (c := with_rows(node, rows)) in known), with_rows(node, T))
            nodes.append(replace(node, call=call))
    return replace(
        decode,
        name="batch",
        nodes=tuple(nodes),
        outputs=decode.outputs[:1],
        max_tokens=slots,
        max_rows=slots,
    )


def _widen(operand: Operand, rows: Dim, stride: int) -> Operand:
    return Operand(TensorType(operand.type.dtype, (rows, *operand.type.shape[1:])), stride)
