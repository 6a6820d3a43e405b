"""Runs one kernel on numpy arrays as the runtime would: thread by thread, with guards around every array."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tvm.target import Target

from emulation import emulated, emulation
from zllmc.codegen.build_object import compile_module
from zllmc.targets.cpu import TARGETS, CpuTarget, host_architecture, host_flags
from zllmc.zllm_ir.fused_ops import GROUP
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand
from zllmc.zllm_ir.plan import CONTROL_CACHED, CONTROL_FIRST_ROW, CONTROL_TOKENS, CONTROL_WORDS
from zllmc.zllm_ir.types import T, TensorType

Family = Callable[[KernelCall, CpuTarget, str], Any]

GUARD = 0xA5
MARGIN = 256  # guard bytes before and after an array


def runs_here(target: CpuTarget) -> bool:
    return target.triple.startswith(host_architecture()) and target.requires <= host_flags()


# Those with a matrix unit differ from others in products of weights only.
NATIVE = [t for t in TARGETS.values() if runs_here(t) and not t.matrix]
# The other targets' kernels, with their vector widths and layouts, where only the instructions are replaced.
RUNNABLE = [emulated(t, NATIVE[-1]) for t in TARGETS.values() if not t.matrix and t not in NATIVE] + NATIVE
MATRIX = [t if runs_here(t) else emulated(t, NATIVE[-1]) for t in TARGETS.values() if t.matrix]

UNTOUCHED = 7777.0
WORK = [
    (T, 1, 1),
    (T, 2, 3),
    (T, 5, 1),
    (T, 33, 7),
    (1, 1, 1),
    (1, 1, 2),
    (1, 1, 7),
]  # first axis, T, threads

on_targets = pytest.mark.parametrize("target", RUNNABLE, ids=str)
on_work = pytest.mark.parametrize(("first_axis", "tokens", "threads"), WORK)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@functools.cache
def compiled(family: Family, call: KernelCall, target: CpuTarget) -> Any:
    with emulation(target):
        function = family(call, target, "kernel")
    return compile_module({"kernel": function}, Target(target.llvm))


def assembly(family: Family, call: KernelCall, target: CpuTarget) -> str:
    return str(compiled(family, call, target).inspect_source("asm"))


def calls(family: Family, call: KernelCall, target: CpuTarget) -> list[str]:
    """Call instructions in the kernel's own code, for a look at what became a library call."""
    code = assembly(family, call, target)
    body = code[code.index("kernel_compute_:") :].partition(".Lfunc_end")[0]
    return re.findall(r"^\s+(?:callq?|bl|blr)\s.*$", body, re.MULTILINE)


def control(tokens: int, cached: int = 0, first_row: int = 0) -> np.ndarray:
    words = np.zeros(CONTROL_WORDS, np.int32)
    words[[CONTROL_TOKENS, CONTROL_CACHED, CONTROL_FIRST_ROW]] = tokens, cached, first_row
    return words


class Guarded:
    """A copy of an array (strides kept, a row's gap to the next included) within guard bytes."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        last = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) if array.size else 0
        self.memory = np.full(2 * MARGIN + last + array.itemsize + 64, GUARD, np.uint8)
        self.start = MARGIN + (-self.memory.ctypes.data - MARGIN) % 64
        self.copy = np.ndarray(array.shape, array.dtype, self.memory, self.start, array.strides)
        self.copy[...] = array

    @property
    def pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.memory.ctypes.data + self.start)

    def finish(self) -> None:
        """Copies the array back; an AssertionError if a byte outside it was written."""
        self.array[...] = self.copy
        self.copy.view(np.dtype((np.void, self.copy.itemsize)))[...] = np.void(
            bytes([GUARD] * self.copy.itemsize)
        )
        assert (self.memory == GUARD).all(), "wrote outside an array"


def run(
    family: Family,
    call: KernelCall,
    control: np.ndarray,
    *arrays: np.ndarray,
    threads: int = 1,
    target: CpuTarget = RUNNABLE[-1],
) -> None:
    """Runs the kernel for thread 0 … threads − 1 in turn. `arrays`: the present operands, then the results;
    written ones change in place."""
    kernel = compiled(family, call, target)["kernel"]
    guarded = [Guarded(array) for array in arrays]
    for thread in range(threads):
        kernel(thread, threads, ctypes.c_void_p(control.ctypes.data), *(g.pointer for g in guarded))
    for g in guarded:
        g.finish()


def operand(array: np.ndarray, rows: Any = None, dtype: str = "f32") -> Operand:
    """The operand type of an array (its strides taken from it); `rows` replaces the first axis."""
    shape = (array.shape[0] if rows is None else rows, *array.shape[1:])
    return Operand(TensorType(dtype, shape), array.strides[0] // array.itemsize)


def weight(array: np.ndarray) -> Operand:
    return Operand(TensorType("f32", array.shape))


@dataclass(frozen=True)
class Activations:
    """`a8` rows taken apart."""

    codes: np.ndarray  # i8 (T, D)
    scales: np.ndarray  # f32 (T, D/32)

    @property
    def values(self) -> np.ndarray:
        groups = self.codes.reshape(*self.scales.shape, GROUP).astype(np.float32)
        return (groups * self.scales[..., None]).reshape(self.codes.shape)


def read_activations(raw: np.ndarray, width: int) -> Activations:
    """Rows as uint8 (T, activation_row_bytes(width)), whose sums must agree with their codes."""
    parts = np.cumsum([width, width // 8, width // 8, width // 8])
    codes, scales, scaled_sums, sums, _ = np.split(raw, parts, axis=1)
    codes, sums = np.ascontiguousarray(codes).view(np.int8), np.ascontiguousarray(sums).view(np.int16)
    scales, scaled_sums = (np.ascontiguousarray(a).view(np.float32) for a in (scales, scaled_sums))
    halves = codes.reshape(len(raw), -1, 16).sum(axis=-1, dtype=np.int16)
    np.testing.assert_array_equal(sums, halves)
    np.testing.assert_array_equal(scaled_sums, scales * (halves[:, ::2] + halves[:, 1::2]).astype(np.float32))
    return Activations(codes, scales)
