"""Attention kernels on emulated GPUs against the ops' references, over caches whose unused slots hold NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kv_buffers import State, kv_buffer
from zllmc import targets
from zllmc.codegen.attention_gpu_shape import attention_shape
from zllmc.codegen.cuda_toolchain import compile_cuda, disassemble
from zllmc.codegen.gpu import kernel_source
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.targets.gpu import LANES, GpuTarget
from zllmc.zllm_ir import attention_ops, fused_ops, ops
from zllmc.zllm_ir.kernel_graph import KernelCall, KVOperand, Operand, symbol
from zllmc.zllm_ir.plan import CONTROL_CACHED, CONTROL_TOKENS, CONTROL_WORDS
from zllmc.zllm_ir.types import KVType, T, TensorType

CAPACITY, SPLITS = 208, 3  # the cache ends within a tile, and the last part within a step of its units
# heads, kv heads, E; storage; window; softcap
CACHES = [
    (4, 2, 64, "f16", 0, 0.0),
    (5, 1, 80, "f16", 50, 0.0),
    (17, 1, 32, "q8", 0, 20.0),
    (2, 2, 128, "q8", 64, 0.0),
    (2, 1, 256, "f16", 0, 0.0),
]
PASSES = [(1, 0), (1, 207), (1, 64), (13, 0), (40, 31)]  # tokens, cached


@dataclass(frozen=True)
class Calls:
    rows: KernelCall
    partial: KernelCall
    merge: KernelCall


def calls(cache: tuple[Any, ...]) -> Calls:
    heads, kv_heads, width, storage, window, softcap = cache
    attrs = {"scale": width**-0.5, "window": window, "softcap": softcap}
    state = KVOperand(KVType(kv_heads, width, storage), CAPACITY)

    def call(op: str, first: Any, shape: tuple[Any, ...], **more: int) -> KernelCall:
        q = Operand(TensorType("f32", (first, heads, width)), heads * width)
        result = Operand(TensorType("f32", shape), int(shape[1]))
        return KernelCall(op, tuple((attrs | more).items()), (q, state), (result,))

    partial = call("attention_partial", 1, (heads, SPLITS * (width + 2)), splits=SPLITS)
    merged = Operand(TensorType("f32", (1, heads * width)), heads * width)
    merge = KernelCall("attention_merge", (("splits", SPLITS),), partial.results, (merged,))
    return Calls(call("attention_rows", T, (T, heads * width)), partial, merge)


CALLS = {cache: calls(cache) for cache in CACHES}


class Gpu:
    def __init__(self, name: str, emulator_cache: Any) -> None:
        target = targets.parse(name)
        self.sources = {
            symbol(call): kernel_source(call, target)
            for found in CALLS.values()
            for call in (found.rows, found.partial, found.merge)
        }
        texts = {f"{source.name}.{target.dialect}": source.text for source in self.sources.values()}
        options = {"reverse": name == "rocm:gfx942", "optimize": False, "cache": emulator_cache}
        self.device = EmulatedDevice(texts, target.dialect, target.subgroup, **options)

    def run(self, call: KernelCall, shape: tuple[int, ...], *arrays: np.ndarray) -> np.ndarray:
        buffers = [self.device.allocate(array.nbytes) for array in arrays]
        for buffer, array in zip(buffers, arrays, strict=True):
            self.device.write(buffer, array)
        buffers.append(self.device.allocate(4 * int(np.prod(shape))))
        source = self.sources[symbol(call)]
        self.device.launch(
            source.name, (source.blocks, 1), source.threads, [(buffer, 0) for buffer in buffers]
        )
        return self.device.read(buffers[-1], np.float32, shape)


@pytest.fixture(scope="module", params=["rocm:gfx942", "metal:apple9"])
def gpu(request, emulator_cache) -> Gpu:
    return Gpu(request.param, emulator_cache)


@pytest.mark.parametrize(("tokens", "cached"), PASSES)
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_attention_is_the_references(gpu, cache, tokens, cached):
    heads, kv_heads, width, storage, *_ = cache
    rng = np.random.default_rng(tokens * 1000 + cached)
    keys, values = (
        ops.round_to_storage(
            rng.standard_normal((cached + tokens, kv_heads, width)).astype(np.float32), storage
        )
        for _ in range(2)
    )
    q = rng.standard_normal((tokens, heads, width)).astype(np.float32)
    found = CALLS[cache]
    buffer = kv_buffer(found.rows.operands[1], keys, values)
    control = np.zeros(CONTROL_WORDS, np.int32)
    control[[CONTROL_TOKENS, CONTROL_CACHED]] = tokens, cached
    expected = fused_ops.attention_rows(q, State(keys, values), **found.rows.attributes)

    rows = gpu.run(found.rows, (tokens, heads * width), control, q, buffer)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    if tokens == 1:
        parts = gpu.run(found.partial, (heads, SPLITS * (width + 2)), control, q, buffer)
        reference = attention_ops.attention_partial(q, State(keys, values), **found.partial.attributes)
        np.testing.assert_allclose(parts, reference, rtol=2e-5, atol=2e-5)
        merged = gpu.run(found.merge, (1, heads * width), control, parts)
        np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_every_gpu_has_shapes_that_fit():
    for target in targets.all_targets():
        if not isinstance(target, GpuTarget):
            continue
        for call in (call for found in CALLS.values() for call in (found.rows, found.partial)):
            shape = attention_shape(call, target)
            assert shape.units * LANES % target.subgroup == 0
            assert shape.shared_bytes <= target.static_shared_memory


def test_16_bytes_of_the_cache_are_loaded_at_once_and_nothing_spills():
    target = targets.parse("cuda:sm_90")
    for call in (CALLS[CACHES[3]].rows, CALLS[CACHES[3]].partial):
        binary = compile_cuda(kernel_source(call, target).text, target)
        (resources,) = binary.kernels.values()
        assert resources.spills == 0
        assert "LDG.E.128" in (code := disassemble(binary.code))
        assert "LDS.128" in code  # of the queries and of the weights, which all lanes want
