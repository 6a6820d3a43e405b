"""The emulated GPU's matrix instructions, with the layouts of every target; and its asynchronous copies."""

from typing import Any

import numpy as np
import pytest

from simt_kernels import put
from zllmc import targets
from zllmc.runtime.device import KernelError
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.targets.gpu import GpuTarget

GPUS = [target for target in targets.all_targets() if isinstance(target, GpuTarget)]
INSTRUCTIONS = {i: target for target in GPUS for i in target.matrix}
SUMS = {"s32": (np.int32, "int"), "f32": (np.float32, "float")}


def as_input(matrix: np.ndarray, inputs: str) -> tuple[np.ndarray, np.ndarray]:
    """The matrix rounded to a type of inputs: as it is stored, and its values."""
    if inputs == "bf16":
        stored = (matrix.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return stored, (stored.astype(np.uint32) << 16).view(np.float32)
    stored = matrix.astype({"s8": np.int8, "f16": np.float16, "f32": np.float32}[inputs])
    return stored, stored


def kernel(instruction: Any) -> str:
    """Each lane loads its words of A and B and its elements of C, and stores the latter."""
    each = {"s8": 4, "f16": 2, "bf16": 2, "f32": 1}[instruction.inputs]
    a, b, c = instruction.a.elements // each, instruction.b.elements // each, instruction.c.elements
    element = SUMS[instruction.accumulator][1]
    return f"""#include "prelude.h"
extern "C" __global__ void product(const unsigned* all_a, const unsigned* all_b, {element}* all_c) {{
  unsigned a[{a}], b[{b}];
  {element} c[{c}];
  for (int i = 0; i < {a}; ++i) a[i] = all_a[threadIdx.x * {a} + i];
  for (int i = 0; i < {b}; ++i) b[i] = all_b[threadIdx.x * {b} + i];
  for (int i = 0; i < {c}; ++i) c[i] = all_c[threadIdx.x * {c} + i];
  matrix_{instruction.inputs}(c, a, b);
  for (int i = 0; i < {c}; ++i) all_c[threadIdx.x * {c} + i] = c[i];
}}
"""


def held(matrix: np.ndarray, fragment: Any, lanes: int) -> np.ndarray:
    """What each lane holds of a matrix (lanes, elements)."""
    places = [[fragment.position(lane, e) for e in range(fragment.elements)] for lane in range(lanes)]
    return np.array([[matrix[place] for place in lane] for lane in places])


def matrices(instruction: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    shapes = (instruction.m, instruction.k), (instruction.k, instruction.n), (instruction.m, instruction.n)
    a, b, c = (rng.uniform(-100, 100, shape) for shape in shapes)
    return [a, b, c.astype(SUMS[instruction.accumulator][0])]


def open_device(instruction: Any, cache: Any, **options: Any) -> EmulatedDevice:
    target = INSTRUCTIONS[instruction]
    matrix, text = (instruction,), {"product": kernel(instruction)}
    return EmulatedDevice(text, "hip", target.subgroup, matrix=matrix, optimize=False, cache=cache, **options)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: f"{INSTRUCTIONS[i]}-{i.name}")
def test_matrix_instructions(instruction, reverse, emulator_cache):
    device = open_device(instruction, emulator_cache, reverse=reverse)
    a, b, c = matrices(instruction)
    fragments, lanes = (instruction.a, instruction.b, instruction.c), device.subgroup
    (stored_a, a), (stored_b, b) = (as_input(m, instruction.inputs) for m in (a, b))
    stored = zip((stored_a, stored_b, c), fragments, strict=True)
    buffers = [put(device, held(m, f, lanes)) for m, f in stored]
    device.launch("product", (1, 1), lanes, [(buffer, 0) for buffer in buffers])
    expected = held(a.astype(np.float64) @ b + c, instruction.c, lanes)
    got = device.read(buffers[2], c.dtype, expected.shape)
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.05 if c.dtype == np.float32 else 0)


def test_lanes_that_hold_different_values_of_one_element(emulator_cache):
    instruction = next(i for i in INSTRUCTIONS if (0, 0) in i.a.lane_bits)
    device = open_device(instruction, emulator_cache)
    a, b, c = matrices(instruction)
    lanes = device.subgroup
    a, b = (as_input(m, instruction.inputs)[0] for m in (a, b))
    different = held(a, instruction.a, lanes)
    different[lanes - 1, 0] += 1
    held_b, held_c = held(b, instruction.b, lanes), held(c, instruction.c, lanes)
    with pytest.raises(KernelError, match="lanes disagree about an element of a matrix in line 8"):
        device.launch("product", (1, 1), lanes, [(put(device, m), 0) for m in (different, held_b, held_c)])


COPY = """#include "prelude.h"
extern "C" __global__ void copy(const unsigned char* x, unsigned* y) {
  __shared__ alignas(16) unsigned values[128];
  copy_async16(values + 4 * threadIdx.x, x + 16 * threadIdx.x);
  WAIT
  barrier();
  for (int i = 0; i < 4; ++i) y[32 * i + threadIdx.x] = values[32 * i + (threadIdx.x ^ 1)];
}
"""


@pytest.mark.parametrize("wait", [True, False])
def test_asynchronous_copies_are_there_once_they_are_waited_for(wait, emulator_cache):
    text = COPY.replace("WAIT", "copies_wait();" if wait else "")
    device = EmulatedDevice({"copy": text}, "cuda", 32, optimize=False, cache=emulator_cache)
    x = np.arange(128, dtype=np.uint32)
    y = device.allocate(x.nbytes)
    device.launch("copy", (1, 1), 32, [(put(device, x), 0), (y, 0)])
    assert (device.read(y, np.uint32, (128,)) == (x ^ 1)).all() == wait
