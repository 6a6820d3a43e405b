"""From the graph to kernel calls."""

from __future__ import annotations

from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.fused_ops import is_a8
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.kernel_graph import (
    KEY_BLOCK,
    ROW_PAD,
    KernelCall,
    KernelGraph,
    KernelNode,
    KVOperand,
    Operand,
    View,
)
from zllmc.zllm_ir.types import KVType, TensorType
from zllmc.zllm_ir.verify import written_state

_VIEWS = ("split", "split_heads", "merge_heads")
_PACKED = {"linear": 1, "embedding": 1}  # the operand that kernels read in its block format


def lower(graph: Graph, *, name: str, context: int, max_tokens: int, max_rows: int) -> KernelGraph:
    """The kernel calls of one entry point; see `zllm_ir.kernel_graph` for what they are given.

    Ops that only say how memory is read (`split`, `split_heads`, `merge_heads`) become views, `concat_rows` a
    joined weight. Caches have room for `context` tokens, buffers for passes of `max_tokens` tokens and logits
    of `max_rows` rows.
    """
    capacity = -(-context // KEY_BLOCK) * KEY_BLOCK
    joined = {n.output: tuple(graph.operands(n)) for n in graph.nodes if n.op == "concat_rows"}
    weights = {*graph.weights, *joined}
    states = {s: s for s in graph.states}  # versions of a state → the state
    operands: dict[Value, Operand] = {v: _input(v) for v in graph.inputs}
    views: dict[Value, View] = {}
    nodes: list[KernelNode] = []

    def operand(node: Node, index: int) -> Operand | KVOperand | None:
        value = node.inputs[index]
        if value is None:
            return None
        if isinstance(value.type, KVType):
            return KVOperand(value.type, capacity)
        if value in weights:
            packed = _PACKED.get(node.op) == index
            return Operand(value.type if packed else TensorType("f32", value.type.shape))
        return operands[value]

    for node in graph.nodes:
        if node.op in _VIEWS:
            _view(node, operands, views)
            continue
        if node.op == "concat_rows":
            continue
        if before := written_state(node):
            after = next(v for v in node.outputs if isinstance(v.type, KVType))
            states[after] = states[before]
        results = {v: _result(v.type) for v in node.outputs if isinstance(v.type, TensorType)}
        operands |= results
        call = KernelCall(
            node.op,
            node.attrs,
            tuple(operand(node, i) for i in range(len(node.inputs))),
            tuple(results.values()),
        )
        inputs = tuple(v if v is None else states.get(v, v) for v in node.inputs)
        nodes.append(KernelNode(call, inputs, tuple(results)))

    outputs = tuple(v for v in graph.outputs if isinstance(v.type, TensorType))
    computed = {v for node in nodes for v in node.outputs}
    if not computed.issuperset(outputs):
        raise IRError(f"{graph.name}: an output of the graph is the result of no kernel")
    return KernelGraph(
        name,
        graph.inputs,
        (*graph.weights, *joined),
        graph.states,
        tuple(nodes),
        outputs,
        views,
        max_tokens,
        max_rows,
        joined,
    )


def _input(value: Value) -> Operand:
    if not isinstance(value.type, TensorType):
        raise IRError(f"input {value.name} is {value.type}, no tensor")
    return Operand(value.type, stride=1 if value.type.shape else 0)


def _result(type: TensorType) -> Operand:
    width = Operand(type).width
    return Operand(type, stride=width if is_a8(type.dtype) else -(-width // ROW_PAD) * ROW_PAD)


def _view(node: Node, operands: dict[Value, Operand], views: dict[Value, View]) -> None:
    """Let the node's outputs be parts of its operand's rows."""
    (x,) = node.inputs
    if x is None or x not in operands or operands[x].type.dtype != "f32":
        raise IRError(f"{node.op}: no view of {x and x.type} exists")
    if node.op == "split" and len(x.shape) != 2:
        raise IRError(f"split: parts of {x.type} aren't contiguous within its rows")
    base, start = (views[x].base, views[x].offset) if x in views else (x, 0)
    for part in node.outputs:
        if start % ROW_PAD:
            raise IRError(f"{node.op}: {part.name} would start at element {start}, no multiple of {ROW_PAD}")
        packed = _result(TensorType("f32", part.shape))
        # The stride of a single row has no effect: keep calls with and without a view equal.
        operands[part] = packed if packed.single_row else Operand(packed.type, operands[x].stride)
        views[part] = View(base, start)
        start += packed.width
