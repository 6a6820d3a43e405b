"""Small kernels for the emulated GPU in each dialect's spelling, and how tests launch them."""

from typing import Any

import numpy as np
import pytest

from zllmc.runtime.device import DeviceBuffer, KernelError
from zllmc.runtime.emulator import EmulatedDevice

THREADS = 128
# Parameters and bodies; DEVICE stands before pointers to global memory, SHARED before shared arrays.
KERNELS = {
    # y[block] = the sum and the maximum of the block's 128 values
    "reduce": (
        "DEVICE const float* x, DEVICE float* y",
        """
  SHARED float sums[128 / SUBGROUP];
  SHARED float maxima[128 / SUBGROUP];
  const float value = x[block_x * 128 + thread];
  const float sum = subgroup_add(value), maximum = subgroup_max(value);
  if (thread % SUBGROUP == 0) {
    sums[thread / SUBGROUP] = sum;
    maxima[thread / SUBGROUP] = maximum;
  }
  barrier();
  if (thread == 0) {
    float all = sums[0], most = maxima[0];
    for (int i = 1; i < 138 / SUBGROUP; ++i) {
      all += sums[i];
      most = fmax_(most, maxima[i]);
    }
    y[2 * block_x] = all;
    y[2 * block_x + 1] = most;
  }
""",
    ),
    "exchange": (
        "DEVICE const int* x, DEVICE int* y",
        """
  const int lane = thread % SUBGROUP;
  y[thread] = subgroup_shuffle(x[thread], SUBGROUP - 1 - lane);
  y[128 + thread] = subgroup_shuffle_xor(x[thread], 5);
  y[256 + thread] = subgroup_add(x[thread]);
  y[384 + thread] = as_int(as_uint(subgroup_shuffle(as_float((unsigned)x[thread] & 0x3fffffffu), 3)));
""",
    ),
    # Of a subgroup of 64, the units do this one after the other.
    "units": (
        "DEVICE const int* x, DEVICE int* y",
        """
  SHARED int values[128];
  const int lane = thread % 32, unit = thread / 32;
  for (int i = 0; i <= unit; ++i) {
    values[thread] = unit_add(x[thread]) + i;
    unit_sync();
    y[thread] = values[unit * 32 + 31 - lane];
    y[128 + thread] = unit_max(x[thread]);
    y[256 + thread] = unit_shuffle(x[thread], 31 - lane);
    y[384 + thread] = unit_shuffle_xor(x[thread], 3);
  }
""",
    ),
    # y = the values of a block turned around; the barrier is the point
    "turn": (
        "DEVICE const float* x, DEVICE float* y",
        """
  SHARED float values[128];
  values[thread] = x[block_x * 128 + thread];
  BARRIER
  y[block_x * 128 + thread] = values[127 - thread];
""",
    ),
    "copy": (
        "DEVICE const int* control, DEVICE const float* x, DEVICE float* y",
        "  const int i = block_y * 128 + thread;\n  if (i < 64 * control[0]) y[i] = x[i];",
    ),
    "accumulate": ("DEVICE const float* x, DEVICE float* y", "  y[thread] = y[thread] * 2.0f + x[thread];"),
    "leave": ("DEVICE const int* control", "\n  if (thread == control[0]) return;\n  barrier();\n"),
    "wait_elsewhere": (
        "DEVICE const int* control",
        "\n  if (thread < control[0]) {\n    barrier();\n  } else {\n    barrier();\n  }\n",
    ),
    "add_in_some": (
        "DEVICE const int* control, DEVICE float* y",
        "\n  if (thread != control[0])\n    y[thread] = subgroup_add(1.0f);\n",
    ),
    "read_at": ("DEVICE const int* control, DEVICE float* y", "  y[thread] = y[control[0]];"),
    "write_at": ("DEVICE const int* control, DEVICE float* y", "  if (thread == 5) y[control[0]] = 1.0f;"),
    "follow": ("DEVICE const long* at, DEVICE float* y", "  y[thread] = ((DEVICE float*)at[0])[thread];"),
    "load16_at": (
        "DEVICE const int* control, DEVICE const uchar* x, DEVICE uchar* y",
        "\n  store16(y + thread * 16, load16(x + control[0] + thread * 16));",
    ),
    "float_at": (
        "DEVICE const int* control, DEVICE const uchar* x, DEVICE float* y",
        "\n  y[thread] = *(DEVICE const float*)(x + control[0]);",
    ),
    "shared_at": (
        "DEVICE const int* control, DEVICE float* y",
        "\n  SHARED float values[100];\n  y[thread] = values[control[0]];",
    ),
    "shared_pointer_at": (
        "DEVICE const int* control, DEVICE float* y",
        "\n  SHARED float values[100];\n  POINTER float* p = values;\n  p[control[0]] = 0.0f;",
    ),
    "shift_by": ("DEVICE const int* control, DEVICE int* y", "  y[thread] = 1 << control[0];"),
    "divide_by": ("DEVICE const int* control, DEVICE int* y", "  y[thread] = thread / control[0];"),
    "recurse": (
        "DEVICE const int* control, DEVICE float* y",
        "  float big[30000]; for (int i = 0; i < 30000; ++i) big[i] = y[0]; y[1] = big[control[0]];",
    ),
    "greedy": (
        "DEVICE float* y",
        "  SHARED float big[BIG];\n  big[thread] = 0.0f;\n  y[thread] = big[thread];",
    ),
    "halves": (
        "DEVICE const ushort* x, DEVICE float* y, DEVICE ushort* z",
        "\n  const int i = block_x * 128 + thread;\n  y[i] = half_to_float(x[i]);"
        "\n  z[i] = float_to_half(y[i]);",
    ),
    "to_half": (
        "DEVICE const float* x, DEVICE ushort* y",
        "  y[block_x * 128 + thread] = float_to_half(x[block_x * 128 + thread]);",
    ),
    "functions": (
        "DEVICE const float* x, DEVICE float* y",
        """
  const float v = x[thread];
  const float all[13] = {fexp(v), flog(v), fsqrt(v), frsqrt(v), fsin(v), fcos(v), ftanh(v), fpow(v, 1.5f),
                         ffma(v, v, -1.0f), fmin_(v, 2.0f), fmax_(v, 2.0f), fabs_(-v), frint(v)};
  for (int i = 0; i < 13; ++i) y[i * 128 + thread] = all[i];
""",
    ),
    "integers": (
        "DEVICE const int* a, DEVICE const int* b, DEVICE int* y",
        """
  y[thread] = dot4(a[thread], b[thread], 7);
  y[128 + thread] = imin(a[thread], b[thread]);
  y[256 + thread] = imax(a[thread], b[thread]);
  const uint2 pair = load8((DEVICE const uchar*)(a + thread / 2 * 2));
  y[384 + thread] = as_int(thread % 2 ? pair.y : pair.x);
""",
    ),
}
SPELLINGS = {
    "cuda": {"DEVICE ": "", "SHARED": "__shared__", "POINTER ": "", "BIG": "12289"},
    "hip": {"DEVICE ": "", "SHARED": "__shared__", "POINTER ": "", "BIG": "16385"},
    "metal": {"DEVICE": "device", "SHARED": "threadgroup", "POINTER": "threadgroup", "BIG": "8193"},
}


def source(dialect: str, names: tuple[str, ...] = tuple(KERNELS), barrier: str = "barrier();") -> str:
    """The kernels in the spelling of a dialect."""
    parts = ['#include "prelude.h"']
    for name in names:
        parameters, body = KERNELS[name]
        if dialect == "metal":
            listed = [f"{p} [[buffer({i})]]" for i, p in enumerate(parameters.split(", "))]
            listed.append("uint thread_position [[thread_position_in_threadgroup]]")
            listed.append("uint3 block_position [[threadgroup_position_in_grid]]")
            head = f"kernel void {name}({', '.join(listed)}) {{"
            position = "int(thread_position)", "int(block_position.x)", "int(block_position.y)"
        else:
            listed = [p.replace("* ", "* __restrict__ ") for p in parameters.split(", ")]
            head = f'extern "C" __global__ void __launch_bounds__(128) {name}({", ".join(listed)}) {{'
            position = "threadIdx.x", "blockIdx.x", "blockIdx.y"
        values = zip(("thread", "block_x", "block_y"), position, strict=True)
        places = "".join(f"  const int {variable} = {value};" for variable, value in values)
        text = f"{head}\n{places}\n{body}\n}}\n".replace("BARRIER", barrier)
        for word, spelling in SPELLINGS[dialect].items():
            text = text.replace(word, spelling)
        parts.append(text)
    return "\n".join(parts)


def put(device: EmulatedDevice, data: Any, dtype: Any = None) -> DeviceBuffer:
    array = np.asarray(data, dtype)
    buffer = device.allocate(array.nbytes)
    device.write(buffer, array)
    return buffer


Grid = tuple[int, int]


def launch(device: EmulatedDevice, kernel: str, *buffers: DeviceBuffer, grid: Grid = (1, 1)) -> None:
    device.launch(kernel, grid, THREADS, [(buffer, 0) for buffer in buffers])


def fail(device: EmulatedDevice, kernel: str, *buffers: DeviceBuffer, grid: Grid = (1, 1)) -> str:
    with pytest.raises(KernelError) as caught:
        launch(device, kernel, *buffers, grid=grid)
    return str(caught.value)
