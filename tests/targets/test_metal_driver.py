"""The driver of Apple's GPUs, over a double of PyObjC's Metal."""

import gc
import sys

import numpy as np
import pytest

import metal_double
from driver_cases import THREADS, X, Y, entry, get, put, step
from metal_double import Gpu
from simt_kernels import source
from zllmc.runtime.device import KernelError
from zllmc.runtime.metal import MetalDevice
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import Launch, Pointer

FAIL = "kernel void fail(device float* y [[buffer(0)]]) {}"


@pytest.fixture
def open_metal(monkeypatch):
    """`open_metal(Gpu(family=7), graphs=False)`: a device on a double."""

    def open_metal(*gpus, text=None, architecture="apple7", subgroup=32, **options):
        for name, module in metal_double.modules(*gpus).items():
            monkeypatch.setitem(sys.modules, name, module)
        texts = {name: source("metal", (name,)) for name in ("accumulate", "copy")} | {"fail": FAIL}
        kernels = {name: text or its.replace('#include "prelude.h"', "") for name, its in texts.items()}
        encoded = {name: its.encode() for name, its in kernels.items()}
        return MetalDevice(encoded, architecture, subgroup, **options)

    return open_metal


WAYS = [(Gpu, {}), (Gpu, {"graphs": False}), (Gpu, {"blocking": True}), (lambda: Gpu(family=8), {})]


@pytest.mark.parametrize(("gpu", "options"), WAYS, ids=["indirect", "encoded", "blocking", "apple8"])
def test_a_recording_replays_in_order_and_can_be_rebound(gpu, options, open_metal):
    device = open_metal(gpu(), **options)
    place = 4 * THREADS
    launches = step(X, Pointer(1, place)), step(Pointer(0, place), Pointer(1, place))
    x, y = put(device, np.repeat([1, 2], THREADS)), put(device, np.zeros(2 * THREADS))
    recording = device.record(entry(*launches), [x, y])
    recording.replay()
    recording.replay()
    first, second = device.read(y, np.float32, (2, THREADS))
    assert (first == 0).all() and (second == 20).all()

    other = put(device, np.ones(2 * THREADS))
    recording.rebind(1, other)
    recording.rebind(5, x)  # which no launch uses
    recording.replay()
    recording.rebind(1, y)
    recording.replay()
    assert (device.read(other, np.float32, (2, THREADS))[1] == 8).all()
    assert (device.read(y, np.float32, (2, THREADS))[1] == 84).all()
    with pytest.raises(ValueError, match="points 512 bytes into buffer 1, which has 512"):
        recording.rebind(1, device.allocate(place))


def test_what_is_read_later_waits_for_the_work_before(open_metal):
    gpu = Gpu()
    device = open_metal(gpu)
    y, z = (put(device, np.zeros(THREADS)) for _ in range(2))
    ones = put(device, np.ones(THREADS))
    first, second = (device.record(entry(step(X, Y)), [ones, it]) for it in (y, z))
    for recording in first, second:  # which make their commands
        recording.replay()
    early = device.read_later(z, np.float32, (2,))
    first.replay()
    read = device.read_later(y, np.float32, (2, 2), 8)
    second.replay()
    assert len(gpu.committed) == 3 and (read() == 3).all() and read().shape == (2, 2)
    assert len(gpu.committed) == 1 and (early() == 1).all()
    assert (get(device, z) == 3).all() and (read() == 3).all()
    with pytest.raises(ValueError, match="of a buffer of 512 bytes"):
        device.read_later(y, np.float32, (1,), 512)


@pytest.mark.parametrize(("gpu", "options"), WAYS, ids=["indirect", "encoded", "blocking", "apple8"])
def test_a_batch_runs_some_of_its_slots(gpu, options, open_metal):
    device = open_metal(gpu(), **options)
    ones = put(device, np.ones(THREADS))
    states = [put(device, np.zeros(THREADS)) for _ in range(3)]
    steps = [step(X, Y, slot=slot) for slot in range(3)]
    recording = device.record(entry(*steps, name="batch"), [ones, states[0]])
    for slot in 1, 2:
        recording.rebind(1, states[slot], slot)
    recording.replay()
    recording.limit(2)
    recording.rebind(1, None, 2)
    recording.replay()
    recording.limit(1)
    recording.replay()
    assert [get(device, state)[0] for state in states] == [7, 3, 1]
    recording.limit(3)
    with pytest.raises(ValueError, match="batch: buffer 1 of slot 2 has no memory"):
        recording.replay()
    recording.rebind(1, states[0], 2)
    recording.replay()
    assert [get(device, state)[0] for state in states] == [31, 7, 1]


def test_a_grid_follows_the_tokens_of_the_pass(open_metal):
    device = open_metal(Gpu())
    x = np.arange(8 * 64, dtype=np.float32)
    control = device.allocate(4)
    device.write(control, np.array([8], np.int32))
    y = device.allocate(x.nbytes)
    copy = Launch("copy", (X, Y, Pointer(2, 0)), grid=(1, 4), threads=THREADS, rows=2)
    recording = device.record(entry(copy, name="prefill"), [control, put(device, x), y])
    for tokens, rows in (1, 2), (3, 4), (4, 4), (7, 8):
        device.write(y, np.full(x.size, -1, np.float32))
        recording.replay(tokens)
        expected = np.where(np.arange(x.size) < 64 * rows, x, -1)
        np.testing.assert_array_equal(device.read(y, np.float32, x.shape), expected)


def test_memory_goes_when_the_work_that_uses_it_is_done(open_metal):
    device = open_metal(Gpu())
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(THREADS))
    recording = device.record(entry(step(X, Y)), [ones, y])
    recording.replay()
    del ones, recording
    gc.collect()
    assert len(device._memory) == 2
    assert (get(device, y) == 1).all()
    assert len(device._memory) == 1
    with pytest.raises(ZllmcError, match=r"no memory for a buffer of 2,000,000 bytes.*1,048,576.*--context"):
        device.allocate(2_000_000)


def test_files_and_bytes_come_back(open_metal, tmp_path):
    device = open_metal(Gpu())
    for size in 0, 5, 100_000:
        data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        path = tmp_path / "weights.bin"
        path.write_bytes(data.tobytes())
        buffer = device.load(path)
        np.testing.assert_array_equal(device.read(buffer, np.uint8, (size,)), data)
    with pytest.raises(ValueError, match="of a buffer of 100000 bytes"):
        device.write(buffer, data, 1)


def test_the_time_of_each_launch(open_metal):
    device = open_metal(Gpu())
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(THREADS))
    recording = device.record(entry(step(X, Y), step(X, Y, slot=1), step(X, Y), name="batch"), [ones, y])
    recording.limit(1)
    np.testing.assert_allclose(recording.profile(), [1e6, 1e6], rtol=1e-6)
    assert recording.describe(1) == "batch, launch 1, kernel accumulate"
    device.launch("accumulate", (1, 1), THREADS, [(ones, 0), (y, 0)])
    assert (get(device, y) == 7).all()


def test_without_indirect_command_buffers_all_is_the_same_and_the_reason_is_told(open_metal):
    device = open_metal(Gpu(indirect=False))
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(THREADS))
    recording = device.record(entry(step(X, Y)), [ones, y])
    with pytest.warns(RuntimeWarning, match="makes no indirect command buffer for 1 launches") as told:
        recording.replay()
        recording.replay()
    assert len(told) == 1 and told[0].filename == __file__
    assert (get(device, y) == 3).all()


def test_devices_and_sources_that_do_not_fit(open_metal, monkeypatch):
    with pytest.raises(ZllmcError, match="made for apple9, and Double is older"):
        open_metal(Gpu(family=8), architecture="apple9")
    with pytest.raises(ZllmcError, match="no metal device 1: the system finds 1"):
        open_metal(Gpu(), number=1)
    with pytest.raises(ZllmcError, match="subgroups of 64 lanes; those of Double have 32"):
        open_metal(Gpu(), subgroup=64)
    with pytest.raises(KernelError, match=r"accumulate does not compile: prelude\.h not found"):
        open_metal(Gpu(), text='#include "prelude.h"')
    with pytest.raises(KernelError, match="accumulate is not in its source"):
        open_metal(Gpu(), text="nothing")
    monkeypatch.setitem(sys.modules, "Metal", None)
    with pytest.raises(ZllmcError, match=r"Mac with PyObjC.*pyobjc-framework-Metal.*--device emulate"):
        MetalDevice({}, "apple7", 32)


@pytest.mark.parametrize("blocking", [False, True])
def test_launches_that_fail_or_are_refused(blocking, open_metal):
    device = open_metal(Gpu(), blocking=blocking)
    y = put(device, np.zeros(THREADS))
    for kernel, text in ("nonsense", "no kernel nonsense"), ("fail", "fail: 513 threads in a block.* 512"):
        with pytest.raises(KernelError, match=text):
            device.launch(kernel, (1, 1), 513, [(y, 0)])
    with pytest.raises(KernelError, match="accumulate is given numbers"):
        device.record(entry(step(7, 8)), [y])
    fail = Launch("fail", (X,), grid=(1, 1), threads=THREADS)
    recording = device.record(entry(step(X, X), fail), [y])
    text = "Double, decode, launch 1, kernel fail: page fault" if blocking else "Double, decode: page fault"
    with pytest.raises(KernelError, match=text):
        recording.replay()
        device.synchronize()
    device.synchronize()
    device.close()
    device.close()
    for call in recording.replay, device.synchronize, lambda: device.allocate(1):
        with pytest.raises(RuntimeError, match="closed"):
            call()
