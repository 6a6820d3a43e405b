"""Join the norm after half a layer with the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

from zllmc.passes.rewrite import Only, fuse
from zllmc.zllm_ir.graph import Graph, Node


def fuse_norm_add(graph: Graph) -> Graph:
    """A norm that is only added to the residual stream becomes one op with the sum.

    before:  %2 = rms_norm(%1, @w) {'eps': 1e-06}    after:  %3 = norm_add(%1, %0, @w) {'eps': 1e-06}
             %3 = add(%0, %2)
    """
    return fuse(graph, _fuse)


def _fuse(node: Node, only: Only) -> Sequence[Node] | None:
    if node.op != "add":
        return None
    for y, residual in (node.inputs, node.inputs[::-1]):
        if norm := only(y, "rms_norm"):
            x, weight = norm.inputs
            return [Node("norm_add", (x, residual, weight), norm.attrs, node.outputs)]
    return None
