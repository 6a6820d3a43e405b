"""Types of the values in a graph: tensors, packed weights, and attention state."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from zllmc.zllm_ir.errors import IRError

Dim: TypeAlias = int | sympy.Expr

T = sympy.Symbol("T", integer=True, positive=True)  # tokens in this pass
S = sympy.Symbol("S", integer=True, nonnegative=True)  # tokens cached before this pass
R = sympy.Symbol("R", integer=True, positive=True)  # rows of this pass whose logits are wanted

SYMBOLS = {"T": T, "S": S, "R": R}


@dataclass(frozen=True)
class TensorType:
    """A dense tensor. `dtype` is `f32`, `i32`, …, or a block format's name for a packed weight.

    `shape` is row-major. A packed weight has shape (rows, columns): `columns` is the axis that
    blocks run along, and the one that a linear contracts.
    """

    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class KVType:
    """State of one attention layer: keys and values of every cached token.

    `storage` is how an element is kept: `f32` (reference only), `f16`, or `q8` (int8 in groups of 64
    along head_dim with one f16 scale each).
    """

    kv_heads: int
    head_dim: int
    storage: str = "f16"

    def __str__(self) -> str:
        return f"kv.{self.storage}[{self.kv_heads}, {self.head_dim}]"

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in this layer."""
        elements = 2 * self.kv_heads * self.head_dim
        match self.storage:
            case "f32":
                return 4 * elements
            case "f16":
                return 2 * elements
            case "q8":
                return elements + 2 * 2 * self.kv_heads * -(-self.head_dim // 64)
        raise IRError(f"unknown KV storage {self.storage!r}: one of f32, f16, q8")


Type = TensorType | KVType

_TYPE = re.compile(r"(?P<head>[\w.]+)\[(?P<dims>[^\]]*)\]")


def parse_type(text: str) -> Type:
    """The inverse of `str(type)`."""
    match = _TYPE.fullmatch(text.strip())
    if not match:
        raise IRError(f"not a type: {text!r}")
    dims = tuple(_parse_dim(d) for d in match["dims"].split(",") if d.strip())
    head = match["head"]
    if head.startswith("kv."):
        if len(dims) != 2 or not all(isinstance(d, int) for d in dims):
            raise IRError(f"not a state: {text!r:.80}")
        return KVType(int(dims[0]), int(dims[1]), head.removeprefix("kv."))
    return TensorType(head, dims)


def _parse_dim(text: str) -> Dim:
    """An integer, or sums, differences and products of integers and symbols: `T`, `S + T`, `2*T`."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError):
        raise IRError(f"not a dimension: {text!r:.80}") from None


def _evaluate(node: ast.expr, text: str) -> Dim:
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            return number
        case ast.Name(id=name) if name in SYMBOLS:
            return SYMBOLS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, text)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            a, b = _evaluate(left, text), _evaluate(right, text)
            return a + b if isinstance(op, ast.Add) else a - b if isinstance(op, ast.Sub) else a * b
    raise IRError(f"not a dimension: {text!r:.80}")
