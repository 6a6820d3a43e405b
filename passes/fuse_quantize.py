"""Let the producer of an activation quantize it."""

from __future__ import annotations

from collections.abc import Sequence

from zllmc.passes.rewrite import Only, fuse
from zllmc.zllm_ir.graph import Graph, Node

_QUANTIZING = {
    "rms_norm": "rms_norm_quantize",
    "glu": "glu_quantize",
    "attention_merge": "attention_merge_quantize",
}


def fuse_quantize(graph: Graph) -> Graph:
    """A norm, glu or attention whose result is only quantized gives it quantized.

    before:  %1 = rms_norm(%0, @w)    after:  %1.a8 = rms_norm_quantize(%0, @w)
             %1.a8 = quantize(%1)
    """
    return fuse(graph, _fuse)


def _fuse(node: Node, only: Only) -> Sequence[Node] | None:
    if node.op == "quantize":
        for op, quantizing in _QUANTIZING.items():
            if producer := only(node.inputs[0], op):
                return [Node(quantizing, producer.inputs, producer.attrs + node.attrs, node.outputs)]
    return None
