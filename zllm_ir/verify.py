"""The verifier: what must hold of every graph, checked after every pass in tests and with `--verify`."""

from __future__ import annotations

import re

import zllmc.zllm_ir.ops  # noqa: F401  (registers the ops)
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.types import KVType, TensorType, Type

_NAME = re.compile(r"[\w.\-]+")  # what the text form can hold


def verify(graph: Graph) -> None:
    """Raise an IRError that names the node or value where a rule is broken.

    The rules: every name is plain and defined once; a value is defined before it is used; inputs and weights
    are tensors, states are states; ops and attributes are known, and types are those that the op's rule
    gives; a state is never read or written after it was overwritten.
    """
    defined: dict[str, Value] = {}
    declared = [(v, TensorType) for v in (*graph.inputs, *graph.weights)]
    for value, kind in [*declared, *((v, KVType) for v in graph.states)]:
        _define(value, defined)
        if not isinstance(value.type, kind):
            raise IRError(f"{value.name} is declared as {value.type}, which is no {kind.__name__}")

    overwritten: dict[str, Node] = {}
    for node in graph.nodes:
        where = f"{node.op} → {', '.join('%' + v.name for v in node.outputs)}"
        for value in graph.operands(node):
            if defined.get(value.name) != value:
                raise IRError(f"{where}: uses {value.name}: {value.type} before it is defined")
            if value.name in overwritten:
                raise IRError(f"{where}: state {value.name} was overwritten by {overwritten[value.name].op}")
        types = _infer(node, where)
        found = tuple(v.type for v in node.outputs)
        if types != found:
            raise IRError(f"{where}: has type {_list(found)}, its operands give {_list(types)}")
        for value in node.outputs:
            _define(value, defined)
        if before := written_state(node):
            overwritten[before.name] = node
    for value in graph.outputs:
        if defined.get(value.name) != value:
            raise IRError(f"the graph returns {value.name}: {value.type}, which is not defined")


def written_state(node: Node) -> Value | None:
    """The state operand that the node replaces, if it writes one."""
    op = OPS[node.op]
    return node.inputs[op.operands.index(op.writes)] if op.writes else None


def _define(value: Value, defined: dict[str, Value]) -> None:
    if not _NAME.fullmatch(value.name):
        raise IRError(f"{value.name!r} is no name: letters, digits and _ . - only")
    if value.name in defined:
        raise IRError(f"{value.name} is defined twice")
    defined[value.name] = value


def _infer(node: Node, where: str) -> tuple[Type, ...]:
    op = OPS.get(node.op)
    if op is None:
        raise IRError(f"{where}: unknown op; known: {', '.join(sorted(OPS))}")
    try:
        inputs = op.bind(node.inputs)
        return op.infer_types([v.type if v else None for v in inputs], op.bind_attrs(node.attributes))
    except IRError as error:
        raise IRError(f"{where}: {error}") from error


def _list(types: tuple[Type, ...]) -> str:
    return ", ".join(map(str, types))
