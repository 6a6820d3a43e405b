"""A block format that nobody knows: its description alone gives kernels, on the CPU and on every GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from activations import a8_rows
from blocks import random_rows
from zllmc import targets
from zllmc.codegen.cpu import build_executor
from zllmc.codegen.cpu import build_kernel as build_cpu_kernel
from zllmc.codegen.gpu import kernel_source
from zllmc.codegen.packing import layout_of, pack_rows
from zllmc.runtime.cpu import CpuDevice
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.support import support
from zllmc.targets.cpu import CpuTarget, detect
from zllmc.zllm_ir.block_format import BlockFormat, Field, Float, Plane
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, decode
from zllmc.zllm_ir.fused_ops import _quantize
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, symbol
from zllmc.zllm_ir.plan import CONTROL_TOKENS, CONTROL_WORDS, EntryPoint, Launch, Pointer
from zllmc.zllm_ir.types import T, TensorType

ROWS, COLUMNS, TOKENS = 64, 256, 19

# 64 weights of 3 bits: two low bits of each in the first 16 bytes, neighbours in neighbouring bit pairs; the
# third bit in 8 more bytes; then a scale. No GGML type looks like this.
THREE_BITS = BlockFormat(
    "T3_64",
    ggml_type=9999,
    block=64,
    nbytes=26,
    codes=Field((Plane(2, tuple(range(0, 128, 2))), Plane(1, tuple(range(128, 192)))), zero=4),
    scale=Float(24, "f16"),
)


def linear_call(first: object) -> KernelCall:
    return KernelCall(
        "linear",
        (("alpha", 1.0),),
        (
            Operand(TensorType("a8", (first, COLUMNS)), COLUMNS),
            Operand(TensorType(THREE_BITS.name, (ROWS, COLUMNS))),
            None,
            None,
        ),
        (Operand(TensorType("f32", (first, ROWS)), ROWS),),
    )


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("name", ["cpu", "cuda:sm_90", "rocm:gfx942", "metal:apple9"])
def test_a_description_is_all_that_a_format_takes(name, tokens, emulator_cache, monkeypatch):
    monkeypatch.setitem(FORMATS, THREE_BITS.name, THREE_BITS)
    target = detect() if name == "cpu" else targets.parse(name)
    raw = random_rows(THREE_BITS, ROWS, COLUMNS, np.random.default_rng(1))
    x = np.random.default_rng(2).standard_normal((tokens, COLUMNS), np.float32)
    packed = pack_rows(layout_of(THREE_BITS.name, (ROWS, COLUMNS), target.lanes), raw)
    control = np.zeros(CONTROL_WORDS, np.int32)
    control[CONTROL_TOKENS] = tokens

    call = linear_call(1 if tokens == 1 else T)
    if isinstance(target, CpuTarget):
        device = CpuDevice([build_cpu_kernel(call, target), build_executor(target)], 2)
        launch = Launch(symbol(call), tuple(Pointer(i, 0) for i in range(4)))
    else:
        source = kernel_source(call, target)
        texts = {f"{source.name}.{target.dialect}": source.text}
        device = EmulatedDevice(
            texts, target.dialect, target.subgroup, matrix=target.matrix, cache=emulator_cache
        )
        grid = (source.blocks, 1)
        launch = Launch(
            source.name, tuple(Pointer(i, 0) for i in range(4)), grid=grid, threads=source.threads
        )
    arrays = [control, a8_rows(x), packed, np.zeros((tokens, ROWS), np.float32)]
    buffers = [device.allocate(array.nbytes) for array in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        device.write(buffer, array)
    device.record(EntryPoint("decode", tokens, 1, (launch,)), buffers).replay(tokens)
    y = device.read(buffers[3], np.float32, (tokens, ROWS)).copy()
    device.close()

    expected = _quantize(x).astype(np.float64) @ decode(THREE_BITS, raw).T
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["cpu:avx2", "cuda:sm_90"])
@pytest.mark.parametrize("scale, has_kernels", [("f16", True), ("bf16", False)])
def test_the_table_of_targets_knows_whether_a_description_gives_kernels(
    name, scale, has_kernels, monkeypatch
):
    format = replace(THREE_BITS, scale=Float(24, scale))
    monkeypatch.setitem(FORMATS, format.name, format)
    target = targets.parse(name)
    found = support(format.name, target)
    assert (found.kernel, found.default_path, found.parsed) == (has_kernels, has_kernels, False)
    call = linear_call(T)
    with nullcontext() if has_kernels else pytest.raises(ZllmcError, match="its scale is bf16"):
        build_cpu_kernel(call, target) if isinstance(target, CpuTarget) else kernel_source(call, target)
