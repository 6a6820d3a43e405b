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

from zllmc.codegen import dot
from zllmc.codegen.tir import Expr, bits, const, lanes_of, llvm
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
        with mock.patch.object(dot, "llvm", _plain):
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
