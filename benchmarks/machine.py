"""What this machine can do at most: bytes read from memory and int8 operations in a second.

    python benchmarks/machine.py [--threads 1,2]

Both are measured with kernels of our own compiler, on the threads that models run on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from tvm.target import Target

from zllmc.codegen.amx import LANES, ROWS, MatrixUnit, instruction
from zllmc.codegen.build_object import compile_object
from zllmc.codegen.cpu import build_executor
from zllmc.codegen.tir import Expr, Kernel, Register, bind, bits, broadcast, const, llvm, serial
from zllmc.runtime.cpu import CpuDevice
from zllmc.runtime.memory import allocate
from zllmc.targets.cpu import CpuTarget, detect
from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

READ_BYTES = 256 << 20  # far more than caches hold
STREAMS = 4  # places in memory that a thread may read side by side
LINES = 8  # cache lines that one round of the reading loop takes
ROUNDS = 1 << 20  # of the multiplying loop
LINE = 64


class Machine:
    """Measures with `threads` threads; `close` ends them."""

    def __init__(self, threads: int) -> None:
        target = detect()
        functions = {
            "read": _read(target, streams=1),
            "read_streams": _read(target, streams=STREAMS),
            "multiply": _multiply_tiles() if target.matrix else _multiply(target),
        }
        objects = [compile_object(functions, Target(target.llvm)), build_executor(target)]
        self._device = CpuDevice(objects, threads)
        self._buffers = [allocate(READ_BYTES), allocate(threads * 4096)]
        # Real pages with different contents: zeros could be one page, or cheap to multiply.
        words = self._buffers[0].view(np.uint64, (READ_BYTES // 8,))
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        products = 4 * ROWS * LANES * 64 // 8 if target.matrix else _accumulators(target) * 4 * target.lanes
        self._operations = 2 * threads * ROUNDS * products

    def close(self) -> None:
        self._device.close()

    def read_bandwidth(self, repeat: int = 3) -> float:
        """Bytes in a second, out of huge pages, one stream for each thread or several; whatever is faster."""
        return max(self._rate(name, READ_BYTES, repeat) for name in ("read", "read_streams"))

    def dot_peak(self, repeat: int = 3) -> float:
        """Operations (two for each product that is summed) in a second, of the target's int8 dot product."""
        return self._rate("multiply", self._operations, repeat)

    def _rate(self, kernel: str, amount: int, repeat: int) -> float:
        launch = Launch(kernel, (Pointer(0, 0), Pointer(1, 0)))
        recording = self._device.record(EntryPoint(kernel, 1, 1, (launch,)), self._buffers)
        return amount / median(_seconds(recording.replay) for _ in range(repeat))


def _seconds(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _read(target: CpuTarget, *, streams: int) -> Any:
    """Adds up the memory, each thread its part."""
    lanes = target.lanes
    step = LINES // streams * LINE // 4
    with Kernel(f"read{streams}", memory="int32", out="int32") as k:
        memory, out = k.arguments
        sums = [Register("int32", lanes, const(0, "int32", lanes)) for _ in range(4)]
        rounds = bind(READ_BYTES // 4 // (streams * step) // k.threads)
        starts = [bind((k.thread * streams + stream) * rounds * step) for stream in range(streams)]
        with serial(0, rounds) as round:
            for start in starts:
                for number in range(step // lanes):
                    total = sums[number % len(sums)]
                    total.set(total.get() + memory.load(start + round * step + number * lanes, lanes))
        for number, total in enumerate(sums):
            out.store(k.thread * 1024 + number * lanes, total.get())
    return k.function


def _multiply(target: CpuTarget) -> Any:
    """Dot products in registers, into as many sums as hide the instruction's latency."""
    lanes, count = target.lanes, _accumulators(target)
    with Kernel("multiply", memory="int32", out="int32") as k:
        memory, out = k.arguments
        sums = [Register("int32", lanes, const(0, "int32", lanes)) for _ in range(count)]
        factors = [bind(broadcast(memory.load(i), lanes)) for i in range(count)]  # all different
        with serial(0, ROUNDS) as round:
            # Another operand in each round, from the first cache, so that nothing can be computed before.
            values = bind(memory.load(round % 16 * lanes, lanes))
            for total, factor in zip(sums, factors, strict=True):
                total.set(_dot(target, total.get(), values, factor))
        for number, total in enumerate(sums):
            out.store(k.thread * 1024 + number * lanes, total.get())
    return k.function


def _multiply_tiles() -> Any:
    """The same by the matrix unit, in products as deep as there are; in an eighth of the rounds."""
    with Kernel("multiply", memory="int32", out="int32") as k:
        memory, out = k.arguments
        unit = MatrixUnit(16)
        unit.configure(const(0, "int32"))
        x, w, *sums = (const(register, "int8") for register in (2, 3, 0, 1, 4))
        for factor in (x, w):
            instruction("tileloadd64", factor, memory.address(0), const(LINE, "int64"))
        for total in sums:
            instruction("tilezero", total)
        with serial(0, ROUNDS // 8):
            for total in (*sums, sums[0]):
                instruction("tdpbssd", total, x, w)
        for total in sums:
            instruction("tilestored64", total, out.address(k.thread * 1024), const(LINE, "int64"))
        unit.release()
    return k.function


def _accumulators(target: CpuTarget) -> int:
    return 12 if target.registers == 32 else 8


def _dot(target: CpuTarget, total: Expr, a: Expr, b: Expr) -> Expr:
    """total + the sums of four int8 products in each i32 lane."""
    size, dtype = 4 * target.lanes, f"int32x{target.lanes}"
    b = bits(b, f"int8x{size}")
    if target.dot == "sdot":
        return llvm("llvm.aarch64.neon.sdot.v4i32.v16i8", dtype, total, bits(a, f"int8x{size}"), b)
    a = bits(a, f"uint8x{size}")
    if target.dot == "vnni":
        return llvm(f"llvm.x86.avx512.vpdpbusd.{8 * size}", dtype, total, a, b)
    pairs = llvm("llvm.x86.avx2.pmadd.ub.sw", f"int16x{size // 2}", a, b)
    return total + llvm("llvm.x86.avx2.pmadd.wd", dtype, pairs, const(1, "int16", size // 2))


def main() -> None:
    parser = argparse.ArgumentParser(description="What this machine can do at most.")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas  [1,2]")
    for threads in map(int, parser.parse_args().threads.split(",")):
        machine = Machine(threads)
        bandwidth, peak = machine.read_bandwidth(9), machine.dot_peak(9)
        machine.close()
        by = "amx" if detect().matrix else detect().dot
        print(f"{threads} threads: {bandwidth / 1e9:.1f} GB/s read, {peak / 1e9:,.0f} GOPS {by}")


if __name__ == "__main__":
    main()
