"""The reference interpreter: runs any graph on numpy, from the packed bytes. Slow and obviously right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

import zllmc.zllm_ir.ops  # noqa: F401  (registers the ops)
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.formats import FORMATS, decode, row_bytes
from zllmc.zllm_ir.graph import Graph, Value
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.ops import round_to_storage
from zllmc.zllm_ir.types import KVType, TensorType
from zllmc.zllm_ir.verify import written_state

Array = NDArray[Any]


@dataclass(frozen=True)
class PackedRows:
    """A packed weight matrix (rows, columns); slicing decodes just those rows to float32."""

    format: str
    shape: tuple[int, int]
    raw: NDArray[np.uint8]  # (rows, bytes per row)

    def __getitem__(self, rows: slice) -> NDArray[np.float32]:
        return decode(FORMATS[self.format], self.raw[rows])


@dataclass(frozen=True)
class KVState:
    """Keys and values (S, kv_heads, head_dim) of one layer, rounded as its storage would."""

    type: KVType
    keys: Array
    values: Array

    @staticmethod
    def empty(type: KVType) -> KVState:
        nothing = np.zeros((0, type.kv_heads, type.head_dim), np.float32)
        return KVState(type, nothing, nothing)

    def append(self, k: Array, v: Array) -> KVState:
        k, v = (round_to_storage(x, self.type.storage) for x in (k, v))
        return KVState(self.type, np.concatenate([self.keys, k]), np.concatenate([self.values, v]))


def bind_weight(value: Value, raw: NDArray[np.uint8]) -> PackedRows | NDArray[np.float32]:
    """A weight's operand for the references: matrices stay packed, vectors are decoded."""
    if not isinstance(value.type, TensorType):
        raise IRError(f"weight {value.name} is {value.type}, no tensor")
    shape = tuple(int(d) for d in value.type.shape)
    fmt = FORMATS[value.type.dtype]
    rows, row = prod(shape[:-1]), row_bytes(fmt, shape[-1])
    if raw.size != rows * row:
        raise IRError(f"weight {value.name}: {value.type} is {rows * row} bytes, not {raw.size}")
    packed = raw.reshape(rows, row)
    if len(shape) == 2:
        return PackedRows(fmt.name, (shape[0], shape[1]), packed)
    return decode(fmt, packed).reshape(shape)


@dataclass
class Interpreter:
    """Runs `graph` again and again, keeping its states: the oracle for every kernel and artifact.

    `weights` gives each weight's packed bytes (any uint8 array of the right size) by name.
    """

    graph: Graph
    weights: Mapping[str, NDArray[np.uint8]]
    states: dict[str, KVState] = field(init=False)
    bound: dict[Value, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        missing = [w.name for w in self.graph.weights if w.name not in self.weights]
        if missing:
            raise IRError(f"no bytes given for the weights {', '.join(missing[:8])}")
        self.bound = {w: bind_weight(w, self.weights[w.name]) for w in self.graph.weights}
        self.reset()

    def reset(self) -> None:
        """Forget every cached token."""
        self.states = {s.name: KVState.empty(s.type) for s in self.graph.states if isinstance(s.type, KVType)}

    @property
    def position(self) -> int:
        """Tokens cached so far."""
        return max((len(s.keys) for s in self.states.values()), default=0)

    def run(self, tokens: Any, *, all_rows: bool = True) -> list[Any]:
        """One pass over i32 `tokens` (T,): the graph's outputs, states advanced.

        The logits are of every token, or of the last one only.
        """
        tokens = np.asarray(tokens, np.int32)
        if tokens.ndim != 1 or not tokens.size:
            raise IRError(f"a pass takes one row of at least one token, not an array of shape {tokens.shape}")
        feeds = {
            "tokens": tokens,
            "positions": np.arange(self.position, self.position + len(tokens), dtype=np.int32),
            "first_row": np.int32(0 if all_rows else len(tokens) - 1),
        }
        env: dict[Value, Any] = dict(self.bound)
        env |= {v: feeds[v.name] for v in self.graph.inputs}
        env |= {v: self.states[v.name] for v in self.graph.states}
        written = {v: v.name for v in self.graph.states}  # which state each state value is a version of
        for node in self.graph.nodes:
            op = OPS[node.op]
            operands = [None if v is None else env[v] for v in node.inputs]
            result = op.reference(*operands, **node.attributes)
            env |= zip(node.outputs, result if len(node.outputs) > 1 else (result,), strict=True)
            if before := written_state(node):
                after = next(v for v in node.outputs if isinstance(v.type, KVType))
                written[after] = written[before]
        self.states |= {name: env[v] for v, name in written.items()}
        return [env[v] for v in self.graph.outputs]
