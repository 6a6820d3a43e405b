"""The driver of NVIDIA's and AMD's GPUs, over doubles of their libraries: memory and recordings."""

import gc
import threading

import numpy as np
import pytest

from driver_cases import SLOT, THREADS, X, Y, entry, get, put, step
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import Launch, Pointer

# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, SLOT, 2 * SLOT + 3])
def test_bytes_come_back(double, size):
    device = double.open()
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    buffer = device.allocate(size + 10)
    device.write(buffer, data, 7)
    np.testing.assert_array_equal(device.read(buffer, np.uint8, (size,), 7), data)
    for call in lambda: device.read(buffer, np.uint8, (size,), 11), lambda: device.write(buffer, data, -1):
        with pytest.raises(ValueError, match=f"of a buffer of {size + 10} bytes"):
            call()


@pytest.mark.parametrize("size", [0, 5, SLOT, 5 * SLOT + 7])
def test_a_file_is_loaded(double, size, tmp_path):
    device = double.open()
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    path = tmp_path / "weights.bin"
    path.write_bytes(data.tobytes())
    np.testing.assert_array_equal(device.read(device.load(path), np.uint8, (size,)), data)
    with pytest.raises(FileNotFoundError):
        device.load(tmp_path / "other.bin")


def test_the_host_may_change_what_it_wrote(double):
    device = double.open()
    buffers = [device.allocate(SLOT // 3) for _ in range(20)]  # more than all staging memory
    data = np.zeros(SLOT // 3, np.uint8)
    for number, buffer in enumerate(buffers):
        data[:] = number
        device.write(buffer, data)
    data[:] = 99
    for number, buffer in enumerate(buffers):
        assert (device.read(buffer, np.uint8, data.shape) == number).all()


def test_released_memory_is_lent_again(double):
    device = double.open()
    first = device.allocate(1000)
    address = first.address
    before = double.calls("allocate"), double.calls("free")
    del first
    assert device.allocate(1024).address == address
    assert (double.calls("allocate"), double.calls("free")) == before
    assert device.allocate(1025).address != address


def test_memory_is_lent_again_when_the_work_that_uses_it_is_done(double):
    device = double.open()
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(THREADS))
    recording = device.record(entry(step(X, Y)), [ones, y])
    recording.replay()
    address = ones.address
    del ones, recording
    gc.collect()
    other = put(device, np.full(THREADS, 5))
    assert other.address == address
    assert (get(device, y) == 1).all()
    assert (get(device, other) == 5).all()


def test_memory_goes_back_to_the_system_before_there_is_none(double):
    device = double.open()
    for size in 10 << 20, 20 << 20, 30 << 20, 50 << 20, 60 << 20:
        device.write(device.allocate(size), np.zeros(1))
    kept = device.allocate(15 << 20)
    text = (
        rf"no memory for a buffer of 60,000,000 bytes: of {64 << 20:,} bytes {49 << 20:,} are free.*--context"
    )
    with pytest.raises(ZllmcError, match=text):
        device.allocate(60_000_000)
    device.write(kept, np.zeros(15 << 20, np.uint8))


def test_an_empty_buffer(double):
    device = double.open()
    assert device.read(device.allocate(0), np.float32, (0,)).shape == (0,)


def test_bytes_that_are_read_later_are_those_of_then(double):
    device = double.open()
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(THREADS))
    recording = device.record(entry(step(X, Y)), [ones, y])
    reads = []
    for _ in range(7):  # more than there is room for
        recording.replay()
        reads.append(device.read_later(y, np.float32, (2, 3), 4))
    before = double.launches().count("accumulate")
    assert (reads[4]() == 31).all() and reads[4]().shape == (2, 3)
    assert before + double.launches().count("accumulate") == 5  # the later ones have not been waited for
    assert [read()[0, 0] for read in reads] == [1, 3, 7, 15, 31, 63, 127]
    with pytest.raises(ValueError, match="of a buffer of 512 bytes"):
        device.read_later(y, np.float32, (1,), 512)
    with pytest.raises(ValueError, match="1028 bytes to read later; there is room for 1024"):
        device.read_later(device.allocate(2000), np.float32, (257,))


# -- recordings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"graphs": False}, {"blocking": True}], ids=str)
def test_a_recording_replays_in_order_and_can_be_rebound(double, options):
    device = double.open(**options)
    launch = step(X, Pointer(1, 4 * THREADS))
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(2 * THREADS))
    recording = device.record(entry(launch, launch, launch), [ones, y])
    recording.replay()
    recording.replay()
    first, second = device.read(y, np.float32, (2, THREADS))
    assert (first == 0).all() and (second == 63).all()

    other = put(device, np.ones(2 * THREADS))
    recording.rebind(1, other)
    recording.rebind(5, ones)  # which no launch uses
    recording.replay()
    assert (device.read(other, np.float32, (2, THREADS))[1] == 15).all()
    assert (device.read(y, np.float32, (2, THREADS))[1] == 63).all()
    with pytest.raises(ValueError, match="points 512 bytes into buffer 1, which has 512"):
        recording.rebind(1, ones)
    recording.replay()
    assert (device.read(other, np.float32, (2, THREADS))[1] == 127).all()
    assert double.calls("launch_graph") == (0 if options else 4)
    assert double.calls("instantiate") == (0 if options else 1)


def test_sessions_take_turns_on_one_graph(double):
    device = double.open()
    shared = put(device, np.zeros(THREADS))
    sessions = [[put(device, np.full(THREADS, 10 * i + layer)) for layer in range(3)] for i in range(3)]
    # `shared` gathers what the layers of the session hold.
    launches = [step(Pointer(1 + layer, 0), X) for layer in range(3)]
    recording = device.record(entry(*launches, step(X, X)), [shared, *sessions[0]])
    expected = np.float32(0)
    for turn in 0, 0, 2, 1, 1, 0:
        for layer, memory in enumerate(sessions[turn]):
            recording.rebind(1 + layer, memory)
        recording.replay()
        for layer in range(3):
            expected = expected * 2 + 10 * turn + layer
        expected *= 3
        np.testing.assert_array_equal(get(device, shared), np.full(THREADS, expected))
    assert double.calls("instantiate") == 1
    # Bound again to the same memory, a launch is not changed; the last, which has no state, never is.
    assert double.calls("set_kernel_node") == 9


def test_a_batch_runs_some_of_its_slots(double):
    device = double.open()
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
    assert len(recording.launches) == 1

    recording.limit(3)
    with pytest.raises(ValueError, match="batch: buffer 1 of slot 2 has no memory"):
        recording.replay()
    recording.rebind(1, states[0], 2)
    recording.replay()
    assert [get(device, state)[0] for state in states] == [31, 7, 1]
    assert double.calls("instantiate") == 1


@pytest.mark.parametrize("name", ["prefill", "batch"])
def test_a_grid_follows_the_tokens_of_the_pass(double, name):
    device = double.open()
    x = np.arange(8 * 64, dtype=np.float32)
    control = device.allocate(4)
    device.write(control, np.array([8], np.int32))
    y = device.allocate(x.nbytes)
    copy = Launch("copy", (X, Y, Pointer(2, 0)), grid=(1, 4), threads=THREADS, rows=2)
    recording = device.record(entry(copy, name=name), [control, put(device, x), y])
    for tokens, rows in (1, 2), (3, 4), (4, 4), (7, 8):
        device.write(y, np.full(x.size, -1, np.float32))
        recording.replay(tokens)
        expected = np.where(np.arange(x.size) < 64 * rows, x, -1)
        np.testing.assert_array_equal(device.read(y, np.float32, x.shape), expected)
    assert double.calls("launch_graph") == (0 if name == "prefill" else 4)


def test_launches_without_a_barrier_may_run_side_by_side(double):
    device = double.open()
    x = put(device, np.full(THREADS, 3))
    buffers = [x, *(put(device, np.zeros(THREADS)) for _ in range(4))]

    def add(a, b, c, barrier=True):
        return step(Pointer(a, 0), Pointer(b, 0), Pointer(c, 0), kernel="add", barrier=barrier)

    first = add(0, 0, 1, barrier=False), step(X, Pointer(2, 0))
    launches = *first, add(1, 2, 3), add(3, 3, 4, barrier=False)
    recording = device.record(entry(*launches), buffers)
    double.launches()
    recording.replay()
    assert (get(device, buffers[4]) == 18).all()
    # The double runs the last of those that may run.
    beside = "accumulate\nadd\n" if double.kind == "cuda" else "add\naccumulate\n"
    assert double.launches() == beside + "add\nadd\n"


def test_the_time_of_each_launch(double):
    device = double.open()
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(THREADS))
    recording = device.record(entry(step(X, Y), step(X, Y, slot=1), step(X, Y), name="batch"), [ones, y])
    recording.limit(1)
    np.testing.assert_array_equal(recording.profile(), [1_000_000, 1_000_000])
    assert (get(device, y) == 3).all()
    assert recording.describe(1) == "batch, launch 1, kernel accumulate"


def test_graphs_go_when_their_recordings_are_gone(double):
    device = double.open()
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(THREADS))
    for _ in range(4):
        recording = device.record(entry(step(X, Y)), [ones, y])
        recording.replay()
        del recording
        gc.collect()
    assert (get(device, y) == 15).all()
    device.allocate(1)
    assert double.calls("destroy_instance") == double.calls("destroy_graph") == 4


def test_one_launch_at_a_time(double):
    device = double.open()
    y = put(device, np.zeros(2 * THREADS))
    device.launch("accumulate", (1, 1), THREADS, [(put(device, np.full(THREADS, 7)), 0), (y, 4 * THREADS)])
    assert device.read(y, np.float32, (2, THREADS))[:, 0].tolist() == [0, 7]
    assert double.calls("launch") == 1


def test_work_from_other_threads(double):
    device = double.open()
    ones, y = put(device, np.ones(THREADS)), put(device, np.zeros(THREADS))
    recording = device.record(entry(step(X, Y)), [ones, y])
    found = []

    def work():
        recording.replay()
        found.append(get(device, y)[0])

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [1, 3, 7]
