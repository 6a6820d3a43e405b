"""Intel's matrix unit (AMX-INT8): sums of i8 products of up to 16 rows with 16 columns, 64 deep.

A tile register holds up to 16 rows of up to 64 bytes. `tdpbssd` adds A · B to i32 sums, where A has 4·k bytes
in each row, and row i of B holds columns 4·i … 4·i + 3 of each of 16 weight rows, as `codegen.packing` has
them in a step's vector. It takes 16 cycles whatever the depth (Intel 64 and IA-32 Architectures Optimization
Reference Manual, chapter 20).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.tir import Expr, Memory, broadcast, cast, const, local

ROWS = 16  # of x in a product
LANES = 16  # weight rows
_CONFIGURATION = 64  # bytes: palette, start row, 14 unused, 8 · u16 bytes in a row and as many unused, 8 rows
# The tile registers: sums, x, and weights. Those of the last rows of x have fewer rows.
_SUMS, _X, _W, _LAST_SUMS, _LAST_X = (0, 1), 2, (3, 4), (5, 6), 7


@dataclass(frozen=True)
class MatrixUnit:
    """Products `steps` steps of 4 columns deep, between `configure` and `release`."""

    steps: int

    def configure(self, last: Expr) -> None:
        """Full products, and those whose x has `last` rows."""
        full, rest = const(ROWS, "uint8"), cast(tirx.max(last, 1), "uint8")
        rows = {r: full for r in (*_SUMS, _X)} | {r: rest for r in (*_LAST_SUMS, _LAST_X)}
        rows |= {r: const(self.steps, "uint8") for r in _W}
        configuration = local("uint8", _CONFIGURATION)
        configuration.store(0, broadcast(const(0, "uint8"), _CONFIGURATION))
        configuration.store(0, const(1, "uint8"))
        for register, count in rows.items():
            row_bytes = 4 * (self.steps if register in (_X, _LAST_X) else LANES)
            configuration.store(16 + 2 * register, const(row_bytes, "uint8"))
            configuration.store(48 + register, count)
        instruction("ldtilecfg", configuration.address(0))

    def release(self) -> None:
        """Leave the unit as it was found: what its registers hold need not be kept any longer."""
        instruction("tilerelease")

    def product(
        self, x: Expr, stride: int, w: Expr, w_stride: int, sums: Memory, at: Expr, which: int, last: bool
    ) -> None:
        """sums[at + 16 · row + lane] = x · w, i32. `x` and `w` are addresses of rows so many bytes apart;
        products with the other `which` (0 or 1) may be under way."""
        total, a, b = (_LAST_SUMS if last else _SUMS)[which], _LAST_X if last else _X, _W[which]
        instruction("tileloadd64", const(a, "int8"), x, const(stride, "int64"))
        instruction("tileloadd64", const(b, "int8"), w, const(w_stride, "int64"))
        instruction("tilezero", const(total, "int8"))
        instruction("tdpbssd", const(total, "int8"), const(a, "int8"), const(b, "int8"))
        instruction("tilestored64", const(total, "int8"), sums.address(at), const(4 * LANES, "int64"))


def instruction(name: str, *operands: Expr) -> None:
    """Of the unit; tile registers are their numbers, as i8."""
    T.evaluate(T.call_llvm_intrin(f"llvm.x86.{name}", *operands, dtype="void"))
