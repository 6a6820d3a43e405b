"""Give quantized weights quantized activations."""

from __future__ import annotations

from dataclasses import replace

from zllmc.zllm_ir.block_format import BlockFormat
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.formats import FORMATS
from zllmc.zllm_ir.fused_ops import a8_type
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.types import TensorType


def quantize_activations(graph: Graph, *, limit: bool = False) -> Graph:
    """The x of every linear with a block-quantized weight is quantized, once for all that share it. With
    `limit`, it is limited where one of these weights is wide, see `fused_ops` and `BlockFormat.wide`.

    before:  %1 = linear(%0, @q, -, -)    after:  %0.a8 = quantize(%0)
             %2 = linear(%0, @k, -, -)            %1 = linear(%0.a8, @q, -, -)
                                                  %2 = linear(%0.a8, @k, -, -)

    Weights of plain floats (F32, F16, BF16) keep a float32 x.
    """
    linears = [graph.operands(node) for node in graph.nodes if node.op == "linear"]
    limited = {x for x, weight, *_ in linears if limit and _format(weight).wide}
    quantized: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "linear":
            x, weight, *_ = graph.operands(node)
            if _format(weight).plain is None:
                if x not in quantized:
                    quantized[x] = Value(f"{x.name}.a8", a8_type(x.shape, x in limited))
                    attrs = (("limited", True),) if x in limited else ()
                    nodes.append(Node("quantize", (x,), attrs, (quantized[x],)))
                node = replace(node, inputs=(quantized[x], *node.inputs[1:]))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _format(weight: Value) -> BlockFormat:
    if not isinstance(weight.type, TensorType):
        raise IRError(f"linear: {weight.name} is {weight.type}, no weight")
    return FORMATS[weight.type.dtype]
