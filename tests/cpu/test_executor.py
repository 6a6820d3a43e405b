"""The CPU executor: launches in order on all threads, failures, sessions, and a pool that behaves."""

import gc
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("the CPU executor runs on Linux", allow_module_level=True)

from tvm.script import tirx as T

from zllmc.codegen.build_object import compile_object, llvm_target
from zllmc.codegen.cpu_executor import executor_object
from zllmc.runtime.cpu import CpuDevice, Recording
from zllmc.runtime.device import KernelError
from zllmc.runtime.memory import Memory, allocate
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

N = 1021
PROCESSORS = len(os.sched_getaffinity(0))


@T.prim_func(s_tir=True)
def reverse(thread: T.int32, threads: T.int32, x: T.handle("int32"), y: T.handle("int32"), step: T.int32):
    """y[i] = x[N - 1 - i] + step: each thread writes its slice and reads another's."""
    X = T.decl_buffer((N,), "int32", data=x)
    Y = T.decl_buffer((N,), "int32", data=y)
    for i in T.serial(N * (thread + 1) // threads - N * thread // threads):
        Y[N * thread // threads + i] = X[N - 1 - (N * thread // threads + i)] + step


@T.prim_func(s_tir=True)
def refuse(thread: T.int32, threads: T.int32, who: T.int32):
    """Fails on thread number `who`."""
    assert thread != who, "refused"
    T.evaluate(0)


KERNELS = {"reverse": reverse, "refuse": refuse}


@pytest.fixture(scope="module")
def objects() -> list[bytes]:
    return built()


def built() -> list[bytes]:
    target = llvm_target(f"{platform.machine()}-linux-gnu")
    return [executor_object(target), compile_object(KERNELS, target)]


@pytest.fixture
def device(objects, request):
    device = CpuDevice(objects, getattr(request, "param", 2))
    yield device
    device.close()


def buffers() -> list[Memory]:
    memory = [allocate(4 * N), allocate(4 * N)]
    values(memory[0])[:] = np.arange(N)
    return memory


def values(memory: Memory):
    return memory.view(np.int32, (N,))


def there_and_back(first: int, second: int) -> tuple[Launch, Launch]:
    """Adds first + second to buffer 0, by way of buffer 1."""
    return (
        Launch("reverse", (Pointer(0, 0), Pointer(1, 0), first)),
        Launch("reverse", (Pointer(1, 0), Pointer(0, 0), second)),
    )


def record(device: CpuDevice, memory: list[Memory], *launches: Launch) -> Recording:
    return device.record(EntryPoint("decode", 1, 1, launches), memory)


@pytest.mark.parametrize("device", [1, 2, 3], indirect=True)
def test_dependent_launches_see_what_other_threads_wrote(device):
    memory = buffers()
    chain = there_and_back(1, 2) + there_and_back(-3, 4) + there_and_back(5, -2)
    recording = record(device, memory, *chain)
    replays = 10_000 if device.threads <= PROCESSORS else 300
    for _ in range(replays):
        recording.replay()
    np.testing.assert_array_equal(values(memory[0]), np.arange(N) + 7 * replays)


def test_more_threads_than_processors_still_make_progress(objects):
    device = CpuDevice(objects, 4 * PROCESSORS)
    memory = buffers()
    recording = record(device, memory, *there_and_back(1, 1))
    start = time.monotonic()
    for _ in range(200):
        recording.replay()
    assert time.monotonic() - start < 5
    device.close()
    np.testing.assert_array_equal(values(memory[0]), np.arange(N) + 400)


def test_pointer_offsets_and_negative_integers_arrive(device):
    memory = [allocate(8 * N + 64), allocate(4 * N)]
    memory[0].view(np.int32, (N,), 64)[:] = np.arange(N)
    record(device, memory, Launch("reverse", (Pointer(0, 64), Pointer(1, 0), -5))).replay()
    np.testing.assert_array_equal(values(memory[1]), np.arange(N)[::-1] - 5)


def test_launches_without_a_barrier_all_run_before_replay_returns(device):
    source, *targets = [allocate(4 * N) for _ in range(4)]
    launches = [
        Launch("reverse", (Pointer(0, 0), Pointer(i, 0), i), barrier=False)
        for i in range(1, 1 + len(targets))
    ]
    recording = record(device, [source, *targets], *launches)
    for _ in range(1000):
        for target in targets:
            values(target)[:] = 0
        recording.replay()
        assert [int(values(target).min()) for target in targets] == [1, 2, 3]


def test_an_entry_without_launches_replays(device):
    record(device, []).replay()


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("who", [0, 1])
def test_a_failing_launch_stops_the_pass_on_every_thread(device, who, barrier):
    memory = buffers()
    add = there_and_back(1, 1)
    broken = record(device, memory, *add, Launch("refuse", (who,), barrier=barrier), add[0], *add)
    good = record(device, memory, *add)
    for attempt in range(1, 200):
        values(memory[1])[:] = 0
        with pytest.raises(KernelError, match=r"decode, launch 2, kernel refuse: .*refused"):
            broken.replay()
        good.replay()
        np.testing.assert_array_equal(values(memory[0]), np.arange(N) + 4 * attempt)


def test_wrong_argument_count_is_an_error_not_a_crash(device):
    recording = record(device, buffers(), Launch("reverse", (Pointer(0, 0), 1)))
    with pytest.raises(KernelError, match=r"launch 0, kernel reverse: .*5 arguments"):
        recording.replay()


def test_rebind_switches_the_session(device):
    first, scratch = buffers()
    second = allocate(4 * N)
    recording = record(device, [first, scratch], *there_and_back(1, 2))
    recording.replay()
    recording.rebind(0, second)
    recording.replay()
    recording.replay()
    recording.rebind(0, first)
    recording.replay()
    np.testing.assert_array_equal(values(first), np.arange(N) + 6)
    np.testing.assert_array_equal(values(second), np.full(N, 6))


def test_rebind_refuses_memory_that_a_launch_would_leave(device):
    recording = record(
        device, [allocate(8 * N), allocate(4 * N)], Launch("reverse", (Pointer(0, 4 * N), 1, 1))
    )
    with pytest.raises(ValueError, match="buffer 0"):
        recording.rebind(0, allocate(4 * N))


def test_recordings_alternate(device):
    memory = buffers()
    up, down = record(device, memory, *there_and_back(3, 2)), record(device, memory, *there_and_back(-1, -1))
    for _ in range(500):
        up.replay()
        down.replay()
    np.testing.assert_array_equal(values(memory[0]), np.arange(N) + 1500)


def test_threads_of_the_host_take_turns(device):
    memory = buffers()
    recordings = [record(device, memory, *there_and_back(1, 0)) for _ in range(3)]

    def loop(recording: Recording) -> None:
        for _ in range(200):
            recording.replay()

    hosts = [threading.Thread(target=loop, args=(recording,)) for recording in recordings]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    np.testing.assert_array_equal(values(memory[0]), np.arange(N) + 600)


def test_recording_keeps_its_buffers(device):
    memory = buffers()
    recording = record(device, memory, *there_and_back(1, 2))
    view = values(memory[0])
    del memory
    gc.collect()
    recording.replay()
    np.testing.assert_array_equal(view, np.arange(N) + 3)


def test_profile_times_every_launch(device):
    memory = buffers()
    recording = record(device, memory, *there_and_back(1, 2), *there_and_back(0, 0))
    nanoseconds = recording.profile()
    assert nanoseconds.shape == (4,)
    assert (nanoseconds > 0).all()
    assert nanoseconds.sum() < 1e9
    np.testing.assert_array_equal(values(memory[0]), np.arange(N) + 3)


@pytest.mark.parametrize("device", [1, 2, 3], indirect=True)
def test_a_limited_batch_keeps_its_barriers(device):
    """Each slot writes buffer 1 or 2 of its own, and the last launch reads what slot 0 wrote."""
    source, result, *own = [allocate(4 * N) for _ in range(4)]
    values(source)[:] = np.arange(N)
    launches = [
        Launch("reverse", (Pointer(0, 0), Pointer(2, 0), 1), barrier=False, slot=0),
        Launch("reverse", (Pointer(0, 0), Pointer(2, 0), 2), barrier=True, slot=1),
        Launch("reverse", (Pointer(2, 0), Pointer(1, 0), 3), slot=0),
    ]
    recording = record(device, [source, result, own[0]], *launches)
    recording.rebind(2, own[1], slot=1)
    for _ in range(300):
        for slots in (1, 2):
            for memory in (result, *own):
                values(memory)[:] = 0
            recording.limit(slots)
            recording.replay()
            assert len(recording.launches) == 1 + slots == len(recording.profile())
            np.testing.assert_array_equal(values(result), np.arange(N) + 4)
            assert values(own[1]).any() == (slots == 2)
    recording.limit(None)
    assert recording.launches == tuple(launches)


def worker_threads() -> int:
    return sum(thread.name.startswith("zllmc-") for thread in threading.enumerate())


def test_close_ends_the_threads_and_a_new_device_works(objects):
    for _ in range(20):
        device = CpuDevice(objects, 3)
        memory = buffers()
        recording = record(device, memory, *there_and_back(1, 0))
        recording.replay()
        assert worker_threads() == 2
        device.close()
        device.close()
        assert worker_threads() == 0
        with pytest.raises(RuntimeError, match="closed"):
            recording.replay()
        np.testing.assert_array_equal(values(memory[0]), np.arange(N) + 1)


def test_a_forgotten_device_ends_its_threads(objects):
    device = CpuDevice(objects, 2)
    recording = record(device, buffers(), *there_and_back(1, 0))
    del device
    gc.collect()
    assert worker_threads() == 1, "the recording still needs the device"
    recording.replay()
    del recording
    gc.collect()
    assert worker_threads() == 0


def test_idle_threads_sleep(device):
    record(device, buffers(), *there_and_back(1, 0)).replay()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_replay_after_a_sleep_wakes_the_workers(device):
    memory = buffers()
    recording = record(device, memory, *there_and_back(1, 0))
    for _ in range(10):
        time.sleep(0.01)
        recording.replay()
    np.testing.assert_array_equal(values(memory[0]), np.arange(N) + 10)


def test_interrupt_arrives_between_passes(device):
    memory = buffers()
    recording = record(device, memory, *there_and_back(1, 1))
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    deadline = time.monotonic() + 10
    with pytest.raises(KeyboardInterrupt):
        while time.monotonic() < deadline:
            recording.replay()
    timer.join()
    before = values(memory[0]).copy()
    assert len(set(before - np.arange(N))) == 1, "a whole number of passes"
    recording.replay()
    np.testing.assert_array_equal(values(memory[0]), before + 2)


def test_main_thread_pinning_ends_with_the_device(objects):
    before = os.sched_getaffinity(0)
    device = CpuDevice(objects, 1, pin_main=True)
    assert len(os.sched_getaffinity(0)) == 1
    device.close()
    assert os.sched_getaffinity(0) == before


def test_runs_without_tvm_and_without_any_program(objects, tmp_path: Path):
    """A fresh process with no PATH that never closes its device: loads, runs, and exits."""
    for number, code in enumerate(objects):
        (tmp_path / f"{number}.o").write_bytes(code)
    script = f"""
        import sys
        sys.modules["tvm"] = None
        from pathlib import Path
        from zllmc.runtime.cpu import CpuDevice
        from zllmc.runtime.memory import allocate
        from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

        device = CpuDevice([Path("0.o"), Path("1.o")], 2)
        memory = [allocate({4 * N}), allocate({4 * N})]
        launch = Launch("reverse", (Pointer(0, 0), Pointer(1, 0), 42))
        device.record(EntryPoint("decode", 1, 1, (launch,)), memory).replay()
        print(set(memory[1].view("int32", ({N},)).tolist()))
    """
    environment = {key: value for key, value in os.environ.items() if key != "CXX"} | {"PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "{42}\n", "")


def test_unusable_objects_are_refused(objects, tmp_path: Path):
    for unusable in ([b"not an object"], [tmp_path / "missing.o"], objects[1:]):
        with pytest.raises(ZllmcError):
            CpuDevice(unusable, 1)


def test_unknown_kernel_is_refused(device):
    with pytest.raises(ZllmcError, match="no_such_kernel"):
        record(device, [], Launch("no_such_kernel", ()))


def test_pointer_outside_its_buffer_is_refused(device):
    for offset in (4 * N, -4):
        with pytest.raises(ValueError, match="buffer 0"):
            record(device, buffers(), Launch("reverse", (Pointer(0, offset), Pointer(1, 0), 1)))


def test_at_least_one_thread(objects):
    with pytest.raises(ValueError, match="threads"):
        CpuDevice(objects, 0)
    with pytest.raises(ZllmcError, match="at most"):
        CpuDevice(objects, 100_000)


def test_threads_that_the_system_refuses_are_an_error_and_end_those_that_run(objects, monkeypatch):
    start, before = threading.Thread.start, worker_threads()

    def refuse_the_third(thread: threading.Thread) -> None:
        if thread.name == "zllmc-3":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    with pytest.raises(ZllmcError, match="no more than 3 threads"):
        CpuDevice(objects, 4)
    assert worker_threads() == before


def test_objects_are_reproducible(objects):
    assert built() == objects
