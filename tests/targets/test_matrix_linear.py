"""linear on matrix units of GPUs: each target's instruction, tiles cut short, and what compilers make of it.

That every block format comes out right is tested in `test_gpu_kernels`.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from activations import a8_rows, seen_by
from blocks import random_rows
from zllmc import targets
from zllmc.codegen.cuda_toolchain import compile_cuda, disassemble
from zllmc.codegen.gpu import kernel_source
from zllmc.codegen.packing import layout_of, pack_rows
from zllmc.codegen.rocm_toolchain import assembly, compile_hip
from zllmc.codegen.simt import Source
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.targets.gpu import LANES
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, decode
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand
from zllmc.zllm_ir.plan import CONTROL_TOKENS, CONTROL_WORDS
from zllmc.zllm_ir.types import T, TensorType

TARGETS = ["cuda:sm_90", "rocm:gfx1100", "rocm:gfx1201", "rocm:gfx90a", "rocm:gfx942", "metal:apple9"]


def linear_call(format: str, rows: int, columns: int) -> KernelCall:
    stride = -(-rows // 16) * 16
    y = Operand(TensorType("f32", (T, rows)), stride)
    x = Operand(TensorType("a8" if FORMATS[format].plain is None else "f32", (T, columns)), columns)
    weight = Operand(TensorType(format, (rows, columns)))
    return KernelCall("linear", (("alpha", 1.0),), (x, weight, None, y), (y,))


def check(device: EmulatedDevice, source: Source, call: KernelCall, tokens: int, inputs: str) -> None:
    """The kernel adds to y, whose rows after the last token it does not touch."""
    format, (rows, columns) = call.operands[1].type.dtype, call.operands[1].type.shape
    rng = np.random.default_rng(tokens)
    raw = random_rows(FORMATS[format], rows, columns, rng)
    x = rng.standard_normal((tokens, columns), dtype=np.float32)
    x[1] *= 1e5  # more than a half can be
    y = rng.standard_normal((tokens + 3, call.results[0].stride), dtype=np.float32)
    control = np.zeros(CONTROL_WORDS, np.int32)
    control[CONTROL_TOKENS] = tokens
    packed = pack_rows(layout_of(format, (rows, columns), LANES), raw)
    buffers = []
    for array in (control, x if FORMATS[format].plain else a8_rows(x), packed, y):
        buffers.append(device.allocate(array.nbytes))
        device.write(buffers[-1], array)
    arguments = [(buffer, 0) for buffer in (*buffers, buffers[-1])]
    device.launch(source.name, (source.blocks, 1), source.threads, arguments)
    result = device.read(buffers[-1], np.float32, y.shape)
    np.testing.assert_array_equal(result[tokens:], y[tokens:])
    weights, seen = decode(FORMATS[format], raw).astype(np.float64), seen_by(inputs, x).astype(np.float64)
    expected = y[:tokens, :rows] + seen @ weights.T
    magnitude = np.abs(seen) @ np.abs(weights).T
    error = np.abs(result[:tokens, :rows] - expected)
    assert (error <= 2e-6 * magnitude + 1e-6 * np.abs(expected) + 1e-6).all()


# A scale and a minimum for 32 columns, and for 16 columns. Plain weights, and an odd number of pieces.
CALLS = [linear_call("Q4_1", 40, 96), linear_call("Q2_K", 144, 256)]
PLAIN = [linear_call("F16", 40, 96), linear_call("BF16", 72, 32)]


@pytest.mark.parametrize("name", TARGETS)
def test_products_of_each_instruction_are_those_of_the_description(name, emulator_cache):
    target = targets.parse(name)
    metal = target.kind == "metal"
    plain = [*PLAIN, linear_call("F32", 40, 48)] if metal else PLAIN
    calls = [*(CALLS[:1] if metal else CALLS), *plain]
    sources = [kernel_source(call, target) for call in calls]
    texts = {f"{source.name}.{target.dialect}": source.text for source in sources}
    options = {"matrix": target.matrix, "reverse": name == "rocm:gfx1201", "cache": emulator_cache}
    device = EmulatedDevice(texts, target.dialect, target.subgroup, optimize=False, **options)
    for source, call in zip(sources, calls, strict=True):
        inputs = "a8" if call in CALLS else "f32" if metal else call.operands[1].type.dtype.lower()
        for tokens in (15, 16, 65) if call in CALLS else (65,):
            check(device, source, call, tokens, inputs)
    if name in ("cuda:sm_90", "rocm:gfx942"):
        check(device, sources[0], CALLS[0], 64 * sources[0].blocks + 1, "a8")  # a block gets a second tile


# The instruction, and how many of them multiply a subgroup's part of a tile: for 32 columns.
COMPILED = [
    ("cuda:sm_90", "Q4_K", "IMMA.16832.S8.S8", 8),
    ("cuda:sm_80", "BF16", "HMMA.16816.F32.BF16", 16),
    ("cuda:sm_120", "F16", "HMMA.16816.F32 ", 16),
    ("rocm:gfx1100", "Q2_K", "v_wmma_i32_16x16x16_iu8", 8),
    ("rocm:gfx1100", "F16", "v_wmma_f32_16x16x16_f16", 8),
    ("rocm:gfx1201", "IQ4_XS", "v_wmma_i32_16x16x16_iu8", 8),
    ("rocm:gfx1201", "BF16", "v_wmma_f32_16x16x16_bf16", 8),
    ("rocm:gfx942", "Q6_K", "v_mfma_i32_16x16x32_i8", 8),
    ("rocm:gfx942", "F16", "v_mfma_f32_16x16x16_f16", 8),
    ("rocm:gfx90a", "BF16", "v_mfma_f32_16x16x16bf16_1k", 8),
]


@pytest.mark.parametrize(("name", "format", "instruction", "count"), COMPILED)
def test_compilers_use_the_instruction_and_have_registers_enough(name, format, instruction, count):
    target = targets.parse(name)
    source = kernel_source(linear_call(format, 4096, 4096), target)
    try:
        binary = (compile_cuda if target.kind == "cuda" else compile_hip)(source.text, target)
    except ZllmcError as error:  # no compiler
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    (used,) = binary.kernels.values()
    assert (used.spills, used.stack) == (0, 0)
    assert used.shared_memory == source.shared_bytes <= 24 << 10
    text = disassemble(binary.code) if target.kind == "cuda" else assembly(source.text, target)
    assert text.count(instruction) == count
    if target.kind == "cuda":  # codes of x are copied past the registers
        assert ("LDGSTS.E.BYPASS.128" in text) == (format == "Q4_K")


def test_targets_without_such_a_unit_take_dot_products():
    source = kernel_source(CALLS[0], targets.parse("rocm:gfx1030"))
    assert "dot4(" in source.text and "matrix_s8" not in source.text


def test_plain_weights_of_a_shape_that_does_not_fit_take_vector_tiles():
    assert "matrix_" not in kernel_source(linear_call("F16", 40, 80), targets.parse("cuda:sm_90")).text
