"""Norms per head, rotation and the cache write of one layer as one op."""

from __future__ import annotations

from dataclasses import replace

from zllmc.passes.rewrite import eliminate_dead
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.types import TensorType


def fuse_rope_append(graph: Graph) -> Graph:
    """Everything between the q, k, v projections and the attention becomes `rope_append`.

    before:  %4 = split_heads(%1)        after:  %7.q, %7 = rope_append(%1, %2, %3, @kv, @cos, @sin, -, -)
             %5 = rope(%4, @cos, @sin)           %8 = attention(%7.q, %7)
             (the same for k: %6)
             %7 = kv_append(@kv, %6, %v)
             %8 = attention(%5, %7)

    The norms and the rotation are optional. What is done differently to q and k, or isn't a norm or a
    rotation, stays before the new op.
    """
    made = graph.producers()
    nodes: list[Node] = []
    fused: set[Value] = set()  # the states that rope_append nodes give
    for node in graph.nodes:
        append = made.get(state) if node.op == "attention" and (state := node.inputs[1]) else None
        if append and append.op == "kv_append" and append.output not in fused:
            nodes += _fuse(node, append, made)
            fused.add(append.output)
        else:
            nodes.append(node)
    nodes = [n for n in nodes if n.op != "kv_append" or n.output not in fused]
    return eliminate_dead(replace(graph, nodes=tuple(nodes)))


def _fuse(attention: Node, append: Node, made: dict[Value, Node]) -> list[Node]:
    state, k, v = append.inputs
    q = attention.inputs[0]
    if q is None or k is None or v is None:
        raise ValueError(f"{attention.op} without an operand")
    heads, head_dim = int(q.shape[1]), int(q.shape[2])

    cos = sin = q_norm = k_norm = None
    style, eps = "norm", 0.0
    q_rope, k_rope = (_made_by("rope", x, made) for x in (q, k))
    if q_rope and k_rope and (q_rope.inputs[1:], q_rope.attrs) == (k_rope.inputs[1:], k_rope.attrs):
        (q, cos, sin), k, style = q_rope.inputs, k_rope.inputs[0], q_rope.attributes["style"]
    if norm := _head_norm(q, head_dim, made):
        (q, q_norm), eps = norm.inputs, norm.attributes["eps"]
    if (norm := _head_norm(k, head_dim, made)) and (q_norm is None or norm.attributes["eps"] == eps):
        (k, k_norm), eps = norm.inputs, norm.attributes["eps"]

    before: list[Node] = []
    name = append.output.name
    rows = [_rows(x, f"{name}.{part}_rows", made, before) for x, part in ((q, "q"), (k, "k"), (v, "v"))]
    queries = Value(f"{name}.q", attention.output.type)
    rope_append = Node(
        "rope_append",
        (*rows, state, cos, sin, q_norm, k_norm),
        (("heads", heads), ("style", style), ("eps", eps)),
        (queries, append.output),
    )
    return [*before, rope_append, replace(attention, inputs=(queries, append.output))]


def _made_by(op: str, value: Value | None, made: dict[Value, Node]) -> Node | None:
    node = made.get(value) if value is not None else None
    return node if node and node.op == op else None


def _head_norm(value: Value | None, head_dim: int, made: dict[Value, Node]) -> Node | None:
    """The norm that makes `value`, if it has one gain for all heads."""
    norm = _made_by("rms_norm", value, made)
    return norm if norm and norm.inputs[1] and norm.inputs[1].shape == (head_dim,) else None


def _rows(value: Value | None, name: str, made: dict[Value, Node], before: list[Node]) -> Value | None:
    """`value` (T, heads, E) as (T, heads · E): what was split, or else merged again under `name`."""
    if split := _made_by("split_heads", value, made):
        return split.inputs[0]
    if value is None:
        return None
    tokens, heads, head_dim = value.shape
    merged = Value(name, TensorType("f32", (tokens, heads * head_dim)))
    before.append(Node("merge_heads", (value,), (), (merged,)))
    return merged
