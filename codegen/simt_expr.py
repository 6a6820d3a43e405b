"""TIR expressions as C++ for one lane of a vector unit: see `codegen.simt` for how vectors map to lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Call, StringImm
from tvm.target import codegen

from zllmc.codegen.simt_words import HELPERS, MEMORY_TYPES, Words
from zllmc.targets.gpu import LANES
from zllmc.zllm_ir.errors import IRError

_BINARY = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%", "FloorDiv": "/", "FloorMod": "%"}
_BINARY |= {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "And": "&&", "Or": "||"}
_BITWISE = {"BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^", "LShift": "<<", "RShift": ">>"}
_PACKED = {"+": "add", "-": "sub"}
_FUNCTIONS = {"llvm.fma": "ffma", "llvm.rint": "frint", "llvm.sqrt": "fsqrt", "llvm.lrint": "iround"}
_DOUBLE_FUNCTIONS = {"llvm.fma": "dfma", "llvm.rint": "drint"}
# A reduction over lanes, and what idle ones add to it.
_REDUCTIONS = {
    "llvm.vector.reduce.add": ("unit_add", "0"),
    "llvm.vector.reduce.smax": ("unit_max", "0"),
}


LANE_ARRAY = "lane"  # the root of registers


@dataclass(frozen=True)
class Pointer:
    """A pointer: an expression, what stands before its type, the type, and the argument or array it is in."""

    text: str
    space: str
    type: str
    root: str


@dataclass
class Expressions:
    """What the variables and buffers of one function are called, and expressions over them."""

    constant_space: str  # before the type of a pointer to a table at file scope
    variable: Callable[[str, str], str]  # declares a variable of a type with a value; its name
    loading: Callable[[str], None]  # is told of a load from an argument or array
    names: dict[Any, str] = field(default_factory=dict)  # of variables
    pointers: dict[Any, Pointer] = field(default_factory=dict)  # variables that are pointers
    buffers: dict[Any, Pointer] = field(default_factory=dict)
    registers: dict[Any, str] = field(default_factory=dict)  # buffers that are a variable of each lane
    constants: dict[bytes, str] = field(default_factory=dict)  # tables at file scope
    helpers: dict[str, None] = field(default_factory=dict)  # of HELPERS, those in use
    indexed: set[Any] = field(default_factory=set)  # buffers that are more than one register

    # -- memory --------------------------------------------------------------------------------------------

    def pointer(self, node: Any) -> Pointer:
        """A pointer-valued expression."""
        if isinstance(node, tirx.Var):
            return self.pointers[node]
        match op_name(node):
            case "buffer_data":
                return self._home(node.args[0])
            case "address_of":
                load = node.args[0]
                home = self._home(load.source)
                (index,) = load.indices
                type = MEMORY_TYPES[str(load.source.dtype)]
                place = f"{_typed(home, str(load.source.dtype))} + {self.expr(index)}"
                return Pointer(place, home.space, type, home.root)
            case "call_llvm_pure_intrin" if intrinsic_name(node) == "llvm.ptrmask":
                return self._home(node.args[1].args[0].source)  # arrays on the stack are aligned as it is
            case "reinterpret" if isinstance(node.args[0], StringImm):
                data = node.args[0].value.encode("ascii")
                name = self.constants.setdefault(data, f"table{len(self.constants)}")
                return Pointer(name, self.constant_space, "unsigned", name)
        raise IRError(f"no GPU source for the pointer {node}")

    def _home(self, buffer: Any) -> Pointer:
        if buffer not in self.buffers:
            raise IRError("a register has no address")
        return self.buffers[buffer]

    def place(self, buffer: Any, index: Any, words: Words) -> str:
        """The lvalue of what a lane loads or stores at `index` of a buffer."""
        home, dtype = self._home(buffer), str(buffer.dtype)
        if not isinstance(index, tirx.Ramp):
            return f"{_typed(home, dtype)}[{self.expr(index)}]"
        base, stride = self.expr(index.base), int(index.stride)
        if home.root == LANE_ARRAY:
            return f"{home.text}[{int(index.base) // LANES}]"
        if words.each == 1:
            return f"{_typed(home, dtype)}[{base} + lane{'' if stride == 1 else f' * {stride}'}]"
        if stride != 1:
            raise IRError(f"no GPU source for words {stride} elements apart")
        return f"(({home.space}{words.memory}*)({_typed(home, dtype)} + {base}))[lane]"

    def note(self, buffer: Any, index: Any, words: Words) -> None:
        """Remember a buffer of which an element or a part is used on its own: it cannot be a register."""
        first = index.base if isinstance(index, tirx.Ramp) else index
        whole = words.elements == int(buffer.shape[0]) and isinstance(first, tirx.IntImm)
        if not (whole and int(first.value) == 0):
            self.indexed.add(buffer)

    # -- expressions ---------------------------------------------------------------------------------------

    def expr(self, node: Any) -> str:
        """The expression of a lane's part of `node`."""
        kind = type(node).__name__
        if isinstance(node, tirx.Var):
            return self.names[node]
        if kind in _BINARY:
            return self._binary(node, _BINARY[kind])
        if kind in _BITWISE:
            return self._bitwise(node, _BITWISE[kind])
        method: Callable[[Any], str] | None = getattr(self, f"_{kind.lower()}", None)
        if method is None:
            raise IRError(f"no GPU source for the TIR expression {kind}")
        return method(node)

    def _all(self, nodes: Any) -> list[str]:
        return [self.expr(node) for node in nodes]

    def _help(self, name: str, *arguments: str) -> str:
        """A call of a helper function, which is printed along."""
        self.helpers[name] = None
        return f"{name}({', '.join(arguments)})"

    def _intimm(self, node: Any) -> str:
        value = int(node.value)
        match str(node.ty.dtype):
            case "int64":
                return f"(long long){value}"
            case "uint8" | "uint16" | "uint32":
                return f"{value}u"
            case "bool":
                return "true" if value else "false"
        return str(value) if value != -(2**31) else "(-2147483647 - 1)"

    def _floatimm(self, node: Any) -> str:
        value = float(node.value)
        if np.isinf(value):
            return "-INFINITY" if value < 0 else "INFINITY"
        return repr(value) if str(node.ty.dtype) == "float64" else f"{value!r}f"

    def _binary(self, node: Any, operator: str) -> str:
        a, b = self.expr(node.a), self.expr(node.b)
        words = of(node.a)
        if words.each > 1:
            if operator not in _PACKED or words.size > 2:
                raise IRError(f"no GPU source for {operator} of {words.dtype}")
            return self._help(f"{_PACKED[operator]}_x{8 * words.size}", a, b)
        text = f"({a} {operator} {b})"
        if operator in "+-*" and words.size < 4:
            return f"({words.value})({words.memory}){text}"  # wraps as the narrow type does
        return text

    def _bitwise(self, node: Any, operator: str) -> str:
        a, b, words = self.expr(node.a), self.expr(node.b), of(node)
        ones = (1 << 8 * words.size) - 1
        if words.each == 1 or operator in "&|^":
            text = f"({a} {operator} {b})"
            return f"({text} & {ones}u)" if operator == "<<" and words.size < 4 else text
        # A shift of packed elements: what crosses into the neighbour is cleared.
        if words.element.startswith("int") or not isinstance(node.b, tirx.Broadcast):
            raise IRError(f"no GPU source for a shift of {node.ty}")
        by = int(node.b.value.value)
        kept = ones >> by if operator == ">>" else ones << by
        return f"(({a} {operator} {by}) & {words.repeat(kept)}u)"

    def _bitwisenot(self, node: Any) -> str:
        return f"(~{self.expr(node.a)})"

    def _not(self, node: Any) -> str:
        return f"!{self.expr(node.a)}"

    def _min(self, node: Any) -> str:
        return self._help("min_of", self.expr(node.a), self.expr(node.b))

    def _max(self, node: Any) -> str:
        return self._help("max_of", self.expr(node.a), self.expr(node.b))

    def _select(self, node: Any) -> str:
        condition, yes, no = self._all((node.condition, node.true_value, node.false_value))
        if of(node).each > 1 and of(node.condition).elements > 1:
            raise IRError("no GPU source for a choice between packed elements")
        return f"({condition} ? {yes} : {no})"

    def _broadcast(self, node: Any) -> str:
        words, value = of(node), self.expr(node.value)
        if words.each == 1:
            return value
        if isinstance(node.value, tirx.IntImm):
            return f"{words.repeat(int(node.value.value))}u"
        return f"(({value} & {(1 << 8 * words.size) - 1}u) * {words.repeat(1)}u)"

    def _ramp(self, node: Any) -> str:
        return f"({self.expr(node.base)} + lane * {self.expr(node.stride)})"

    def _tensorload(self, node: Any) -> str:
        (index,), words = node.indices, of(node)
        self.note(node.source, index, words)
        if node.source in self.registers:
            return self.registers[node.source]
        self.loading(self._home(node.source).root)
        place = self.place(node.source, index, words)
        if isinstance(index, tirx.Ramp) and not words.full:
            return f"(lane < {words.elements} ? {place} : 0)"
        return place

    def _cast(self, node: Any) -> str:
        to, source, value = of(node), of(node.value), self.expr(node.value)
        if to.element == source.element:
            return value
        if to.each > 1:
            if (source.size, to.size, to.each) != (1, 2, 2):
                raise IRError(f"no GPU source for a cast of {source.dtype} to {to.dtype}")
            return self._help("widen_s8" if source.element == "int8" else "widen_u8", value)
        if source.element == "float16":
            value = f"half_to_float((unsigned short){value})"
        if to.element == "float16":
            return f"(unsigned)float_to_half({value})"
        if to.size < 4:
            return f"({to.value})({to.memory})({value})"
        return value if (source.element, to.element) == ("float16", "float32") else f"({to.value})({value})"

    def _shuffle(self, node: Any) -> str:
        """Elements picked from one vector, or from two in turn.

        What lanes do together gets a variable of its own: all of them must come by, which they would not
        inside one branch of a choice.
        """
        indices = [int(i) for i in node.indices]
        vectors, words = self._all(node.vectors), of(node.vectors[0])
        n = words.elements
        if words.each > 1:
            first = indices[0]
            if words.size == 4 and indices == [*range(first, n, words.each)]:
                return f"{vectors[0]}.{'xyzw'[first]}"  # one word of each lane
            raise IRError("no GPU source for a shuffle of packed elements")

        def together(text: str) -> str:
            return self.variable(words.value, text)

        if len(indices) == 1:
            return together(f"unit_shuffle({vectors[indices[0] // n]}, {indices[0] % n})")
        if len(vectors) == 1 and indices == [i ^ 1 for i in range(n)]:
            return together(f"unit_shuffle_xor({vectors[0]}, 1)")
        if len(vectors) == 1 and indices == list(range(indices[0], indices[0] + len(indices))):
            first = indices[0]
            return (
                together(f"unit_shuffle({vectors[0]}, (lane + {first}) % {LANES})") if first else vectors[0]
            )
        if indices == [i // 2 + i % 2 * n for i in range(2 * n)]:
            a, b = (together(f"unit_shuffle({v}, lane / 2)") for v in vectors)
            return f"(lane % 2 ? {b} : {a})"
        raise IRError(f"no GPU source for a shuffle by {indices}")

    def _call(self, node: Any) -> str:
        match op_name(node):
            case "buffer_data" | "address_of":
                return self.pointer(node).text
            case "reinterpret":
                return self._reinterpret(node)
            case "if_then_else":
                condition, yes, no = self._all(node.args)
                return f"({condition} ? {yes} : {no})"
            case "call_pure_extern" | "call_extern":
                callee, *arguments = node.args
                text = self._all(arguments)
                known = callee.value in HELPERS
                return self._help(callee.value, *text) if known else f"{callee.value}({', '.join(text)})"
            case "call_llvm_pure_intrin" | "call_llvm_intrin":
                return self._llvm(node, intrinsic_name(node), list(node.args[1:]))
        raise IRError(f"no GPU source for the TIR call {op_name(node)}")

    def _reinterpret(self, node: Any) -> str:
        value = node.args[0]
        source, to, text = of(value), of(node), self.expr(value)
        if source.lane_bytes != to.lane_bytes or (not source.full and source.elements != to.elements):
            raise IRError(f"no GPU source for the bits of {source.dtype} as {to.dtype}")
        if source.value == to.value:
            return text
        if to.value == "float":
            return f"as_float((unsigned){text})"
        if source.value == "float":
            return f"({to.value})as_uint({text})"
        if to.lane_bytes < 4:
            return f"({to.value})({to.memory}){text}"
        return f"({to.value}){text}"

    def _llvm(self, node: Any, name: str, arguments: list[Any]) -> str:
        if name in _REDUCTIONS:
            (function, neutral), words = _REDUCTIONS[name], of(arguments[0])
            value = self.expr(arguments[0])
            if words.elements == 1:
                return value
            part = value if words.full else f"lane < {words.elements} ? {value} : {neutral}"
            return self.variable(words.value, f"{function}({part})")
        functions = _DOUBLE_FUNCTIONS if of(node).element == "float64" else _FUNCTIONS
        if name not in functions:
            raise IRError(f"no GPU source for {name} of {of(node).dtype}")
        function, text = functions[name], self._all(arguments)
        return self._help(function, *text) if function in HELPERS else f"{function}({', '.join(text)})"


def of(node: Any) -> Words:
    return Words(str(node.ty.dtype))


def op_name(node: Any) -> str:
    return str(node.op.name).removeprefix("tirx.") if isinstance(node, Call) else type(node).__name__


def intrinsic_name(node: Any) -> str:
    return str(codegen.llvm_get_intrinsic_name(int(node.args[0].value)))


def _typed(pointer: Pointer, dtype: str) -> str:
    if pointer.type == MEMORY_TYPES[dtype]:
        return pointer.text
    return f"(({pointer.space}{MEMORY_TYPES[dtype]}*){pointer.text})"
