"""Types of the values in a graph: tensors, packed weights, and attention state."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from zllmc.zllm_ir.errors import IRError

Term: TypeAlias = tuple[tuple[str, ...], int]  # symbols, sorted, and their product's factor


@dataclass(frozen=True, repr=False)
class Expr:
    """A polynomial in symbols, with integer factors: T, S + T, 2*T - 1. Equal ones compare equal, since their
    terms are in order and none is 0. Arithmetic gives an int where no symbol is left."""

    terms: tuple[Term, ...]

    def __add__(self, other: Dim) -> Dim:
        return _sum([*self.terms, *_terms(other)])

    def __mul__(self, other: Dim) -> Dim:
        return _sum((tuple(sorted(a + b)), p * q) for a, p in self.terms for b, q in _terms(other))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + -other

    def __rsub__(self, other: int) -> Dim:
        return -self + other

    def __int__(self) -> int:
        raise IRError(f"{self} is no number before its symbols are known")

    def __repr__(self) -> str:
        text = ""
        for names, factor in self.terms:
            factors = [str(abs(factor))] if abs(factor) != 1 or not names else []
            sign = (" - " if factor < 0 else " + ") if text else "-" if factor < 0 else ""
            text += sign + "*".join([*factors, *names])
        return text


Dim: TypeAlias = int | Expr


def fixed(dim: Dim, values: Mapping[Expr, int]) -> Dim:
    """The dimension with these symbols replaced by numbers."""
    if isinstance(dim, int):
        return dim
    result: Dim = 0
    for names, factor in dim.terms:
        term: Dim = factor
        for symbol in map(_symbol, names):
            term = term * values.get(symbol, symbol)
        result = result + term
    return result


def _symbol(name: str) -> Expr:
    return Expr((((name,), 1),))


def _terms(dim: Dim) -> tuple[Term, ...]:
    return dim.terms if isinstance(dim, Expr) else (((), dim),)


def _sum(terms: Iterable[Term]) -> Dim:
    factors: dict[tuple[str, ...], int] = defaultdict(int)
    for names, factor in terms:
        factors[names] += factor
    left = sorted((term for term in factors.items() if term[1]), key=lambda term: (not term[0], term[0]))
    constant = not any(names for names, _ in left)
    return sum(factor for _, factor in left) if constant else Expr(tuple(left))


T = _symbol("T")  # tokens in this pass
S = _symbol("S")  # tokens cached before this pass
R = _symbol("R")  # rows of this pass whose logits are wanted

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
