"""Prints a kernel as CUDA, HIP or Metal source: one TIR function, three dialects of C++.

A GPU is seen as a machine with many vector units of LANES lanes. The kernel families are written for a vector
machine, as (thread, threads) with values of `lanes` elements; here a unit's lanes are LANES neighbouring GPU
threads, and a thread is a unit (`worker` in the source, since Metal has other plans for the word):

    a scalar                     the same in all lanes
    a vector of N ≤ LANES        element i in lane i; the lanes from N on hold nothing of use
    a vector of N = k·LANES      elements k·i … k·i + k − 1 in lane i, packed in one 16- or 32-bit word
    a register                   a variable of each lane
    a `tir.LaneArray`            an array of registers of each lane
    an array on the stack        shared memory of the unit
    a load of a run of elements  neighbouring lanes load neighbouring addresses

So memory accesses coalesce by construction, a branch never diverges within a unit, and a reduction over a
vector is one over lanes. Kernels call the vocabulary of `prelude.h`, which each dialect implements natively.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tvm import tirx

from zllmc.codegen.simt_expr import LANE_ARRAY, Expressions, Pointer, intrinsic_name, of, op_name
from zllmc.codegen.simt_words import HELPERS, MEMORY_TYPES, VALUE_TYPES, Words
from zllmc.targets.gpu import LANES
from zllmc.zllm_ir.errors import IRError


@dataclass(frozen=True)
class Dialect:
    """How a language spells what is not an expression. In Metal, coordinates are arguments."""

    suffix: str  # of files
    device: str = ""  # before the type of a pointer to global memory
    shared: str = ""  # before the type of a pointer to shared memory
    private: str = ""  # before the type of a pointer to variables of a thread
    shared_array: str = "__shared__ alignas(16) "
    constant: str = "const "  # before the type of a pointer to a table at file scope
    table: str = "static __device__ const "
    function: str = "static __device__ inline "
    long: str = "long long"  # 64 bits
    metal: bool = False


DIALECTS = {
    "cuda": Dialect("cu"),
    "hip": Dialect("hip"),
    "metal": Dialect(
        "metal",
        "device ",
        "threadgroup ",
        "thread ",
        "threadgroup ",
        "constant ",
        "constant ",
        "static inline ",
        "long",
        metal=True,
    ),
}


@dataclass(frozen=True)
class Source:
    """A kernel's text and the shape of its launch: `blocks` blocks of `threads` GPU threads."""

    name: str
    text: str
    blocks: int
    threads: int
    shared_bytes: int  # of a block


def print_source(function: Any, dialect: Dialect, blocks: int, units: int, resident: int = 1) -> Source:
    """The source of a TIR function for `blocks` blocks of `units` vector units each. A multiprocessor shall
    have registers for `resident` blocks at a time.

    Raises IRError for TIR that has no counterpart on a GPU.
    """
    # Which arguments are written, and which buffers are indexed, is known at the end only.
    probe = _Printer(dialect, blocks, units, resident, set(), None)
    probe.print(function)
    return _Printer(dialect, blocks, units, resident, probe.written, probe.x.indexed).print(function)


@dataclass
class _Printer:
    dialect: Dialect
    blocks: int
    units: int
    resident: int
    written: set[str]  # arguments and arrays that are stored through
    arrays: set[Any] | None  # buffers on the stack that aren't registers; all where unknown
    lines: list[str] = field(default_factory=list)
    indent: int = 1
    stack: dict[str, int] = field(default_factory=dict)  # a unit's arrays and their bytes
    shared: dict[str, int] = field(default_factory=dict)  # the block's
    numbers: int = 0
    stored: bool = False  # to an array on the stack since lanes met
    loaded: bool = False

    def print(self, function: Any) -> Source:
        self.x = Expressions(self.dialect.constant, self._variable, self._loading)
        thread, threads, *pointers = function.params
        self.x.names[thread], self.x.names[threads] = "worker", str(self.blocks * self.units)
        arguments = [
            self._argument(i, p, bool(function.attrs["tirx.noalias"])) for i, p in enumerate(pointers)
        ]
        self._statement(function.body)
        name = str(function.attrs["global_symbol"])
        sizes = {f"{array}_all": self.units * size for array, size in self.stack.items()} | self.shared
        arrays = [f"  {self.dialect.shared_array}unsigned {a}[{size // 4}];" for a, size in sizes.items()]
        tables = [self._table(data, table) for data, table in self.x.constants.items()]
        spaces = {name: getattr(self.dialect, name) for name in ("function", "device", "shared", "private")}
        helpers = [HELPERS[name].format(**spaces) for name in self.x.helpers]
        parts = [
            '#include "prelude.h"\n',
            *helpers,
            *tables,
            *self._head(name, arguments),
            *arrays,
            *self.lines,
        ]
        text = "\n".join([*parts, "}\n"]).replace("long long", self.dialect.long)
        return Source(name, text, self.blocks, self.units * LANES, sum(sizes.values()))

    def _argument(self, number: int, pointer: Any, noalias: bool) -> str:
        space = f"{self.dialect.device}{'' if pointer.name in self.written else 'const '}"
        element = MEMORY_TYPES[str(pointer.ty.element_type)]
        self.x.pointers[pointer] = Pointer(pointer.name, space, element, pointer.name)
        if self.dialect.metal:
            return f"{space}{element}* {pointer.name} [[buffer({number})]]"
        return f"{space}{element}* {'__restrict__ ' if noalias else ''}{pointer.name}"

    def _head(self, name: str, arguments: list[str]) -> list[str]:
        if self.dialect.metal:
            arguments = [
                *arguments,
                "uint thread_position [[thread_position_in_threadgroup]]",
                "uint3 block_position [[threadgroup_position_in_grid]]",
            ]
            opening, inside, block = "kernel void", "int(thread_position)", "int(block_position.x)"
        else:
            opening = f'extern "C" __global__ void __launch_bounds__({self.units * LANES}, {self.resident})'
            inside, block = "int(threadIdx.x)", "int(blockIdx.x)"
        return [
            f"{opening} {name}({', '.join(arguments)}) {{",
            f"  const int lane = {inside} % {LANES}, unit = {inside} / {LANES};",
            f"  const int worker = {block} * {self.units} + unit;",
        ]

    def _table(self, data: bytes, name: str) -> str:
        words = ", ".join(map(str, np.frombuffer(data, "<u4")))
        return f"{self.dialect.table}unsigned {name}[{len(data) // 4}] = {{{words}}};"

    # -- statements ----------------------------------------------------------------------------------------

    def _emit(self, line: str) -> None:
        self.lines.append("  " * self.indent + line)

    def _new(self, letter: str) -> str:
        self.numbers += 1
        return f"{letter}{self.numbers}"

    def _variable(self, type: str, value: str) -> str:
        name = self._new("v")
        self._emit(f"const {type} {name} = {value};")
        return name

    def _statement(self, node: Any) -> None:
        kind = type(node).__name__
        method: Callable[[Any], None] | None = getattr(self, f"_{kind.lower()}", None)
        if method is None:
            raise IRError(f"no GPU source for the TIR statement {kind}")
        method(node)

    def _seqstmt(self, node: Any) -> None:
        for statement in node.seq:
            self._statement(statement)

    def _declbuffer(self, node: Any) -> None:
        self.x.buffers[node.buffer] = self.x.pointer(node.data)

    def _allocbuffer(self, node: Any) -> None:
        buffer = node.buffer
        words = Words(str(buffer.dtype))
        if buffer.scope() == "shared":
            name = self._new("b")
            self.shared[name] = int(buffer.shape[0]) * words.size
            self.x.buffers[buffer] = Pointer(name, self.dialect.shared, "unsigned", name)
            return
        if buffer.scope() == "local":
            name = self._new("m")
            self._emit(f"{VALUE_TYPES[words.element]} {name}[{int(buffer.shape[0]) // LANES}];")
            self.x.buffers[buffer] = Pointer(name, "", VALUE_TYPES[words.element], LANE_ARRAY)
            return
        if self.arrays is None or buffer in self.arrays:
            self.x.buffers[buffer] = self._array(int(buffer.shape[0]) * words.size)
            return
        name = self.x.registers[buffer] = self._new("r")
        self._emit(f"{VALUE_TYPES[words.element]} {name};")

    def _array(self, nbytes: int) -> Pointer:
        name, size = self._new("a"), -(-nbytes // 16) * 16
        self.stack[name] = size
        self._emit(f"{self.dialect.shared}unsigned* const {name} = {name}_all + unit * {size // 4};")
        return Pointer(name, self.dialect.shared, "unsigned", name)

    def _bind(self, node: Any) -> None:
        value, var = node.value, node.var
        if not hasattr(var.ty, "element_type"):
            self.x.names[var] = self._variable(of(value).value, self.x.expr(value))
        elif op_name(value) == "tvm_stack_alloca":
            self.x.pointers[var] = self._array(8 * int(value.args[1]))
        else:
            pointer = self.x.pointer(value)
            name = self._new("p")
            self._emit(f"{pointer.space}{pointer.type}* const {name} = {pointer.text};")
            self.x.pointers[var] = replace(pointer, text=name)

    def _for(self, node: Any) -> None:
        begin, extent = self._uniform(node.min), node.extent
        if isinstance(extent, tirx.Sub) and extent.b.same_as(node.min):
            end = self._uniform(extent.a)
        else:
            end = f"{begin} + {self._uniform(extent)}" if begin != "0" else self._uniform(extent)
        name = self.x.names[node.loop_var] = self._new("i")
        self._sync()
        if "rolled" in node.annotations:
            self._emit("#pragma unroll 1")
        self._emit(f"for (int {name} = {begin}; {name} < {end}; ++{name}) {{")
        self._block(node.body)

    def _ifthenelse(self, node: Any) -> None:
        condition = self._uniform(node.condition)
        self._sync()
        self._emit(f"if ({condition}) {{")
        self._block(node.then_case, close=node.else_case is None)
        if node.else_case is not None:
            self._emit("} else {")
            self._block(node.else_case)

    def _uniform(self, node: Any) -> str:
        """An expression that decides where lanes go: it is evaluated before they meet, if it loads from what
        they share."""
        before, self.loaded = self.loaded, False
        text = self.x.expr(node)
        if self.loaded:
            text = self._variable(of(node).value, text)
        self.loaded |= before
        return text

    def _block(self, body: Any, *, close: bool = True) -> None:
        self._sync()
        self.indent += 1
        self._statement(body)
        self._sync()
        self.indent -= 1
        if close:
            self._emit("}")

    def _evaluate(self, node: Any) -> None:
        if isinstance(node.value, tirx.IntImm):
            return
        if op_name(node.value) == "call_llvm_intrin" and intrinsic_name(node.value) == "llvm.prefetch":
            return  # a GPU hides the wait by running other units
        self._emit(f"{self.x.expr(node.value)};")

    def _bufferstore(self, node: Any) -> None:
        (index,), words, value = node.indices, of(node.value), self.x.expr(node.value)
        self.x.note(node.buffer, index, words)
        if node.buffer in self.x.registers:
            self._emit(f"{self.x.registers[node.buffer]} = {value};")
            return
        root = self.x.buffers[node.buffer].root
        self.written.add(root)
        guard = "" if words.full else f"if (lane < {words.elements}) "
        if root in self.stack:
            if self.loaded:  # maybe by this very value
                value = self._variable(words.value, value)
                self._sync()
            self.stored = True
        stored = f"({words.memory}){value}" if words.lane_bytes < 4 else value
        self._emit(f"{guard}{self.x.place(node.buffer, index, words)} = {stored};")

    def _loading(self, root: str) -> None:
        if root in self.stack:
            if self.stored:
                self._sync()
            self.loaded = True

    def _sync(self) -> None:
        """Lanes meet between a store to an array that they share and a load from it, in either order."""
        if self.stored or self.loaded:
            self._emit("unit_sync();")
        self.stored = self.loaded = False
