"""Short ways for tests of GPU drivers to say buffers and launches."""

import numpy as np

from zllmc.runtime.driver_api import CUDA, HIP
from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

THREADS = 128
SLOT = 1 << 14  # bytes of staging memory
VENDORS = {"cuda": CUDA, "rocm": HIP}


def put(device, data):
    array = np.asarray(data, np.float32)
    buffer = device.allocate(array.nbytes)
    device.write(buffer, array)
    return buffer


def get(device, buffer):
    return device.read(buffer, np.float32, (THREADS,))


def step(*args, kernel="accumulate", **fields):
    return Launch(kernel, args, grid=(1, 1), threads=THREADS, **fields)


def entry(*launches, name="decode", max_tokens=8):
    return EntryPoint(name, max_tokens, 1, launches)


X, Y = Pointer(0, 0), Pointer(1, 0)
