"""A thin layer over TVM's TIR builder: what every kernel family needs to say, in one place.

A kernel is a function of (thread, threads, pointers and integers …). Values are TIR expressions; `bind`
gives one a name so that it is computed once. Vectors are TIR vector types with `lanes` elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

Expr = Any


class Kernel:
    """Builds one PrimFunc of (thread, threads, arguments …). An argument's type is `int` or the element type
    that it points to:

        with Kernel("scale", x="float32", n=int) as k:
            x, n = k.arguments
            …
        k.function
    """

    function: Any

    def __init__(self, name: str, *, noalias: bool = True, **arguments: str | type[int]) -> None:
        self.name = name
        self._noalias = noalias  # no two pointers reach the same bytes, unless both only read them
        self._types = arguments
        self._builder = IRBuilder()

    def __enter__(self) -> Kernel:
        self._builder.__enter__()
        self._frame = T.prim_func(s_tir=True)
        self._frame.__enter__()
        T.func_name(self.name)
        T.func_attr({"tirx.noalias": self._noalias, "global_symbol": self.name})
        self.thread = T.arg("thread", T.int32())
        self.threads = T.arg("threads", T.int32())
        raw = [
            T.arg(name, T.int32() if dtype is int else T.handle(dtype)) for name, dtype in self._types.items()
        ]
        self.arguments = tuple(
            value if dtype is int else Memory.at(value, dtype)
            for value, dtype in zip(raw, self._types.values(), strict=True)
        )
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._frame.__exit__(kind, *rest)
        self._builder.__exit__(kind, *rest)
        if kind is None:
            self.function = self._builder.get()


class Memory:
    """A flat array in memory or registers: `m.load(i, lanes)`, `m.store(i, value)`; indices are elements."""

    def __init__(self, buffer: Any, dtype: str) -> None:
        self.buffer = buffer
        self.dtype = dtype

    @classmethod
    def at(cls, pointer: Expr, dtype: Any) -> Memory:
        return cls(T.decl_buffer((1,), dtype, data=pointer, align=1), dtype)

    def load(self, index: Expr, lanes: int = 1) -> Expr:
        return self.buffer[index if lanes == 1 else T.ramp(index, 1, lanes)]

    def store(self, index: Expr, value: Expr) -> None:
        lanes = lanes_of(value)
        T.buffer_store(self.buffer, value, [index if lanes == 1 else T.ramp(index, 1, lanes)])

    def view(self, dtype: str) -> Memory:
        """The same memory as elements of another type."""
        return Memory.at(self.buffer.data, dtype)

    def address(self, index: Expr) -> Expr:
        """Where element `index` lies; of a vector of indices, a place for each lane of a GPU's unit."""
        return T.address_of(self.buffer[index])

    def from_(self, index: Expr) -> Memory:
        """The memory from element `index` (int64) on: keeps 32-bit indices within large arrays."""
        return Memory.at(T.bind(self.address(index)), self.dtype)


def prefetch(memory: Memory, index: Expr, *, write: bool = False) -> None:
    """Ask for the cache line of element `index`, maybe to write it; it may lie outside the memory."""
    address = memory.address(index)
    access, keep, data = (const(v, "int32") for v in (int(write), 3, 1))
    T.evaluate(T.call_llvm_intrin("llvm.prefetch", address, access, keep, data, dtype="void"))


class Register:
    """A variable that holds one vector (or scalar): `r.set(r.get() + x)`. It becomes a machine register
    when all its uses have constant indices, which these have."""

    def __init__(self, dtype: str, lanes: int, initial: Expr | None = None) -> None:
        self.lanes = lanes
        self._memory = Memory(T.alloc_buffer((lanes,), dtype), dtype)
        if initial is not None:
            self.set(initial)

    def get(self) -> Expr:
        return self._memory.load(0, self.lanes)

    def set(self, value: Expr) -> None:
        self._memory.store(0, value)


class LaneArray:
    """`count` words of each lane of a GPU's vector unit: registers, which a function of the prelude takes."""

    def __init__(self, dtype: str, count: int, lanes: int) -> None:
        self.lanes = lanes
        self._memory = Memory(T.alloc_buffer((count * lanes,), dtype, scope="local"), dtype)

    @property
    def pointer(self) -> Expr:
        return self._memory.buffer.data

    def get(self, index: int) -> Expr:
        return self._memory.load(index * self.lanes, self.lanes)

    def set(self, index: int, value: Expr) -> None:
        self._memory.store(index * self.lanes, value)


def local(dtype: str, elements: int) -> Memory:
    """A scratch array on the stack; keep it to a few KiB. From 1 KiB on it starts at a cache line."""
    nbytes = elements * np.dtype(dtype).itemsize
    if nbytes < 1024:
        return Memory(T.alloc_buffer((elements,), dtype), dtype)
    # TVM takes a larger buffer from the heap, which these kernels have none of; this one is aligned to 8.
    memory = Memory.at(bind(T.tvm_stack_alloca("shape", -(-nbytes // 8) + 8)), "uint8")
    end = T.address_of(memory.buffer[const(63, "int64")])
    line = llvm("llvm.ptrmask", "handle", end, const(-64, "int64"))
    return Memory.at(bind(line), dtype)


def block_array(dtype: str, elements: int) -> Memory:
    """An array that the vector units of a GPU's block share; see `barrier`."""
    return Memory(T.alloc_buffer((elements,), dtype, scope="shared"), dtype)


def barrier() -> None:
    """All units of a GPU's block meet here, and see what the others have stored in arrays of the block."""
    call("barrier")


def call(function: str, *arguments: Expr) -> None:
    """Call a function that a GPU's prelude or `simt_words.HELPERS` has; in every lane."""
    T.evaluate(T.call_extern("void", function, *arguments))


def lanes_of(value: Expr) -> int:
    return int(value.ty.dtype.lanes) if hasattr(value, "ty") else 1


def bind(value: Expr) -> Expr:
    """`value` under a name: computed once, here."""
    return T.bind(value)


def hold(value: Expr) -> Expr:
    """`value`, computed once, behind a load: TVM's passes replace a bound variable by its value wherever they
    compare or simplify, which explodes for a chain of bindings that each use the last more than once."""
    return bind(Register(str(value.ty.dtype).split("x")[0], lanes_of(value), value).get())


@contextmanager
def serial(begin: Expr, end: Expr) -> Iterator[Expr]:
    """for i in begin … end−1."""
    with T.serial(begin, end) as i:
        yield i


@contextmanager
def rolled(begin: Expr, end: Expr) -> Iterator[Expr]:
    """As `serial`, but a GPU's compiler shall not unroll it: that takes registers, and not all loops gain."""
    with T.serial(begin, end, annotations={"rolled": True}) as i:
        yield i


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def choose(condition: Expr, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    with T.If(condition):
        with T.Then():
            then()
        with T.Else():
            otherwise()


def broadcast(value: Expr, lanes: int) -> Expr:
    return value if lanes == 1 else T.broadcast(value, lanes)


def const(value: float, dtype: str, lanes: int = 1) -> Expr:
    return broadcast(tirx.const(value, dtype), lanes)


def cast(value: Expr, dtype: str) -> Expr:
    """Convert each lane to `dtype` (an element type)."""
    lanes = lanes_of(value)
    return T.Cast(dtype if lanes == 1 else f"{dtype}x{lanes}", value)


def bits(value: Expr, dtype: str) -> Expr:
    """The same bits as another vector type, e.g. `int32x8` as `uint8x32`."""
    return T.reinterpret(value, dtype=dtype)


def llvm(name: str, dtype: str, *operands: Expr) -> Expr:
    """A pure LLVM intrinsic."""
    return T.call_llvm_pure_intrin(T.llvm_lookup_intrinsic_id(name), *operands, dtype=dtype)
