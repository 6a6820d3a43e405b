"""Fix the number of tokens of a pass."""

from __future__ import annotations

from dataclasses import replace

from zllmc.passes.rewrite import substitute
from zllmc.zllm_ir.graph import Graph, Value
from zllmc.zllm_ir.types import R, T, TensorType, fixed


def specialise(graph: Graph, tokens: int | None) -> Graph:
    """With `tokens` = 1, the graph of a decode step: T and R are 1, and all rows (the one) are wanted.

    before:  %0: f32[T, 8] = embedding(@tokens, @table)    after:  %0: f32[1, 8] = embedding(@tokens, @table)
             %1: f32[R, 8] = select_rows(%0, @first_row)           %2: f32[1, 8] = scale(%0)
             %2: f32[R, 8] = scale(%1)

    With `tokens` None both stay symbolic: the graph of a prefill.
    """
    if tokens is None:
        return graph
    if tokens != 1:
        raise ValueError(f"specialise for {tokens} tokens: only 1 or None")

    made = [v for node in graph.nodes for v in node.outputs]
    values = {v: _fixed(v) for v in (*graph.inputs, *made)}
    nodes = []
    for node in graph.nodes:
        if node.op == "select_rows":
            x, _first = graph.operands(node)
            values[node.output] = values[x]
        else:
            nodes.append(substitute(node, values))
    return replace(
        graph,
        inputs=tuple(values[v] for v in graph.inputs),
        nodes=tuple(nodes),
        outputs=tuple(values[v] for v in graph.outputs),
    )


def _fixed(value: Value) -> Value:
    if not isinstance(value.type, TensorType):
        return value
    shape = tuple(fixed(d, {T: 1, R: 1}) for d in value.type.shape)
    return Value(value.name, TensorType(value.type.dtype, shape))
