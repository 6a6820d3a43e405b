"""The verifier: what must hold of every graph, checked after every pass in tests and with `--verify`."""

from __future__ import annotations

import zllmc.zllm_ir.ops  # noqa: F401  (registers the ops)
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.op import OPS


def verify(graph: Graph) -> None:
    """Raise an IRError that names the node for an unknown op or attribute, a use before its definition,
    a value defined twice, a type that the op's rule doesn't give, or a state written twice or read
    after it was overwritten."""
    defined: set[Value] = set()
    for value in (*graph.inputs, *graph.weights, *graph.states):
        if value in defined:
            raise IRError(f"{value.name} is declared twice")
        defined.add(value)
    overwritten: dict[Value, Node] = {}
    names: set[str] = set()
    for node in graph.nodes:
        where = f"{node.op} → {', '.join('%' + v.name for v in node.outputs)}"
        op = OPS.get(node.op)
        if op is None:
            raise IRError(f"{where}: unknown op; known: {', '.join(sorted(OPS))}")
        for value in graph.operands(node):
            if value not in defined:
                raise IRError(f"{where}: uses {value.name} before it is defined")
            if value in overwritten:
                raise IRError(f"{where}: state {value.name} was overwritten by {overwritten[value].op}")
        op.bind(node.inputs)
        attrs = op.bind_attrs(node.attributes)
        types = op.infer_types([v.type if v else None for v in node.inputs], attrs)
        if types != tuple(v.type for v in node.outputs):
            expected, found = (", ".join(map(str, ts)) for ts in (types, (v.type for v in node.outputs)))
            raise IRError(f"{where}: has type {found}, its operands give {expected}")
        for value in node.outputs:
            if value.name in names:
                raise IRError(f"{where}: %{value.name} is defined twice")
            names.add(value.name)
            defined.add(value)
        if op.writes and (before := node.inputs[op.operands.index(op.writes)]) is not None:
            overwritten[before] = node
    for value in graph.outputs:
        if value not in defined:
            raise IRError(f"the graph returns {value.name}, which is not defined")
