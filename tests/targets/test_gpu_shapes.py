"""Kernels that move rows, on emulated GPUs: cut for many units, with the references' results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from zllmc import targets
from zllmc.codegen.gpu import kernel_source
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.zllm_ir.fused_ops import GROUP
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, activation_row_bytes
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.plan import CONTROL_TOKENS, CONTROL_WORDS
from zllmc.zllm_ir.types import T, TensorType

TOKENS = 5
RMS = {"eps": 1e-5}
WIDTHS = [48, 576, 4128]  # less than a unit has lanes for; a few units; so many that some have more to do


@dataclass(frozen=True)
class Case:
    op: str
    first: Any  # axis
    attrs: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]  # of the operands, those of one axis being weights
    quantized: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.first}-{'x'.join(map(str, self.shapes[0]))}"

    def operand(self, shape: tuple[int, ...]) -> Operand:
        if len(shape) == 1:
            return Operand(TensorType("f32", shape))
        return Operand(TensorType("f32", (self.first, *shape[1:])), int(np.prod(shape[1:])))

    def call(self) -> KernelCall:
        result = self.operand(self.shapes[0])
        if self.quantized:
            result = Operand(TensorType("a8", result.type.shape), result.stride)
        return KernelCall(
            self.op, tuple(self.attrs.items()), tuple(map(self.operand, self.shapes)), (result,)
        )


def cases() -> list[Case]:
    found = []
    for first, tokens in ((1, 1), (T, TOKENS)):
        for width in WIDTHS:
            x, w = (tokens, width), (width,)
            found.append(Case("rms_norm", first, RMS, (x, w)))
            found.append(Case("norm_add", first, RMS, (x, x, w)))
            found.append(Case("layer_norm", first, RMS, (x, w, w)))
            found.append(Case("glu", first, {"act": "silu"}, (x, x)))
            if width % GROUP == 0:
                found.append(Case("rms_norm_quantize", first, RMS, (x, w), True))
                found.append(Case("glu_quantize", first, {"act": "gelu"}, (x, x), True))
                found.append(Case("quantize", first, {}, (x,), True))
        found.append(Case("rms_norm", first, RMS, ((tokens, 3, 80), (80,))))
    return found


CASES = cases()


@pytest.fixture(scope="module", params=["rocm:gfx942", "metal:apple9"])
def gpu(request, emulator_cache):
    target = targets.parse(request.param)
    sources = {str(case): kernel_source(case.call(), target) for case in CASES}
    texts = {f"{source.name}.{target.dialect}": source.text for source in sources.values()}
    options = {"reverse": request.param == "rocm:gfx942", "optimize": False, "cache": emulator_cache}
    return EmulatedDevice(texts, target.dialect, target.subgroup, **options), sources


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_the_references(gpu, case):
    device, sources = gpu
    source, tokens = sources[str(case)], case.shapes[0][0]
    rng = np.random.default_rng(len(str(case)))
    arrays = [rng.standard_normal(shape, np.float32) for shape in case.shapes]
    control = np.zeros(CONTROL_WORDS, np.int32)
    control[CONTROL_TOKENS] = tokens
    buffers = [device.allocate(array.nbytes) for array in (control, *arrays)]
    for buffer, array in zip(buffers, (control, *arrays), strict=True):
        device.write(buffer, array)
    width = int(np.prod(case.shapes[0][1:]))
    row_bytes = activation_row_bytes(width) if case.quantized else 4 * width
    buffers.append(device.allocate(tokens * row_bytes))
    device.launch(source.name, (source.blocks, 1), source.threads, [(buffer, 0) for buffer in buffers])
    raw = device.read(buffers[-1], np.uint8, (tokens, row_bytes))

    expected = OPS[case.op].reference(*arrays, **case.attrs).reshape(tokens, width)
    if case.quantized:
        scales = np.ascontiguousarray(raw[:, width : width + width // 8]).view(np.float32)
        steps = np.repeat(scales, GROUP, axis=1)
        # A value halfway between two codes may take either.
        assert (np.abs(raw[:, :width].view(np.int8) * steps - expected) <= 1.01 * steps).all()
        assert (np.abs(raw[:, :width].view(np.int8) * steps - expected) > 1e-5).mean() < 1e-3
    else:
        y = np.ascontiguousarray(raw).view(np.float32)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
