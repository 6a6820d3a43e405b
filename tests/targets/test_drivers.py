"""The driver of NVIDIA's and AMD's GPUs, over doubles of their libraries, and real ones if there are any."""

import gc
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

from driver_double import ARCHITECTURE, FUNCTIONS, Double, compile_double
from simt_kernels import source
from zllmc.codegen.cuda_toolchain import compile_cuda
from zllmc.codegen.rocm_toolchain import compile_hip
from zllmc.runtime import driver_api, gpu, gpu_memory
from zllmc.runtime.device import KernelError
from zllmc.runtime.driver_api import CUDA, HIP
from zllmc.runtime.gpu import GpuDevice
from zllmc.targets import parse
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

THREADS = 128
SLOT = 1 << 14  # bytes of staging memory
VENDORS = {"cuda": CUDA, "rocm": HIP}


@pytest.fixture(scope="session")
def libraries(emulator_cache):
    """Paths of the doubles, by kind."""
    return {kind: compile_double(kind, emulator_cache) for kind in ("cuda", "rocm")}


@pytest.fixture(params=[CUDA, HIP], ids=lambda vendor: vendor.kind)
def double(request, libraries, monkeypatch):
    for module in gpu, gpu_memory:
        monkeypatch.setattr(module, "SLOT", SLOT)
    double = Double(request.param, libraries[request.param.kind])
    yield double
    for device in double.devices:
        device.close()
    assert double.misuses() == ""
    assert double.left() == ""


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


# -- errors --------------------------------------------------------------------------------------------------


def test_devices_that_do_not_fit(double):
    double.set(devices=2, subgroup=64)
    with pytest.raises(ZllmcError, match=r"subgroups of 32 lanes; those of Double 1 .* have 64"):
        double.open(number=1)
    double.set(devices=2)
    for number in -1, 2:
        with pytest.raises(ZllmcError, match=rf"no {double.kind} device {number}: the driver finds 2"):
            double.open(number=number)
    double.set(devices=0)
    with pytest.raises(ZllmcError, match="finds 0 of them"):
        double.open()
    other = {"cuda": "sm_80", "rocm": "gfx942"}[double.kind]
    double.set(architecture=other, capability=(8, 0))
    text = rf"compiled for {ARCHITECTURE[double.kind]}, and Double 0 .{other}. does not.*--target \w+\.$"
    with pytest.raises(ZllmcError, match=text):
        double.open()
    double.set(architecture="something else")  # which only the loading of kernels shows
    if double.kind == "cuda":
        with pytest.raises(ZllmcError, match=r"Double 0 .* cannot load kernel accumulate: .*error 209"):
            double.open()
    with pytest.raises(ZllmcError, match=r"not on this machine\. Install it, .*--device emulate"):
        GpuDevice(double.vendor, {}, "sm_90", 32, library="/no/such/library.so")


@pytest.mark.parametrize(
    ("compiled", "device", "runs"),
    [
        ("sm_90", "sm_90", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_120", "sm_121", True),
        ("sm_12", "sm_120", False),
        ("sm_90a", "sm_90", True),
        ("sm_100a", "sm_103", False),
    ],
)
def test_which_cubins_a_device_runs(compiled, device, runs):
    assert CUDA.runs(device, compiled) == runs


def test_a_kernel_that_is_missing_from_its_binary(double):
    double.set()
    binary = f"{ARCHITECTURE[double.kind]} other 2".encode()
    with pytest.raises(ZllmcError, match=r"cannot load kernel accumulate: .*ModuleGetFunction: error 500"):
        GpuDevice(
            double.vendor, {"accumulate": binary}, ARCHITECTURE[double.kind], 32, library=str(double.path)
        )


def test_launches_that_are_refused(double):
    device = double.open()
    y = put(device, np.zeros(THREADS))
    with pytest.raises(KernelError, match="there is no kernel nonsense"):
        device.launch("nonsense", (1, 1), 64, [(y, 0)])
    with pytest.raises(KernelError, match="accumulate is given numbers"):
        device.record(entry(step(7, 8)), [y])
    with pytest.raises(ValueError, match="a launch points 512 bytes into buffer 0"):
        device.launch("accumulate", (1, 1), THREADS, [(y, 512), (y, 0)])


@pytest.mark.parametrize("blocking", [False, True])
def test_a_kernel_that_fails(double, blocking):
    device = double.open(blocking=blocking)
    y, short = put(device, np.zeros(THREADS)), put(device, np.zeros(3 * THREADS))
    recording = device.record(entry(step(X, X), step(Pointer(1, 256), X)), [y, short])
    recording.replay()
    recording.rebind(1, device.allocate(300))
    text = r"decode, launch 1, kernel accumulate: \w+: ILLEGAL_ADDRESS \(700\)"
    if not blocking:
        text = (
            r"Double 0 .*, a copy of 512 bytes from the device: \w+: ILLEGAL_ADDRESS .*after decode.*blocking"
        )
    with pytest.raises(KernelError, match=text):
        recording.replay()
        get(device, y)
    with pytest.raises(KernelError, match="ILLEGAL_ADDRESS"):
        device.synchronize()
    device.close()
    double.library.double_reset()  # nothing can be freed after a failure


def test_a_closed_device(double):
    device = double.open()
    y = put(device, np.zeros(THREADS))
    recording = device.record(entry(step(X, X)), [y])
    recording.replay()
    device.close()
    device.close()
    assert double.left() == ""
    for call in recording.replay, device.synchronize, lambda: device.allocate(1):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    del recording, y
    gc.collect()


def test_a_device_that_is_forgotten_is_closed(double):
    device = double.open()
    y = put(device, np.zeros(THREADS))
    device.record(entry(step(X, X)), [y]).replay()
    double.devices.clear()
    del device
    gc.collect()
    assert double.left() == ""


def use(double):
    """What a program does with a device, in a few lines; the results."""
    device = double.open()
    ones, y, z = (put(device, np.full(4 * THREADS, value)) for value in (1, 0, 0))
    slots = step(X, Y, slot=0), step(X, Y, slot=1)
    copy = Launch("copy", (X, X, Y), grid=(1, 1), threads=THREADS, rows=4)
    recording = device.record(entry(copy, *slots, name="batch"), [ones, y])
    results = []
    for slots, memory in (2, y), (1, y), (2, z):
        recording.rebind(1, memory, 1)
        recording.limit(slots)
        recording.replay(4 * slots)
        results.append(get(device, memory))
    recording.profile()
    device.write(device.allocate(6 * SLOT), np.zeros(6 * SLOT, np.uint8))
    del recording
    device.allocate(1)
    device.synchronize()
    device.close()
    return np.stack(results)


GRAPH_FUNCTIONS = ["graph", "instantiate", "add_kernel_node", "set_kernel_node", "enable_node"]


@pytest.mark.parametrize(
    ("name", "calls_before"),
    [*((name, 0) for name in GRAPH_FUNCTIONS), *((name, 1) for name in GRAPH_FUNCTIONS[2:])],
)
def test_without_graphs_all_is_the_same_and_the_reason_is_told(double, name, calls_before):
    expected = use(double)
    double.library.double_reset()
    double.set()
    double.fail(name, calls_before, 801)
    with pytest.warns(
        RuntimeWarning, match=f"without graphs.*{FUNCTIONS[name][double.kind]}: error 801"
    ) as told:
        np.testing.assert_array_equal(use(double), expected)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_a_driver_that_is_too_old_for_graphs(double, monkeypatch):
    expected = use(double)
    cuda, hip, types = driver_api._FUNCTIONS["enable_node"]
    monkeypatch.setitem(driver_api._FUNCTIONS, "enable_node", (f"{cuda}_v9", f"{hip}_v9", types))
    with pytest.warns(RuntimeWarning, match="NodeSetEnabled_v9: this driver is too old"):
        np.testing.assert_array_equal(use(double), expected)


FREEING = [
    "free",
    "free_host",
    "destroy_stream",
    "destroy_event",
    "unload_module",
    "destroy_instance",
    "destroy_graph",
]


@pytest.mark.parametrize(
    "name", [it for it in FUNCTIONS if it not in (*GRAPH_FUNCTIONS, *FREEING, "memory_info")]
)
def test_every_function_may_fail(double, name):
    use(double)
    count = double.calls(name)
    assert count
    for calls_before in {0, 1, count // 2, count - 1} & set(range(count)):
        double.library.double_reset()
        double.set()
        double.fail(name, calls_before, 999)
        symbol = FUNCTIONS[name][double.kind]
        if name == "synchronize" and calls_before == count - 1:
            use(double)  # at the end
        else:
            with pytest.raises((ZllmcError, KernelError), match=f"{symbol}: error 999"):
                use(double)
        for device in double.devices:
            device.close()
        assert double.left() == ""


@pytest.mark.parametrize("name", FREEING)
def test_nothing_is_said_about_what_cannot_be_freed(double, name):
    with (
        warnings.catch_warnings(action="error") if sys.version_info >= (3, 11) else warnings.catch_warnings()
    ):
        use(double)
        assert double.calls(name)
        double.library.double_reset()
        double.set()
        double.fail(name)
        use(double)
    assert len(double.left().split()) == 2
    double.library.double_reset()


@pytest.mark.parametrize("double", [HIP], ids=["rocm"], indirect=True)
def test_the_gfx_name_is_found_in_the_device_s_properties(double):
    double.set(architecture="gfx90a")
    assert double.open("gfx90a").architecture == "gfx90a"
    double.fail("hipGetDevicePropertiesR0600", 0, 999)
    with pytest.raises(ZllmcError, match="hipGetDevicePropertiesR0600: error 999"):
        double.open("gfx90a")


OPEN = """
import numpy, sys
from zllmc.runtime.driver_api import CUDA, HIP
from zllmc.runtime.gpu import GpuDevice
kind, architecture = sys.argv[1:]
vendor = {"cuda": CUDA, "rocm": HIP}[kind]
device = GpuDevice(vendor, {"add": f"{architecture} add 3".encode()}, architecture, 32)
x = device.allocate(512)
device.write(x, numpy.ones(128, numpy.float32))
device.launch("add", (1, 1), 128, [(x, 0)] * 3)
print(device.read(x, numpy.float32, (128,)).sum())
"""


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_the_library_is_found_where_the_system_has_it(kind, libraries, tmp_path):
    (tmp_path / VENDORS[kind].libraries[0]).symlink_to(libraries[kind])
    command = [sys.executable, "-c", OPEN, kind, ARCHITECTURE[kind]]
    done = subprocess.run(
        command, env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "256.0\n", done.stderr


# -- real devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_real_device(kind, graphs):
    try:
        target = parse(kind)
    except ZllmcError as error:
        pytest.skip(str(error))
    compile = {"cuda": compile_cuda, "rocm": compile_hip}[kind]
    names = "accumulate", "copy", "reduce"
    kernels = {name: compile(source(target.dialect, (name,)), target).code for name in names}
    device = GpuDevice(VENDORS[kind], kernels, target.name, target.subgroup, graphs=graphs)
    ones, y, z = (put(device, np.full(THREADS, value)) for value in (1, 0, 0))
    recording = device.record(entry(step(X, Y), step(X, Y, slot=0), step(X, Y, slot=1)), [ones, y])
    recording.rebind(1, z, 1)
    for slots in 2, 1, 2:
        recording.limit(slots)
        recording.replay()
    assert get(device, y)[0] == 63 and get(device, z)[0] == 3
    sums = device.allocate(8)
    device.launch("reduce", (1, 1), THREADS, [(y, 0), (sums, 0)])
    assert device.read(sums, np.float32, (2,)).tolist() == [63 * THREADS, 63]
    device.close()
