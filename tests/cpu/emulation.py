"""Runs another CPU's kernels here: its integer instructions are replaced by plain arithmetic, all else stays.

What a kernel does with the instructions (layouts, widths, offsets, tails) is where mistakes happen, and that
is executed as it is; that the instructions themselves do what their manuals say is taken on trust.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from tvm.script.ir_builder import tirx as T

from zllmc.codegen import amx, dot
from zllmc.codegen.tir import Expr, Memory, bind, bits, cast, const, lanes_of, llvm, local, serial
from zllmc.targets.cpu import CpuTarget

SUFFIX = " (emulated)"


def emulated(target: CpuTarget, host: CpuTarget) -> CpuTarget:
    """`target` for a machine that can only run `host`."""
    machine = {"triple": host.triple, "cpu": host.cpu, "features": host.features}
    return replace(target, name=target.name + SUFFIX, requires=host.requires, **machine)


@contextmanager
def emulation(target: CpuTarget) -> Iterator[None]:
    """Within it, kernels for an emulated target are built without that target's instructions."""
    if target.name.endswith(SUFFIX):
        with mock.patch.object(dot, "llvm", _plain), mock.patch.object(amx, "instruction", _MatrixUnit().do):
            yield
    else:
        yield


def _plain(name: str, dtype: str, *operands: Expr) -> Expr:
    match name.removeprefix("llvm."):
        case "x86.avx2.pmadd.wd" | "x86.avx2.pshuf.b":  # which the host has
            return llvm(name, dtype, *operands)
        case "x86.avx512.vpdpbusd.512" | "x86.avx512.vpdpbusd.256":
            return _quads(*operands, signed=False)
        case "aarch64.neon.sdot.v4i32.v16i8":
            return _quads(*operands, signed=True)
        case "x86.avx512.pmaddw.d.512":
            return _pairs(*operands)
        case "x86.avx512.vpdpwssd.512" | "x86.avx512.vpdpwssd.256":
            total, *pairs = operands
            return total + _pairs(*pairs)
        case "x86.avx512.pshuf.b.512":
            halves = [
                llvm(
                    "llvm.x86.avx2.pshuf.b", "uint8x32", *(half("uint8x32", operand) for operand in operands)
                )
                for half in (T.vectorlow, T.vectorhigh)
            ]
            return T.vectorcombine("uint8x64", *halves)
        case "aarch64.neon.tbl1.v16i8":
            return llvm("llvm.x86.ssse3.pshuf.b.128", dtype, *operands)
    raise NotImplementedError(f"no emulation of {name}")


def _quads(total: Expr, w: Expr, x: Expr, *, signed: bool) -> Expr:
    """total + Σ of four products of bytes in each i32 lane."""
    lanes = lanes_of(total)
    w, x = (bits(v, f"int32x{lanes}") for v in (w, x))

    def byte(value: Expr, number: int, signed: bool) -> Any:
        top = value << const(24 - 8 * number, "int32", lanes)
        if signed:
            return top >> const(24, "int32", lanes)
        return (value >> const(8 * number, "int32", lanes)) & const(255, "int32", lanes)

    for number in range(4):
        total = total + byte(w, number, signed) * byte(x, number, True)
    return total


def _pairs(a: Expr, b: Expr) -> Expr:
    """Σ of two products of i16 in each i32 lane."""
    lanes = lanes_of(a) // 2
    a, b = (bits(v, f"int32x{lanes}") for v in (a, b))
    half = const(16, "int32", lanes)
    return ((a << half) >> half) * ((b << half) >> half) + (a >> half) * (b >> half)


class _MatrixUnit:
    """The tile registers in memory, as `ldtilecfg` says how large they are.

    TVM tells LLVM that arrays of other names, and elements of other types, lie elsewhere: what the kernel
    reads or writes otherwise is accessed here as it is there.
    """

    def do(self, name: str, *operands: Expr) -> None:
        getattr(self, name)(*operands)

    def ldtilecfg(self, configuration: Expr) -> None:
        self._configuration, _ = _place(configuration)
        self._bytes = [local("int8", 1024) for _ in range(8)]
        self._sums = [local("int32", 256) for _ in range(8)]

    def tilerelease(self) -> None:
        del self._configuration, self._bytes, self._sums

    def _rows(self, register: Expr) -> Expr:
        return bind(cast(self._configuration.load(48 + int(register)), "int32"))

    def _row_bytes(self, register: Expr) -> Expr:
        low, high = (cast(self._configuration.load(16 + 2 * int(register) + i), "int32") for i in range(2))
        return bind(low + 256 * high)

    def tileloadd64(self, register: Expr, address: Expr, stride: Expr) -> None:
        memory, at = _place(address)
        with serial(0, self._rows(register)) as row, serial(0, self._row_bytes(register)) as i:
            value = bits(memory.load(at + row * int(stride) + i), "int8")
            self._bytes[int(register)].store(row * 64 + i, value)

    def tilestored64(self, register: Expr, address: Expr, stride: Expr) -> None:
        memory, at = _place(address)
        with serial(0, self._rows(register)) as row, serial(0, self._row_bytes(register) // 4) as i:
            memory.store(at + row * (int(stride) // 4) + i, self._sums[int(register)].load(row * 16 + i))

    def tilezero(self, register: Expr) -> None:
        with serial(0, 256) as i:
            self._sums[int(register)].store(i, const(0, "int32"))

    def tdpbssd(self, total: Expr, a: Expr, b: Expr) -> None:
        sums, x, w = self._sums[int(total)], self._bytes[int(a)], self._bytes[int(b)]
        columns, depth = bind(self._row_bytes(total) // 4), self._row_bytes(a)
        with serial(0, self._rows(total)) as row, serial(0, columns) as column, serial(0, depth) as k:
            at = bind(row * 16 + column)
            weight = w.load(k // 4 * 64 + 4 * column + k % 4)
            product = cast(x.load(row * 64 + k), "int32") * cast(weight, "int32")
            sums.store(at, sums.load(at) + product)


def _place(address: Expr) -> tuple[Memory, Expr]:
    """The array and the element whose address it is."""
    element = address.args[0]
    return Memory(element.source, str(element.ty.dtype)), element.indices[0]
