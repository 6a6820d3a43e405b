"""The text form of a graph: `parse(print_graph(g)) == g`."""

from __future__ import annotations

import ast
import re

import zllmc.zllm_ir.ops  # noqa: F401  (registers the ops)
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.types import parse_type

_HEADER = re.compile(r"graph (?P<name>\S+)")
_DECLARATION = re.compile(r"(?P<kind>input|weight|state) (?P<name>\S+): (?P<type>.+)")
_NODE = re.compile(r"(?P<outputs>%.+?) = (?P<op>\w+)\((?P<inputs>[^)]*)\)(?: (?P<attrs>\{.*\}))?")
_OUTPUT = re.compile(r"%(?P<name>[^\s:,]+): (?P<type>[\w.]+\[[^\]]*\])")


def print_graph(graph: Graph) -> str:
    """The graph as text, one declaration or node a line."""
    lines = [f"graph {graph.name}"]
    for kind, values in (("input", graph.inputs), ("weight", graph.weights), ("state", graph.states)):
        lines += [f"{kind} {v.name}: {v.type}" for v in values]
    declared = {v for values in (graph.inputs, graph.weights, graph.states) for v in values}

    def reference(value: Value | None) -> str:
        return "-" if value is None else f"{'@' if value in declared else '%'}{value.name}"

    for node in graph.nodes:
        outputs = ", ".join(f"%{v.name}: {v.type}" for v in node.outputs)
        operands = ", ".join(map(reference, node.inputs))
        attrs = f" {dict(node.attrs)!r}" if node.attrs else ""
        lines.append(f"{outputs} = {node.op}({operands}){attrs}")
    lines.append("return " + ", ".join(map(reference, graph.outputs)))
    return "\n".join(lines) + "\n"


def parse(text: str) -> Graph:
    """The graph that `print_graph` printed; an IRError names the line that is wrong."""
    name = ""
    declared: dict[str, list[Value]] = {"input": [], "weight": [], "state": []}
    env: dict[str, Value] = {}
    nodes: list[Node] = []
    outputs: tuple[Value, ...] = ()

    def resolve(reference: str) -> Value | None:
        return None if reference == "-" else env[reference]

    for number, line in enumerate(text.splitlines(), 1):
        try:
            if not line.strip():
                continue
            if match := _HEADER.fullmatch(line):
                name = match["name"]
            elif match := _DECLARATION.fullmatch(line):
                value = Value(match["name"], parse_type(match["type"]))
                declared[match["kind"]].append(value)
                env["@" + value.name] = value
            elif line.startswith("return "):
                references = line.removeprefix("return ").split(", ")
                outputs = tuple(env[r] for r in references)
            elif match := _NODE.fullmatch(line):
                results = tuple(Value(n, parse_type(t)) for n, t in _OUTPUT.findall(match["outputs"]))
                operands = tuple(resolve(r) for r in match["inputs"].split(", ") if r)
                attrs = tuple(ast.literal_eval(match["attrs"]).items()) if match["attrs"] else ()
                nodes.append(Node(match["op"], operands, attrs, results))
                env |= {"%" + v.name: v for v in results}
            else:
                raise IRError("neither a declaration, a node nor a return")
        except KeyError as error:
            raise IRError(f"line {number}: {error.args[0]} is used before it is defined: {line}") from None
        except (IRError, ValueError, SyntaxError, TypeError, AttributeError) as error:
            raise IRError(f"line {number}: {error}: {line}") from None
    return Graph(
        name,
        tuple(declared["input"]),
        tuple(declared["weight"]),
        tuple(declared["state"]),
        tuple(nodes),
        outputs,
    )
