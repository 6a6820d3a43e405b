"""The model graph: a list of nodes in SSA order, and the builder that appends to it.

A graph holds no weight data. Weights are named values with a packed type; `zllm_ir.interpreter` and
the packers get their bytes from the model file by that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import zllmc.zllm_ir.attention_ops
import zllmc.zllm_ir.choice_ops
import zllmc.zllm_ir.fused_ops
import zllmc.zllm_ir.ops  # noqa: F401  (these register their ops)
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.op import OPS, Op
from zllmc.zllm_ir.types import KVType, TensorType, Type

Attr = int | float | str | bool | None | tuple["Attr", ...]


@dataclass(frozen=True)
class Value:
    """A named SSA value: the graph's input, a weight, a state, or one output of a node."""

    name: str
    type: Type = field(hash=False)  # passes look values up by the thousand, and names tell them apart

    @property
    def shape(self) -> tuple[Any, ...]:
        if not isinstance(self.type, TensorType):
            raise IRError(f"{self.name} is {self.type}, which has no shape")
        return self.type.shape


@dataclass(frozen=True)
class Node:
    """One operation. Absent optional operands are None in `inputs`."""

    op: str
    inputs: tuple[Value | None, ...]
    attrs: tuple[tuple[str, Attr], ...]
    outputs: tuple[Value, ...]

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self.attrs)

    @property
    def output(self) -> Value:
        """The only output; an error where there are several."""
        (value,) = self.outputs
        return value


@dataclass(frozen=True)
class Graph:
    """A dataflow graph in SSA order: every value is defined before it is used."""

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Value, ...]
    states: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]

    def producers(self) -> dict[Value, Node]:
        return {v: n for n in self.nodes for v in n.outputs}

    def consumers(self) -> dict[Value, list[Node]]:
        users: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(v for v in node.inputs if v is not None):
                users.setdefault(value, []).append(node)
        return users

    def operands(self, node: Node) -> Iterator[Value]:
        return (v for v in node.inputs if v is not None)


@dataclass
class Builder:
    """Builds a graph one op at a time: `h = g.rms_norm(x, w, eps=1e-5)`.

    Every registered op is a method: positional arguments are its operands (None for an absent optional
    one), keywords its attributes. It returns the output value, or a tuple of them.
    """

    name: str
    inputs: list[Value] = field(default_factory=list)
    weights: dict[str, Value] = field(default_factory=dict)
    states: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    _count: int = 0

    def input(self, name: str, type: Type) -> Value:
        value = Value(name, type)
        self.inputs.append(value)
        return value

    def weight(self, name: str, type: TensorType) -> Value:
        """The weight of that name; the same value when asked for twice (a tied head)."""
        value = self.weights.setdefault(name, Value(name, type))
        if value.type != type:
            raise IRError(f"weight {name} is {value.type} and {type}")
        return value

    def state(self, name: str, type: KVType) -> Value:
        value = Value(name, type)
        self.states.append(value)
        return value

    def emit(self, op: Op, operands: Iterable[Value | None], attrs: Mapping[str, Any]) -> Any:
        inputs = op.bind(operands)
        full = op.bind_attrs(attrs)
        types = op.infer_types([v.type if v else None for v in inputs], full)
        outputs = tuple(Value(f"{self._count + i}", t) for i, t in enumerate(types))
        self._count += len(outputs)
        self.nodes.append(Node(op.name, inputs, tuple(full.items()), outputs))
        return outputs if len(outputs) > 1 else outputs[0]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in OPS:
            raise AttributeError(f"no op {name!r}")
        return lambda *operands, **attrs: self.emit(OPS[name], operands, attrs)

    def finish(self, *outputs: Value) -> Graph:
        return Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.weights.values()),
            tuple(self.states),
            tuple(self.nodes),
            outputs,
        )
