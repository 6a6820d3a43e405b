"""The emulated GPU runs kernels of all dialects, waves and orders, and drives them as a GPU is driven."""

import gc
import signal
import subprocess
import sys

import numpy as np
import pytest

from simt_kernels import SPELLINGS, THREADS, launch, put, source
from zllmc.runtime.device import KernelError
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer


def entry(*launches: Launch) -> EntryPoint:
    return EntryPoint("decode", 8, 1, launches)


def one_block(kernel: str, *args: Pointer, slot: int | None = None) -> Launch:
    return Launch(kernel, args, slot=slot, grid=(1, 1), threads=THREADS)


# -- what kernels compute ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("subgroup", [32, 64])
@pytest.mark.parametrize("dialect", SPELLINGS)
def test_all_spellings_and_waves_reduce_and_exchange(dialect, subgroup, reverse, open_device):
    device = open_device(dialect, subgroup, reverse=reverse, optimize=dialect != "hip" or subgroup == 32)
    rng = np.random.default_rng(1)
    x = rng.integers(-1000, 1000, (9, THREADS)).astype(np.float32)
    y = device.allocate(9 * 8)
    launch(device, "reduce", put(device, x), y, grid=(9, 1))
    np.testing.assert_array_equal(device.read(y, np.float32, (9, 2)), np.stack([x.sum(1), x.max(1)], 1))

    x = rng.integers(-(2**31), 2**31, (THREADS // subgroup, subgroup)).astype(np.int32)
    y = device.allocate(4 * x.nbytes)
    launch(device, "exchange", put(device, x), y)
    turned, crossed, added, third = device.read(y, np.int32, (4, *x.shape))
    np.testing.assert_array_equal(turned, x[:, ::-1])
    np.testing.assert_array_equal(crossed, x[:, np.arange(subgroup) ^ 5])
    np.testing.assert_array_equal(added, np.broadcast_to(x.sum(1, dtype=np.int32)[:, None], x.shape))
    np.testing.assert_array_equal(third, np.broadcast_to(x[:, 3:4] & 0x3FFFFFFF, x.shape))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("subgroup", [32, 64])
def test_units_of_32_lanes_go_their_own_ways(subgroup, reverse, open_device):
    device = open_device("hip", subgroup, reverse=reverse)
    x = np.random.default_rng(5).integers(-(2**20), 2**20, (4, 32)).astype(np.int32)
    y = device.allocate(4 * x.nbytes)
    launch(device, "units", put(device, x), y)
    added, most, turned, crossed = device.read(y, np.int32, (4, 4, 32))
    np.testing.assert_array_equal(added, np.broadcast_to((x.sum(1) + np.arange(4))[:, None], x.shape))
    np.testing.assert_array_equal(most, np.broadcast_to(x.max(1)[:, None], x.shape))
    np.testing.assert_array_equal(turned, x[:, ::-1])
    np.testing.assert_array_equal(crossed, x[:, np.arange(32) ^ 3])


def test_float_sums_are_those_of_a_butterfly(open_device):
    device = open_device()
    x = np.random.default_rng(2).standard_normal((1, THREADS)).astype(np.float32)
    y = device.allocate(8)
    launch(device, "reduce", put(device, x), y)
    parts = x.reshape(4, 32)
    while parts.shape[1] > 1:
        parts = parts[:, : parts.shape[1] // 2] + parts[:, parts.shape[1] // 2 :]
    a, b, c, d = parts[:, 0]
    assert device.read(y, np.float32, (2,))[0] == ((a + b) + c) + d


def test_every_half_survives_the_way_to_float_and_back(open_device):
    device = open_device()
    x = np.arange(1 << 16, dtype=np.uint16)
    y, z = device.allocate(4 << 16), device.allocate(2 << 16)
    launch(device, "halves", put(device, x), y, z, grid=(512, 1))
    expected = x.view(np.float16)
    np.testing.assert_array_equal(device.read(y, np.float32, x.shape), expected.astype(np.float32))
    number = ~np.isnan(expected)
    back = device.read(z, np.float16, x.shape)
    np.testing.assert_array_equal(back.view(np.uint16)[number], x[number])
    assert np.isnan(back[~number]).all()


def test_floats_become_the_nearest_half(open_device):
    device = open_device()
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[:-1] + halves[1:]) / 2  # ties go to the even one
    below, above = np.nextafter(between, 0), np.nextafter(between, np.float32(9e9))
    x = np.concatenate([between, below, above, [65519, 65520, 1e30, 1e-30, np.inf]]).astype(np.float32)
    x = np.resize(np.concatenate([x, -x]), (2 * len(x) // THREADS + 1, THREADS))
    y = device.allocate(2 * x.size)
    launch(device, "to_half", put(device, x), y, grid=(len(x), 1))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(device.read(y, np.float16, x.shape), x.astype(np.float16))


def test_functions(open_device):
    device = open_device()
    x = np.linspace(0.1, 9, THREADS).astype(np.float32)
    y = device.allocate(13 * x.nbytes)
    launch(device, "functions", put(device, x), y)
    v = x.astype(np.float64)
    expected = [np.exp(v), np.log(v), np.sqrt(v), v**-0.5, np.sin(v), np.cos(v), np.tanh(v), v**1.5]
    expected += [v * v - 1, np.minimum(v, 2), np.maximum(v, 2), v, np.rint(v)]
    np.testing.assert_allclose(device.read(y, np.float32, (13, THREADS)), expected, rtol=2e-6, atol=1e-7)


def test_integers_and_bytes(open_device):
    device = open_device()
    a, b = np.random.default_rng(3).integers(-(2**31), 2**31, (2, THREADS)).astype(np.int32)
    y = device.allocate(4 * a.nbytes)
    launch(device, "integers", put(device, a), put(device, b), y)
    products = a.view(np.int8).astype(np.int32) * b.view(np.int8)
    expected = [products.reshape(-1, 4).sum(1) + 7, np.minimum(a, b), np.maximum(a, b), a]
    np.testing.assert_array_equal(device.read(y, np.int32, (4, THREADS)), expected)


# -- the driver ----------------------------------------------------------------------------------------------


def test_a_recording_replays_in_order_and_can_be_rebound(open_device):
    device = open_device()
    step = one_block("accumulate", Pointer(0, 0), Pointer(1, 4 * THREADS))
    ones, y = put(device, np.ones(THREADS, np.float32)), put(device, np.zeros(2 * THREADS, np.float32))
    recording = device.record(entry(step, step, step), [ones, y])
    recording.replay()
    recording.replay()
    first, second = device.read(y, np.float32, (2, THREADS))
    assert (first == 0).all() and (second == 63).all()

    other = put(device, np.full(2 * THREADS, 1.0, np.float32))
    recording.rebind(1, other)
    recording.replay()
    assert (device.read(other, np.float32, (2, THREADS))[1] == 15).all()
    assert (device.read(y, np.float32, (2, THREADS))[1] == 63).all()
    with pytest.raises(ValueError, match="points 512 bytes into buffer 1, which has 512"):
        recording.rebind(1, ones)


def test_a_recording_keeps_its_buffers_alive(open_device):
    device = open_device()
    y = put(device, np.zeros(THREADS, np.float32))
    step = one_block("accumulate", Pointer(0, 0), Pointer(1, 0))
    recording = device.record(entry(step), [put(device, np.ones(THREADS, np.float32)), y])
    gc.collect()
    recording.replay()
    assert (device.read(y, np.float32, (THREADS,)) == 1).all()


def test_a_grid_follows_the_tokens_of_the_pass(open_device):
    device = open_device()
    x = np.arange(8 * 64, dtype=np.float32)
    control, source_, y = put(device, [8], np.int32), put(device, x), device.allocate(x.nbytes)
    args = Pointer(0, 0), Pointer(1, 0), Pointer(2, 0)
    copy = Launch("copy", args, grid=(1, 4), threads=THREADS, rows=2)
    recording = device.record(entry(copy), [control, source_, y])
    for tokens, rows in (1, 2), (3, 4), (4, 4), (7, 8):
        device.write(y, np.full(x.size, -1, np.float32))
        recording.replay(tokens)
        expected = np.where(np.arange(x.size) < 64 * rows, x, -1)
        np.testing.assert_array_equal(device.read(y, np.float32, x.shape), expected)


def test_a_batch_runs_some_of_its_slots(open_device):
    device = open_device()
    ones = put(device, np.ones(THREADS, np.float32))
    states = [put(device, np.zeros(THREADS, np.float32)) for _ in range(3)]
    args = Pointer(0, 0), Pointer(1, 0)
    steps = [one_block("accumulate", *args, slot=slot) for slot in range(3)]
    recording = device.record(entry(*steps), [ones, states[0]])
    for slot in 1, 2:
        recording.rebind(1, states[slot], slot)
    recording.replay()
    recording.limit(2)
    recording.rebind(1, None, 2)
    recording.replay()
    assert [device.read(state, np.float32, (THREADS,))[0] for state in states] == [3, 3, 1]


def test_many_blocks_on_several_threads(open_device):
    x = np.random.default_rng(4).integers(-99, 99, (1000, THREADS)).astype(np.float32)
    for threads in 1, 2, 5:
        device = open_device(threads=threads)
        y = device.allocate(8 * len(x))
        args = Pointer(0, 0), Pointer(1, 0)
        reduce = Launch("reduce", args, grid=(len(x), 1), threads=THREADS)
        recording = device.record(entry(reduce, reduce, reduce), [put(device, x), y])
        recording.replay()
        np.testing.assert_array_equal(device.read(y, np.float32, (len(x), 2))[:, 0], x.sum(1))
        # The buffer ends in the middle of the grid: the blocks after it fail, on any thread, again and again.
        recording.rebind(0, put(device, x[:500]))
        for _ in range(5):
            with pytest.raises(KernelError, match=r"reads at byte 25\d{4} of buffer 0"):
                recording.replay()
        recording.rebind(0, put(device, x))
        recording.replay()


def test_launches_that_a_device_refuses(open_device):
    device = open_device(subgroup=64)
    y = device.allocate(4 * THREADS)
    with pytest.raises(KernelError, match="there is no kernel nonsense"):
        device.launch("nonsense", (1, 1), 64, [(y, 0)])
    with pytest.raises(KernelError, match="greedy is given numbers"):
        device.record(entry(Launch("greedy", (7,), threads=64)), [y])
    with pytest.raises(KernelError, match="greedy takes 1 pointers, not 2"):
        device.launch("greedy", (1, 1), 64, [(y, 0), (y, 0)])
    for threads in 0, 32, 96, 192:  # declared for 128
        with pytest.raises(KernelError, match=f"greedy: {threads} threads in a block"):
            device.launch("greedy", (1, 1), threads, [(y, 0)])
    with pytest.raises(ValueError, match="a launch points 512 bytes into buffer 0"):
        device.launch("greedy", (1, 1), 64, [(y, 512)])
    for call in lambda: device.read(y, np.float32, (4,), 500), lambda: device.write(y, np.zeros(2), -1):
        with pytest.raises(ValueError, match="of a buffer of 512 bytes"):
            call()
    with pytest.raises(ZllmcError, match="no memory for a buffer"):
        device.allocate(1 << 60)
    step = one_block("accumulate", Pointer(0, 0), Pointer(0, 0))
    recording = device.record(entry(step), [y])
    device.close()
    with pytest.raises(RuntimeError, match="closed"):
        recording.replay()


# -- the compiler --------------------------------------------------------------------------------------------


def test_no_compiler_is_needed_for_cached_kernels(emulator_cache, tmp_path, monkeypatch):
    text = {"turn.cu": source("cuda", ("turn",))}
    EmulatedDevice(text, "cuda", 32, cache=emulator_cache)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("zllmc.runtime.host_compiler.find_spec", lambda name: None)
    EmulatedDevice(text, "cuda", 32, cache=emulator_cache)
    with pytest.raises(ZllmcError, match="Install g\\+\\+"):
        EmulatedDevice(text, "cuda", 32, cache=tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(ZllmcError, match="CXX names no-such-compiler"):
        EmulatedDevice(text, "cuda", 32, cache=tmp_path)


def test_kernels_of_several_caches_run_side_by_side(emulator_cache, tmp_path):
    x = np.arange(THREADS, dtype=np.float32)
    for cache in emulator_cache, tmp_path, emulator_cache:
        device = EmulatedDevice({"turn.cu": source("cuda", ("turn",))}, "cuda", 32, cache=cache)
        y = device.allocate(x.nbytes)
        launch(device, "turn", put(device, x), y)
        np.testing.assert_array_equal(device.read(y, np.float32, x.shape), x[::-1])


def test_sources_that_do_not_compile(emulator_cache):
    wrong = "kernel void wrong(device float* y [[buffer(0)]]) {\n  y[0] = nonsense;\n}\n"
    with pytest.raises(KernelError, match=r"wrong\.metal:2:10: error: .*nonsense"):
        EmulatedDevice({"wrong.metal": wrong}, "metal", 32, cache=emulator_cache)
    one = source("cuda", ("turn",))
    with pytest.raises(KernelError, match="two kernels turn"):
        EmulatedDevice({"a.cu": one, "b.cu": one}, "cuda", 32, cache=emulator_cache)


FAULT = """
import ctypes, pathlib, sys
from zllmc.runtime.emulator import EmulatedDevice
device = EmulatedDevice({"turn.cu": sys.argv[1]}, "cuda", 32, cache=pathlib.Path(sys.argv[2]))
x = device.allocate(512)
device.launch("turn", (1, 1), 128, [(x, 0), (x, 0)])
print("launched", flush=True)
ctypes.string_at(0)
"""


def test_faults_that_are_no_kernel_s_end_the_process_as_ever(emulator_cache):
    command = [sys.executable, "-c", FAULT, source("cuda", ("turn",)), emulator_cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "launched\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
