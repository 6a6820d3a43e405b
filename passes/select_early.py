"""Let the last layer compute only the rows whose logits are wanted."""

from __future__ import annotations

from dataclasses import replace

from zllmc.passes.rewrite import substitute
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.types import R, TensorType

_ROW_BY_ROW = frozenset(
    ("linear", "rms_norm", "layer_norm", "add", "scale", "softcap", "activation", "glu", "split")
)


def select_early(graph: Graph) -> Graph:
    """`select_rows` moves up, before all ops whose rows nobody else needs: to the last layer's attention.

    before:  %1: f32[T, 8] = linear(%0, @w)             after:  %3: f32[R, 8] = select_rows(%0, @first_row)
             %2: f32[R, 8] = select_rows(%1, @first_row)        %2: f32[R, 8] = linear(%3, @w)
    """
    selects = [node for node in graph.nodes if node.op == "select_rows"]
    if len(selects) != 1:  # none in a decode step
        return graph
    (select,) = selects
    selected, first = graph.operands(select)
    users, weights, results = graph.consumers(), set(graph.weights), set(graph.outputs)
    wanted = {selected: select.output}  # the rows of a value that stand in for it
    moved = {select.output}  # outputs of ops that shall take such rows

    for node in reversed(graph.nodes):
        readers = [user for value in node.outputs for user in users.get(value, ())]
        if (
            node.op in _ROW_BY_ROW
            and results.isdisjoint(node.outputs)
            and all(moved.issuperset(user.outputs) for user in readers)
        ):
            moved.update(node.outputs)
            for value in (*node.outputs, *graph.operands(node)):
                if value not in weights:
                    wanted.setdefault(value, _rows(value))

    nodes: list[Node] = []
    for made, maker in [(graph.inputs, None), *((node.outputs, node) for node in graph.nodes)]:
        if maker is not None and maker is not select:
            nodes.append(substitute(maker, wanted) if moved.issuperset(made) else maker)
        nodes += [
            Node("select_rows", (value, first), (), (wanted[value],))
            for value in made
            if value in wanted and value not in moved
        ]
    return replace(graph, nodes=tuple(nodes))


def _rows(value: Value) -> Value:
    if not isinstance(value.type, TensorType):
        raise TypeError(f"{value.name} has no rows")
    return Value(f"{value.name}.wanted", TensorType(value.type.dtype, (R, *value.type.shape[1:])))
