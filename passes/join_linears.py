"""Let linears that read the same activation be one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from zllmc.passes.rewrite import count_uses
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.types import TensorType

_ROWS = 32  # A part has a multiple of so many rows: every target packs these without padding.


def join_linears(graph: Graph) -> Graph:
    """Two or three linears of the same x become one: q, k and v, gate and up.

    before:  %1 = linear(%0, @q, -, -)    after:  %1.weight = concat_rows(@q, @k, -)
             %2 = linear(%0, @k, -, -)            %1.rows = linear(%0, %1.weight, -, -)
                                                  %1, %2 = split(%1.rows)

    Their weights lie one after the other in memory, so that no other linear may read one of them, and have
    the same block format, of which a kernel reads one: a v that has more bits than q and k stays apart.
    """
    uses = count_uses(graph)
    alike: defaultdict[object, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if (key := _key(node)) and all(uses[v] == 1 for v in node.inputs[1:] if v is not None):
            alike[key].append(node)
    groups = [nodes[:3] for nodes in alike.values() if len(nodes) > 1]
    first = {nodes[0].output: nodes for nodes in groups}
    joined = {node.output for nodes in groups for node in nodes}
    result: list[Node] = []
    for node in graph.nodes:
        if nodes := first.get(node.outputs[0]):
            result += _join(nodes)
        elif node.outputs[0] not in joined:
            result.append(node)
    return replace(graph, nodes=tuple(result))


def _key(node: Node) -> object:
    """Equal for linears that can be joined; None for one that can't."""
    if node.op != "linear":
        return None
    x, weight, bias, residual = node.inputs
    if weight is None or residual is not None or weight.shape[0] % _ROWS:
        return None
    return x, *(v and (_dtype(v), len(v.shape)) for v in (weight, bias)), node.attrs


def _join(nodes: list[Node]) -> list[Node]:
    name = nodes[0].output.name
    made: list[Node] = []

    def concatenated(index: int) -> Value | None:
        """Of operand `index` of the nodes."""
        parts = [v for node in nodes if (v := node.inputs[index]) is not None]
        if not parts:
            return None
        rows = sum(int(v.shape[0]) for v in parts)
        kind = ("x", "weight", "bias")[index]
        whole = Value(f"{name}.{kind}", TensorType(_dtype(parts[0]), (rows, *parts[0].shape[1:])))
        made.append(Node("concat_rows", (*parts, *[None] * (3 - len(parts))), (), (whole,)))
        return whole

    x = nodes[0].inputs[0]
    weight, bias = concatenated(1), concatenated(2)
    sizes = tuple(int(node.output.shape[1]) for node in nodes)
    rows = Value(f"{name}.rows", TensorType("f32", (nodes[0].output.shape[0], sum(sizes))))
    return [
        *made,
        Node("linear", (x, weight, bias, None), nodes[0].attrs, (rows,)),
        Node("split", (rows,), (("sizes", sizes),), tuple(node.output for node in nodes)),
    ]


def _dtype(value: Value) -> str:
    return value.type.dtype if isinstance(value.type, TensorType) else ""
