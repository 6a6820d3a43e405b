"""What the passes share: replacing nodes by rule, and dropping what nothing uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from zllmc.zllm_ir.graph import Graph, Node, Value

Only: TypeAlias = Callable[[Value | None, str], Node | None]
"""only(value, op): the node that makes `value`, if it is an `op` and `value` has no other use."""

Rule: TypeAlias = Callable[[Node, Only], Sequence[Node] | None]
"""The nodes that replace this one, or None to keep it."""


def fuse(graph: Graph, rule: Rule) -> Graph:
    """Replace nodes by `rule`, in order; a rule sees what the nodes before became.

    The new nodes must define every output of the node that they replace. Nodes that a rule absorbed are left
    without uses and go.
    """
    uses = count_uses(graph)
    made: dict[Value, Node] = {}

    def only(value: Value | None, op: str) -> Node | None:
        node = made.get(value) if value is not None else None
        return node if value is not None and node and node.op == op and uses[value] == 1 else None

    nodes: list[Node] = []
    for node in graph.nodes:
        result = rule(node, only)
        new = [node] if result is None else result
        nodes += new
        made |= {value: n for n in new for value in n.outputs}
    return eliminate_dead(replace(graph, nodes=tuple(nodes)))


def count_uses(graph: Graph) -> Counter[Value]:
    """How often each value is an operand or an output of the graph."""
    uses = Counter(graph.outputs)
    for node in graph.nodes:
        uses.update(graph.operands(node))
    return uses


def substitute(node: Node, values: Mapping[Value, Value]) -> Node:
    """The node with its operands and outputs replaced where `values` says so."""
    return replace(
        node,
        inputs=tuple(None if v is None else values.get(v, v) for v in node.inputs),
        outputs=tuple(values.get(v, v) for v in node.outputs),
    )


def eliminate_dead(graph: Graph) -> Graph:
    """Drop nodes that no output depends on.

    before:  %1 = rms_norm(%0, @w)    after:  %2 = scale(%0)
             %2 = scale(%0)                   return %2
             return %2

    Declarations stay: a graph's inputs, weights and states don't change.
    """
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(graph.operands(node))
            kept.append(node)
    return replace(graph, nodes=tuple(reversed(kept)))
