"""Every block format's kernels on emulated GPUs: one definition, checked in every dialect and wave, on one
GPU with its threads in reverse order.

All kernels of a device are compiled at once, which takes the compiler as long as a few of them alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from activations import a8_rows, seen_by
from blocks import random_rows
from zllmc import targets
from zllmc.codegen.gpu import LANES, kernel_source
from zllmc.codegen.linear_gpu import FEW_ROWS
from zllmc.codegen.packing import layout_of, pack_rows
from zllmc.codegen.simt import Source
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.zllm_ir.formats import FORMATS, decode
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, symbol
from zllmc.zllm_ir.plan import CONTROL_TOKENS, CONTROL_WORDS
from zllmc.zllm_ir.types import T, TensorType

ROWS, COLUMNS = 80, 512  # the last group of rows is half a group
# And the tokens of a prefill, whose last tile of rows is a short one. From 16 on, matrix units are used.
DEVICES = {"cuda:sm_90": 21, "rocm:gfx1100": 11, "rocm:gfx942": 70, "metal:apple9": 11}
ENTRIES = ["decode", "prefill"]
CASES = [(name, format) for name in DEVICES for format in FORMATS]
on_devices = pytest.mark.parametrize(("gpu", "format"), CASES, indirect=["gpu"])


def linear_call(format: str, first: object) -> KernelCall:
    plain = FORMATS[format].plain is not None
    return KernelCall(
        "linear",
        (("alpha", 0.5),),
        (
            Operand(TensorType("f32" if plain else "a8", (first, COLUMNS)), COLUMNS),
            Operand(TensorType(format, (ROWS, COLUMNS))),
            Operand(TensorType("f32", (ROWS,))),
            Operand(TensorType("f32", (first, ROWS)), ROWS),
        ),
        (Operand(TensorType("f32", (first, ROWS)), ROWS),),
    )


def embedding_call(format: str, first: object) -> KernelCall:
    return KernelCall(
        "embedding",
        (("scale", 0.5),),
        (Operand(TensorType("i32", (first,)), 1), Operand(TensorType(format, (ROWS, COLUMNS)))),
        (Operand(TensorType("f32", (first, COLUMNS)), COLUMNS),),
    )


@dataclass(frozen=True)
class Gpu:
    """An emulated GPU with the kernels of every format."""

    device: EmulatedDevice
    sources: dict[str, Source]
    tokens: dict[str, int]  # of each entry

    def run(self, call: KernelCall, tokens: int, *arrays: np.ndarray) -> np.ndarray:
        """The call's f32 result for these operands."""
        (result,) = call.results
        control = np.zeros(CONTROL_WORDS, np.int32)
        control[CONTROL_TOKENS] = tokens
        buffers = []
        for array in (control, *arrays):
            buffers.append(self.device.allocate(array.nbytes))
            self.device.write(buffers[-1], array)
        y = self.device.allocate(4 * tokens * result.stride)
        source = self.sources[symbol(call)]
        self.device.launch(
            source.name, (source.blocks, 1), source.threads, [(buffer, 0) for buffer in (*buffers, y)]
        )
        return self.device.read(y, np.float32, (tokens, result.stride))


@pytest.fixture(scope="module")
def gpus(emulator_cache) -> Callable[[str], Gpu]:
    @functools.cache
    def gpu(name: str) -> Gpu:
        target = targets.parse(name)
        calls = [
            call(format, T if entry == "prefill" else 1)
            for call in (linear_call, embedding_call)
            for format in FORMATS
            for entry in ENTRIES
        ]
        sources = {symbol(call): kernel_source(call, target) for call in calls}
        texts = {f"{kernel}.{target.dialect}": source.text for kernel, source in sources.items()}
        reverse = name == "rocm:gfx942"
        options = {"matrix": target.matrix, "reverse": reverse, "optimize": False, "cache": emulator_cache}
        device = EmulatedDevice(texts, target.dialect, target.subgroup, **options)
        return Gpu(device, sources, {"decode": 1, "prefill": DEVICES[name]})

    return gpu


@pytest.fixture
def gpu(request, gpus) -> Gpu:
    return gpus(request.param)


@functools.cache
def weights(format: str) -> tuple[np.ndarray, np.ndarray]:
    """Packed for a GPU, and decoded to f32."""
    raw = random_rows(FORMATS[format], ROWS, COLUMNS, np.random.default_rng(len(format)))
    return pack_rows(layout_of(format, (ROWS, COLUMNS), LANES), raw), decode(FORMATS[format], raw)


@pytest.mark.parametrize("entry", ENTRIES)
@on_devices
def test_linear(gpu, format, entry):
    tokens, rng = gpu.tokens[entry], np.random.default_rng(3)
    packed, w = weights(format)
    x = rng.standard_normal((tokens, COLUMNS), dtype=np.float32)
    bias, residual = rng.standard_normal(ROWS, np.float32), rng.standard_normal((tokens, ROWS), np.float32)
    plain = FORMATS[format].plain is not None
    call = linear_call(format, T if entry == "prefill" else 1)
    y = gpu.run(call, tokens, x if plain else a8_rows(x), packed, bias, residual)
    inputs = FORMATS[format].plain or "a8"
    if plain and (tokens < FEW_ROWS or f"matrix_{inputs}(" not in gpu.sources[symbol(call)].text):
        inputs = "f32"
    seen = seen_by(inputs, x).astype(np.float64)
    expected = 0.5 * (seen @ w.T) + bias + residual
    magnitude = np.abs(seen) @ np.abs(w).T
    # As on the CPU: products are exact, f32 sums round.
    assert (np.abs(y - expected) <= 2e-6 * magnitude + 1e-6 * np.abs(expected) + 1e-6).all()


@pytest.mark.parametrize("entry", ENTRIES)
@on_devices
def test_embedding(gpu, format, entry):
    tokens = gpu.tokens[entry]
    packed, w = weights(format)
    ids = np.random.default_rng(tokens).integers(0, ROWS, tokens, dtype=np.int32)
    ids[-1] = ROWS - 1
    y = gpu.run(embedding_call(format, T if entry == "prefill" else 1), tokens, ids, packed)
    np.testing.assert_allclose(y, w[ids] * np.float32(0.5), rtol=3e-7, atol=1e-7 * np.abs(w).max())
