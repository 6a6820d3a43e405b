"""Give quantized weights quantized activations."""

from __future__ import annotations

from dataclasses import replace

from zllmc.zllm_ir.formats import FORMATS
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.types import TensorType


def quantize_activations(graph: Graph) -> Graph:
    """The x of every linear with a block-quantized weight is quantized, once for all that share it.

    before:  %1 = linear(%0, @q, -, -)    after:  %0.a8 = quantize(%0)
             %2 = linear(%0, @k, -, -)            %1 = linear(%0.a8, @q, -, -)
                                                  %2 = linear(%0.a8, @k, -, -)

    Weights of plain floats (F32, F16, BF16) keep a float32 x.
    """
    quantized: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "linear":
            x, weight, *_ = graph.operands(node)
            if isinstance(weight.type, TensorType) and FORMATS[weight.type.dtype].plain is None:
                if x not in quantized:
                    quantized[x] = Value(f"{x.name}.a8", TensorType("a8", x.shape))
                    nodes.append(Node("quantize", (x,), (), (quantized[x],)))
                node = replace(node, inputs=(quantized[x], *node.inputs[1:]))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
