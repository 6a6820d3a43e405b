"""Packing kernels against their reference in numpy: the same bytes, for every format and width."""

import ctypes
from typing import Any

import numpy as np
import pytest
from tvm.target import Target

from harness import NATIVE, Guarded
from zllmc.codegen.build_object import compile_module
from zllmc.codegen.pack_kernel import pack
from zllmc.codegen.packing import PackedLayout, pack_call, pack_rows
from zllmc.zllm_ir.formats import FORMATS, row_bytes

LANES = (4, 8, 16)
ROWS = 32


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_the_kernel_packs_what_numpy_does(format: str) -> None:
    """Not optimised: that would take three times as long. What is, packs the models of other tests."""
    functions = {f"lanes{n}": pack(pack_call(format, n), NATIVE[-1], f"lanes{n}") for n in LANES}
    target = Target({**NATIVE[-1].llvm, "opt-level": 0})
    module = compile_module(functions, target)
    for lanes in LANES:
        for blocks, threads in ((1, 1), (3, 1), (2, 3)):
            check(module[f"lanes{lanes}"], format, lanes, blocks, threads)


def check(kernel: Any, format: str, lanes: int, blocks: int, threads: int) -> None:
    fmt = FORMATS[format]
    raw = random_bytes(ROWS, row_bytes(fmt, blocks * fmt.block))
    layout = PackedLayout(fmt, ROWS, blocks * fmt.block, lanes)
    packed = random_bytes(layout.groups, layout.group_bytes)
    control = np.array([layout.groups, blocks], np.int32)
    arrays = [Guarded(array) for array in (raw, packed)]
    for thread in range(threads):
        pointers = [ctypes.c_void_p(control.ctypes.data), *(array.pointer for array in arrays)]
        kernel(thread, threads, *pointers)
    for array in arrays:
        array.finish()
    np.testing.assert_array_equal(packed, pack_rows(layout, raw))
