"""Launches whose pieces the threads of the CPU executor take one after another."""

import platform
from collections.abc import Iterator

import numpy as np
import pytest

if platform.system() != "Linux":
    pytest.skip("the CPU executor runs on Linux", allow_module_level=True)

from tvm.script import tirx as T

from zllmc.codegen.build_object import compile_object, llvm_target
from zllmc.codegen.cpu_executor import executor_object
from zllmc.runtime.cpu import CpuDevice
from zllmc.runtime.device import KernelError
from zllmc.runtime.memory import Memory, allocate
from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

N = 64


@T.prim_func(s_tir=True)
def tally(thread: T.int32, threads: T.int32, y: T.handle("int32")):
    """Adds the number of threads to this thread's element."""
    Y = T.decl_buffer((N,), "int32", data=y)
    Y[thread] = Y[thread] + threads


@T.prim_func(s_tir=True)
def refuse(thread: T.int32, threads: T.int32, who: T.int32):
    """Fails on thread number `who`."""
    assert thread != who, "refused"
    T.evaluate(0)


@pytest.fixture(scope="module")
def objects() -> list[bytes]:
    target = llvm_target(f"{platform.machine()}-linux-gnu")
    return [executor_object(target), compile_object({"tally": tally, "refuse": refuse}, target)]


@pytest.fixture(params=[1, 2, 3])
def device(objects: list[bytes], request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    device = CpuDevice(objects, request.param)
    yield device
    device.close()


def counts(memory: Memory) -> np.ndarray:
    return memory.view(np.int32, (N,))


@pytest.mark.parametrize("barrier", [True, False])
def test_every_piece_of_a_launch_runs_once_in_each_pass(device: CpuDevice, barrier: bool) -> None:
    threads = device.threads
    asked = [5 * threads, 3 * threads, 1000, 2]
    memory = [allocate(4 * N) for _ in asked]
    launches = [Launch("tally", (Pointer(i, 0),), barrier, pieces=n) for i, n in enumerate(asked)]
    recording = device.record(EntryPoint("prefill", 1, 1, tuple(launches)), memory)
    for _ in range(passes := 500):
        recording.replay()
    # At most six for each thread, and none where there are fewer than three, or one thread.
    runs = [5 * threads, 3 * threads, 6 * threads, threads] if threads > 1 else [1, 1, 1, 1]
    for filled, count in zip(memory, runs, strict=True):
        assert (counts(filled)[:count] == passes * count).all()
        assert not counts(filled)[count:].any()


@pytest.mark.parametrize("who", [0, 4, 8])
def test_a_failing_piece_stops_the_pass(objects: list[bytes], who: int) -> None:
    device, memory = CpuDevice(objects, 2), allocate(4 * N)
    add, fail = Launch("tally", (Pointer(0, 0),)), Launch("refuse", (who,), pieces=9)
    recording = device.record(EntryPoint("prefill", 1, 1, (add, fail, add)), [memory])
    for attempt in range(1, 100):
        with pytest.raises(KernelError, match="launch 1, kernel refuse"):
            recording.replay()
        assert counts(memory)[:2].tolist() == [2 * attempt] * 2
    device.close()
