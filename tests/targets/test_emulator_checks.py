"""The emulated GPU tells what a real one would do wrong, or differently, with a wrong kernel."""

import numpy as np
import pytest

from simt_kernels import SPELLINGS, THREADS, fail, launch, put, source

# -- what is found -------------------------------------------------------------------------------------------


def test_a_missing_barrier_is_wrong_in_one_of_the_orders(open_device):
    x = np.arange(2 * THREADS, dtype=np.float32).reshape(2, THREADS)
    right = {}
    for barrier in "barrier();", "":
        for reverse in False, True:
            device = open_device(text=source("cuda", ("turn",), barrier), reverse=reverse)
            y = device.allocate(x.nbytes)
            launch(device, "turn", put(device, x), y, grid=(2, 1))
            right[barrier, reverse] = (device.read(y, np.float32, x.shape) == x[:, ::-1]).all()
    assert right["barrier();", False] and right["barrier();", True]
    assert not (right["", False] and right["", True])


@pytest.mark.parametrize("reverse", [False, True])
def test_divergence(reverse, open_device):
    device = open_device(reverse=reverse)
    y = device.allocate(4 * THREADS)
    for thread in 0, 70, 127:
        text = fail(device, "leave", put(device, [thread], np.int32), grid=(3, 2))
        assert "kernel leave, block (" in text
        assert "at the barrier in line " in text and "has left" in text
    for thread in 10, 64:  # within a subgroup, and between two
        text = fail(device, "wait_elsewhere", put(device, [thread], np.int32))
        assert text.count("at the barrier in line") == 2
    text = fail(device, "add_in_some", put(device, [40], np.int32), y)
    assert "at the subgroup operation in line" in text and "has left" in text
    launch(device, "leave", put(device, [-1], np.int32), grid=(3, 2))  # the device goes on


@pytest.mark.parametrize("reverse", [False, True])
def test_accesses_outside_a_buffer(reverse, open_device):
    device = open_device("metal", reverse=reverse)
    y = device.allocate(4 * THREADS)
    for index in -1000 * 4, THREADS, THREADS + 100_000:
        control = put(device, [index], np.int32)
        where = f"at byte {4 * index} of buffer 1 (argument 1), which has {4 * THREADS} bytes"
        assert fail(device, "read_at", control, y).endswith(f"reads {where}")
        text = fail(device, "write_at", control, y)
        assert text.startswith("eager, launch 0, kernel write_at, block (0, 0), thread 5:")
        assert text.endswith(f"writes {where}")
    launch(device, "write_at", put(device, [THREADS - 1], np.int32), y)

    left = open_device("metal", left=True)
    assert "at byte -4 of" in fail(left, "read_at", put(left, [-1], np.int32), left.allocate(4 * THREADS))


def test_accesses_far_from_any_buffer(open_device):
    device = open_device()
    text = fail(device, "read_at", put(device, [2**31 - 1], np.int32), device.allocate(4 * THREADS))
    assert "which is in no buffer" in text


def test_accesses_to_addresses_that_cannot_exist(open_device):
    device = open_device()
    text = fail(device, "follow", put(device, [-1 << 50]), device.allocate(4 * THREADS))
    assert "address 0, or to one that cannot exist" in text


def test_misaligned_accesses(open_device):
    device = open_device()
    x, y = device.allocate(17 * THREADS), device.allocate(16 * THREADS)
    launch(device, "load16_at", put(device, [16], np.int32), x, y)
    text = fail(device, "load16_at", put(device, [4], np.int32), x, y)
    assert "a vector load is misaligned in line" in text
    launch(device, "float_at", put(device, [4], np.int32), x, y)
    assert "an access is misaligned in line" in fail(device, "float_at", put(device, [2], np.int32), x, y)


def test_errors_name_the_line_of_the_source(open_device):
    text = source("cuda")
    line = next(n for n, it in enumerate(text.splitlines(), 1) if "load16(" in it)
    device = open_device()
    x = device.allocate(17 * THREADS)
    assert fail(device, "load16_at", put(device, [4], np.int32), x, x).endswith(f"in line {line}")


def test_accesses_outside_a_shared_array(open_device):
    device = open_device()
    y = device.allocate(4 * THREADS)
    for index in -1, 100:
        text = fail(device, "shared_at", put(device, [index], np.int32), y)
        assert "an index lies outside its array in line" in text
    text = fail(device, "shared_pointer_at", put(device, [100], np.int32), y)
    assert text.endswith("writes outside shared array 0, which has 400 bytes, at 400")


def test_numbers_that_devices_treat_differently(open_device):
    device = open_device()
    y = device.allocate(4 * THREADS)
    launch(device, "shift_by", put(device, [31], np.int32), y)
    assert "shifted by as many bits" in fail(device, "shift_by", put(device, [32], np.int32), y)
    assert "a division by zero" in fail(device, "divide_by", put(device, [0], np.int32), y)


def test_too_much_memory_for_a_thread_or_a_block(open_device):
    for dialect in SPELLINGS:
        device = open_device(dialect)
        y = device.allocate(4 * THREADS)
        assert "the thread's variables" in fail(device, "recurse", put(device, [0], np.int32), y)
        assert "the shared arrays take" in fail(device, "greedy", y)


def test_memory_is_poisoned(open_device):
    device = open_device(threads=1)
    assert np.isnan(device.read(device.allocate(400), np.float32, (100,))).all()
    x = np.arange(2 * THREADS, dtype=np.float32).reshape(2, THREADS)
    for reverse in False, True:  # also what the block before left in shared memory
        device = open_device(text=source("cuda", ("turn",), ""), reverse=reverse, threads=1)
        y = device.allocate(x.nbytes)
        launch(device, "turn", put(device, x), y, grid=(2, 1))
        assert np.isnan(device.read(y, np.float32, x.shape)).sum() == THREADS


def test_poison_survives_a_maximum(open_device):
    device = open_device()
    y = device.allocate(8)
    launch(device, "reduce", device.allocate(4 * THREADS), y)
    assert np.isnan(device.read(y, np.float32, (2,))).all()
