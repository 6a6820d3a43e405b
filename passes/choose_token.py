"""Let a decode round choose its token, and leave what the next round reads."""

from __future__ import annotations

from dataclasses import replace

from zllmc.zllm_ir.graph import Builder, Graph
from zllmc.zllm_ir.plan import CHOSEN
from zllmc.zllm_ir.types import TensorType

CANDIDATES = 64  # largest logits that the host may sample from


def choose_token(graph: Graph) -> Graph:
    """Append the choice to the graph of a decode step, whose first output is the logits.

    before:  %9: f32[1, 50] = linear(%8, @head)
             return %9

    after:   %9: f32[1, 50] = linear(%8, @head)
             %9.0: f32[1, 50], %9.1: i32[1, 50] = top_k_partial(%9) {'k': 50}
             %9.2: f32[1, 50], %9.3: i32[1, 50], %9.4: i32[1], %9.5: i32[1], %9.6: i32[1, 64] = \
                 choose(%9.0, %9.1, @positions, @chosen)
             return %9, %9.2, %9.3, %9.4, %9.5, %9.6
    """
    logits = graph.outputs[0]
    builder = Builder(graph.name)
    chosen = builder.input("chosen", TensorType("i32", (1, CHOSEN)))
    positions = next(v for v in graph.inputs if v.name == "positions")
    values, ids = builder.top_k_partial(logits, k=min(CANDIDATES, int(logits.shape[1])))
    results = builder.choose(values, ids, positions, chosen)
    names = {v: replace(v, name=f"{logits.name}.{v.name}") for v in (values, ids, *results)}
    nodes = tuple(
        replace(
            node,
            inputs=tuple(v and names.get(v, v) for v in node.inputs),
            outputs=tuple(names[v] for v in node.outputs),
        )
        for node in builder.nodes
    )
    return replace(
        graph,
        inputs=(*graph.inputs, chosen),
        nodes=(*graph.nodes, *nodes),
        outputs=(*graph.outputs, *(names[v] for v in results)),
    )
