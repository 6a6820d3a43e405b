"""Let projections add the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zllmc.passes.rewrite import Only, fuse
from zllmc.zllm_ir.graph import Graph, Node


def fuse_residual(graph: Graph) -> Graph:
    """A linear that is only added to something adds it by itself.

    before:  %2 = linear(%1, @w, -, -)    after:  %3 = linear(%1, @w, -, %0)
             %3 = add(%0, %2)
    """
    return fuse(graph, _fuse)


def _fuse(node: Node, only: Only) -> Sequence[Node] | None:
    if node.op != "add":
        return None
    for y, residual in (node.inputs, node.inputs[::-1]):
        if linear := only(y, "linear"):
            x, weight, bias, other = linear.inputs
            if other is None:
                return [replace(linear, inputs=(x, weight, bias, residual), outputs=node.outputs)]
    return None
