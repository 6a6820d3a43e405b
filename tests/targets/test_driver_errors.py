"""Errors of NVIDIA's and AMD's drivers, over doubles of their libraries, and real ones if there are any."""

import gc
import subprocess
import sys
import warnings

import numpy as np
import pytest

from driver_cases import SLOT, THREADS, VENDORS, X, Y, entry, get, put, step
from driver_double import ARCHITECTURE, FUNCTIONS
from simt_kernels import source
from zllmc.codegen.cuda_toolchain import compile_cuda
from zllmc.codegen.rocm_toolchain import compile_hip
from zllmc.runtime import driver_api
from zllmc.runtime.device import KernelError
from zllmc.runtime.driver_api import CUDA, HIP
from zllmc.runtime.gpu import GpuDevice
from zllmc.targets import parse
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import Launch, Pointer

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


def test_launches_that_are_refused(double, monkeypatch):
    monkeypatch.setattr("zllmc.runtime.gpu.parameters", lambda binary: {binary.split()[1].decode(): 2})
    device = double.open(parameters={"accumulate": 2})
    y = put(device, np.zeros(THREADS))
    with pytest.raises(KernelError, match="there is no kernel nonsense"):
        device.launch("nonsense", (1, 1), 64, [(y, 0)])
    with pytest.raises(KernelError, match="accumulate is given numbers"):
        device.record(entry(step(7, 8)), [y])
    for pointers in 1, 3:
        with pytest.raises(KernelError, match=f"accumulate takes 2 pointers, not {pointers}"):
            device.launch("accumulate", (1, 1), THREADS, [(y, 0)] * pointers)
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
    command = [sys.executable, "-P", "-c", OPEN, kind, ARCHITECTURE[kind]]
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
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
