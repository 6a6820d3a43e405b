"""The emulated GPU's matrix instructions, with the layouts of every target."""

from typing import Any

import numpy as np
import pytest

from simt_kernels import put
from zllmc import targets
from zllmc.runtime.device import KernelError
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.targets.gpu import GpuTarget

GPUS = [target for target in targets.all_targets() if isinstance(target, GpuTarget)]
INSTRUCTIONS = {i: target for target in GPUS for i in target.matrix if i.a}
TYPES = {"s8": (np.int8, np.int32, "int"), "f16": (np.float16, np.float32, "float")}


def kernel(instruction: Any) -> str:
    """Each lane loads its words of A and B and its elements of C, and stores the latter."""
    each = {"s8": 4, "f16": 2}[instruction.inputs]
    a, b, c = instruction.a.elements // each, instruction.b.elements // each, instruction.c.elements
    element = TYPES[instruction.inputs][2]
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
    rng, (inputs, sums, _) = np.random.default_rng(6), TYPES[instruction.inputs]
    shapes = (instruction.m, instruction.k), (instruction.k, instruction.n), (instruction.m, instruction.n)
    a, b, c = (rng.uniform(-100, 100, shape) for shape in shapes)
    return [a.astype(inputs), b.astype(inputs), c.astype(sums)]


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
    buffers = [put(device, held(m, f, lanes)) for m, f in zip((a, b, c), fragments, strict=True)]
    device.launch("product", (1, 1), lanes, [(buffer, 0) for buffer in buffers])
    expected = held(a.astype(np.float64) @ b + c, instruction.c, lanes)
    got = device.read(buffers[2], c.dtype, expected.shape)
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.05 if c.dtype == np.float32 else 0)


def test_lanes_that_hold_different_values_of_one_element(emulator_cache):
    instruction = next(i for i in INSTRUCTIONS if (0, 0) in i.a.lane_bits)
    device = open_device(instruction, emulator_cache)
    a, b, c = matrices(instruction)
    lanes = device.subgroup
    different = held(a, instruction.a, lanes)
    different[lanes - 1, 0] += 1
    held_b, held_c = held(b, instruction.b, lanes), held(c, instruction.c, lanes)
    with pytest.raises(KernelError, match="lanes disagree about an element of a matrix in line 8"):
        device.launch("product", (1, 1), lanes, [(put(device, m), 0) for m in (different, held_b, held_c)])
