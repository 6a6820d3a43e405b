"""Let neighbours multiply by the constants of `scale` nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zllmc.passes.rewrite import Only, fuse
from zllmc.zllm_ir.graph import Graph, Node


def fold_scales(graph: Graph) -> Graph:
    """Fold constant scales into the linear or embedding before them, or the attention after.

    before:  %1 = linear(%0, @w, -, -) {'alpha': 1.0}    after:  %2 = linear(%0, @w, -, -) {'alpha': 0.5}
             %2 = scale(%1) {'value': 0.5}

    A linear with a bias or a residual keeps its scale: `alpha` doesn't reach those.
    """
    return fuse(graph, _fold)


def _fold(node: Node, only: Only) -> Sequence[Node] | None:
    if node.op == "scale":
        factor = node.attributes["value"]
        if (linear := only(node.inputs[0], "linear")) and linear.inputs[2:] == (None, None):
            return [replace(_times(linear, "alpha", factor), outputs=node.outputs)]
        if embedding := only(node.inputs[0], "embedding"):
            return [replace(_times(embedding, "scale", factor), outputs=node.outputs)]
    if node.op == "attention" and (scale := only(node.inputs[0], "scale")):
        queries = (scale.inputs[0], *node.inputs[1:])
        return [replace(_times(node, "scale", scale.attributes["value"]), inputs=queries)]
    return None


def _times(node: Node, attr: str, factor: float) -> Node:
    """The node with that attribute multiplied by `factor`."""
    attrs: dict[str, Any] = node.attributes
    attrs[attr] *= factor
    return replace(node, attrs=tuple(attrs.items()))
